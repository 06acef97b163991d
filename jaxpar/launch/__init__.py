"""Starts, connects and stops the processes of a run."""
