"""The parts of a run: build from the config, start or resume, evaluate, log and report."""
