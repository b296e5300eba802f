"""Loads models and LoRA, and makes them policies behind one protocol: rollout, and replay with gradient."""
