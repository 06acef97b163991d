"""Examines the processes of a run before it starts."""
