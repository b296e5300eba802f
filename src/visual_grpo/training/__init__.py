"""Turns parameters into adapters: builds a training, runs it, keeps checkpoints, resumes; generates the samples of an
evaluation, and says what results were made with."""
