"""The small GLM-Image: its modules, tokens and pretraining."""
