"""Drawn scenes for negative points: objects of two touching parts that a segmenter confuses."""
