"""Checks before the first node that parameters, data, rewards, model and machine fit together."""
