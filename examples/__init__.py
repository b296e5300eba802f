"""Worlds that show one thing each, outside the package: they are loaded like a user's own."""
