"""Readers of the layouts in which people keep prompts and images, one file each."""
