"""Runs any table on devices: stage programs, and the engine that steps through the clocks."""
