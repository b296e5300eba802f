"""Drawn words: signs with short words, for text in images."""
