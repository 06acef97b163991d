"""Measures FLOPs, compiled programs and time."""
