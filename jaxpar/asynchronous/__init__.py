"""Asynchronous data parallelism, driven by a table of which gradient, from which weights, makes which update."""
