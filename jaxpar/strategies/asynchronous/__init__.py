"""Asynchronous data parallelism, driven by a table that gives the weights and the update of each gradient."""
