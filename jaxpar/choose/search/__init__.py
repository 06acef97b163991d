"""Searches for a schedule that fits given action times and a given memory limit."""
