"""Rendered shapes: pictures, edits, and the rewards that judge them."""
