"""The words world: signs with short words, for text in images."""
