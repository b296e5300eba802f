"""Turns parameters into adapters: builds a training, runs it, keeps checkpoints, resumes."""
