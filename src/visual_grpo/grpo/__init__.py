"""Advantages, losses, the trainer, its checks and several processes, in pure torch."""
