"""A run from its config to its result: built, started, stepped, evaluated, reported."""
