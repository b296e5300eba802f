"""Kedro hooks: checks before the first node, locks, typed parameters, the MLflow run.

Nodes only transform data; everything around them is here.
"""
