"""Runs schedule tables on devices: stage programs, and the executors, in lockstep (engine.py) or not (dispatch.py)."""
