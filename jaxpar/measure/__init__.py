"""Counting and reading: FLOPs, compiled programs, seconds, versions."""
