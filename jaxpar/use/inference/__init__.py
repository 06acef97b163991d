"""Uses of a trained model: loading it from the workdir of its run, and what it predicts."""
