"""Measures FLOPs, compiled programs and time, and records versions and settings."""
