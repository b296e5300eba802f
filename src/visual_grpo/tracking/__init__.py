"""MLflow, which only this package imports: runs, registry, sync and serving."""
