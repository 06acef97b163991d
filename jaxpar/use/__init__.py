"""Uses of what a run has trained: predictions, generation, serving, exports and pages."""
