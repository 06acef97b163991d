"""Writes a checkpoint in a format that other programs read, for the command `jaxpar export`."""
