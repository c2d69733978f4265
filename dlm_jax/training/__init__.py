"""Training: the optimiser, the step, the run and its loop."""
