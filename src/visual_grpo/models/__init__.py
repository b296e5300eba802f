"""Policies behind one protocol: rollout, and replay with gradient."""
