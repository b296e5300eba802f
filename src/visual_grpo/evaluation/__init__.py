"""Compares the baseline with the trained policy on the same prompts and seeds: paired differences with intervals."""

CONFIDENCE = 0.95
"""Coverage of every two-sided interval."""
