"""Compares the baseline with the trained policy on the same prompts and seeds: paired differences with intervals."""

CONFIDENCE = 0.95
"""Of two-sided intervals."""
