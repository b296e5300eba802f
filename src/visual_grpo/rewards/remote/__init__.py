"""Rewards that other processes compute, over HTTP: one's own workers, and vision-language models as judges."""
