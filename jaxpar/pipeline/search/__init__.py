"""Finds a schedule for given times and memory."""
