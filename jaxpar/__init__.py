"""Distributed training in JAX where every parallel strategy is a line of config."""
