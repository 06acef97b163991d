"""Processes: how they are started, find each other, are stopped, and end."""
