"""People choose between pictures on a local page; only on request."""
