"""Asynchronous data parallelism: a table says which gradient, computed from which weights, makes which update."""
