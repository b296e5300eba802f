"""A training repeated: its commit, environment, data, base model and parameters in a separate folder."""
