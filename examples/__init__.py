"""Worlds that show one thing each, beside the package: they come in as a user's own would."""
