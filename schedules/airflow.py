"""A DAG for Airflow: one task per pipeline, run in the project's environment; the last task is the gate.

Set VISUAL_GRPO_PROJECT to the project's path. All tasks of a DAG run log to one MLflow run.
"""

import os
from datetime import datetime

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, chain

OPTIONS = {"train": " --params=resume=same"}  # A retry resumes from the checkpoint.
KEY = "{{ macros.uuid.uuid5(macros.uuid.NAMESPACE_URL, dag.dag_id ~ run_id).hex }}"

with DAG(
    dag_id="visual_grpo",
    schedule="0 3 * * 0",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_tasks=1,  # All tasks write into the same output folder.
    max_active_runs=1,
    default_args={"retries": 1},
):
    chain(
        *(
            BashOperator(
                task_id=pipeline,
                bash_command=f".venv/bin/kedro run --pipeline={pipeline}{OPTIONS.get(pipeline, '')}",
                cwd=os.environ["VISUAL_GRPO_PROJECT"],
                env={} if pipeline == "promote" else {"MLFLOW_RUN_ID": KEY, "MLFLOW_RUN_NAME": "airflow {{ run_id }}"},
                append_env=True,
                skip_on_exit_code=3,  # Not promoted, which is no failure.
            )
            for pipeline in ("starter", "data_preparation", "baseline", "train", "evaluate", "promote")
        )
    )
