"""Pipelines: a schedule is a table made in NumPy ahead of time; one engine runs any table."""
