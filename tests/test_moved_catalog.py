"""A user's catalog moves every result: all commands follow it, and nothing is read or written at the old places."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.operations.reproduction.repositories import commit, git
from tests.small_project import paste, small_project

COMMANDS = """
kedro run
kedro run --pipeline=generate "--params=generate.prompt=a small red circle in the centre"
kedro run --pipeline=compare
kedro run --pipeline=score --params=score.path=elsewhere/generated,reward=null,rewards.jpeg_size.weight=1
kedro run --pipeline=reward_report --params=reward_report.prompts=2,reward_report.samples=2
kedro run --pipeline=plan
kedro run --pipeline=promote || [ $? = 3 ]  # Not better, so not promoted.
kedro run --pipeline=reproduce --params=run=latest
python -m visual_grpo.operations.lineage latest
rm mlflow.db && python -m visual_grpo.tracking.sync
python -m visual_grpo.operations.retraining || [ $? = 3 ]

"""


@pytest.mark.slow
def test_every_command_follows_a_catalog_that_moves_everything(tmp_path: Path) -> None:
    project = small_project(tmp_path / "project")
    base = yaml.safe_load((project / "conf/base/catalog.yml").read_text(encoding="utf-8"))
    files = {
        name: Path(entry["filepath"].replace("${output:}", "data"))
        for name, entry in base.items()
        if "filepath" in entry
    }
    moved = {name: {**base[name], "filepath": f"elsewhere/{name}{file.suffix}"} for name, file in files.items()}
    (project / "conf/local/catalog.yml").write_text(yaml.safe_dump(moved), encoding="utf-8")
    git(project, "init", "-q")
    (project / ".git/info/exclude").write_text(".venv\n")
    commit(project)
    printed = ""
    for command in COMMANDS.strip().splitlines():
        done = paste(command, project)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        printed += done.stdout
        assert [name for name, file in files.items() if (project / file).exists()] == [], command
    made = {name for name in moved if (project / moved[name]["filepath"]).exists()}
    unmade = {"negative_labels", "votes", "rollback_result", "publication", "gpu_check", "model_check"}
    assert made == moved.keys() - unmade
    assert "added to MLflow: training of" in printed
    assert "Reproduced: every file of the adapters and every metric is the run's" in printed
