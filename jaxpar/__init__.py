"""Distributed training in JAX: every parallel strategy is a line of config."""
