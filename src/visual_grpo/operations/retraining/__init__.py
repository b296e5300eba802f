"""Retraining as one command that a scheduler calls (`make retrain`): DVC repeats what changed, the gate judges it."""
