"""Chooses what a config leaves open: every `auto` becomes a value that a person could have written."""
