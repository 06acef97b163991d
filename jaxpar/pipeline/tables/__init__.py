"""Schedules as tables, in plain NumPy: made, validated, simulated, drawn. No JAX."""
