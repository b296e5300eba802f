"""A task per pipeline, and the gate last. Written by `make airflow-dag`: change schedules/airflow/dag.py.j2 instead."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

PROJECT = Path(os.environ.get("VISUAL_GRPO_PROJECT", Path(__file__).resolve().parents[3]))
KEY = "{{ macros.uuid.uuid5(macros.uuid.NAMESPACE_URL, dag.dag_id ~ run_id).hex }}"
"""The first task makes an MLflow run of this key, and the others find it: one run per DAG run."""
TRACKED = {"MLFLOW_RUN_ID": KEY, "MLFLOW_RUN_NAME": "airflow {{ run_id }}"}


def kedro(pipeline: str, options: str = "", variables: dict[str, str] | None = None) -> BashOperator:
    """In the project's own environment, the locked one; Airflow's has none of its packages."""
    return BashOperator(
        task_id=pipeline,
        bash_command=f".venv/bin/kedro run --pipeline={pipeline} --env=local{options}",
        cwd=str(PROJECT),
        env=variables,
        append_env=True,
    )


with DAG(
    dag_id="visual_grpo",
    schedule="0 3 * * 0",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # All write into one folder of outputs.
    max_active_runs=1,
    max_active_tasks=1,
    default_args={"retries": 1, "retry_delay": timedelta(minutes=5)},
):
    starter = kedro("starter", variables=TRACKED)
    data_preparation = kedro("data_preparation", variables=TRACKED)
    baseline = kedro("baseline", variables=TRACKED)
    train = kedro("train", options=" --params=resume=same", variables=TRACKED)
    evaluate = kedro("evaluate", variables=TRACKED)
    # Tracks nothing of a training: it judges one.
    promote = kedro("promote")

    [starter] >> data_preparation
    [data_preparation, starter] >> baseline
    [baseline, data_preparation, starter] >> train
    [baseline, data_preparation, starter, train] >> evaluate
    evaluate >> promote
