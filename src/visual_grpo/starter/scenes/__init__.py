"""The world of scenes: objects of two touching parts, where a negative point really matters."""
