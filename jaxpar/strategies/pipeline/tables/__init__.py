"""Schedule tables in plain NumPy, without JAX: construction, validation, simulation and drawing."""
