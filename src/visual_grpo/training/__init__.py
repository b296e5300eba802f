"""From parameters to adapters: build a training, run it, keep checkpoints, resume."""
