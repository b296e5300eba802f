"""Deletes old versions of the registered model and old runs of retrainings (``retrain.keep_versions``, ``keep_runs``).

What an alias points to stays, and so does what a rollback would need.
"""

from __future__ import annotations

from visual_grpo.tracking.cleaning import delete_runs, delete_versions, mark_run


def apply(
    tracking_uri: str, model: str, alias: str, run_id: str | None, *, versions: int | None, runs: int | None
) -> list[str]:
    """Deletes what is older than the newest ``versions`` and ``runs``; None = all are kept. Says what was deleted.

    Args:
        run_id: the run of the present retraining, which may be deleted by a later one.
    """
    removed = []
    if run_id is not None:
        mark_run(tracking_uri, run_id, model)
    if versions is not None:
        removed += [f"version {number}" for number in delete_versions(tracking_uri, model, alias, keep=versions)]
    if runs is not None:
        removed += [f"run {run_id}" for run_id in delete_runs(tracking_uri, model, keep=runs)]
    return removed
