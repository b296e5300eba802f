"""Worlds: rendered datasets, and small base models that are pretrained on them."""
