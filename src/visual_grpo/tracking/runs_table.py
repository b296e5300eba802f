"""``python -m visual_grpo.tracking.runs_table``: the address of the runs in MLflow's interface, best result first."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

from visual_grpo.third_party_output import silence_libraries
from visual_grpo.tracking.relocation import use_server
from visual_grpo.tracking.result import GAIN

EXPERIMENT = "visual_grpo"


def address(experiment_id: str, server: str = "http://127.0.0.1:5000") -> str:
    """Of the table of an experiment's runs, sorted by the gain on held-out prompts."""
    order = quote(f"metrics.`{GAIN}`", safe="")
    return f"{server}/#/experiments/{experiment_id}/runs?orderByKey={order}&orderByAsc=false"


def main() -> None:
    silence_libraries()
    import mlflow

    uri = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    use_server(uri, Path.cwd())
    experiment = mlflow.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        print(f"There are no runs in {uri} yet: make demo, or .venv/bin/kedro run")  # noqa: T201
        return
    print(f"Runs, best result first: {address(experiment.experiment_id)}")  # noqa: T201


if __name__ == "__main__":
    main()
