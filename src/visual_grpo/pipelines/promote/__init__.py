"""Judges an adapter against the champion and the base model, and makes it champion if it is better; on request."""
