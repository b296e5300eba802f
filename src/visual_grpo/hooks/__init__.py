"""Kedro hooks: checks before the first node, locks, typed parameters, the MLflow run."""
