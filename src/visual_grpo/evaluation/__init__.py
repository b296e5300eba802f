"""Baseline against trained: same prompts, same seeds, paired differences and their uncertainty."""
