"""Predicts what strategies cost on a cluster, without compiling them, and searches for the fastest one."""
