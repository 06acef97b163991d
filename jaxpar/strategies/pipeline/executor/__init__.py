"""Runs schedule tables on devices: the stage programs, and the engine that steps through the clocks."""
