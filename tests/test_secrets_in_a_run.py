"""Secrets planted in the configuration of a whole run: found nowhere on disk but where they were planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.small_project import environment, paste, small_project

IN_A_FILE, FROM_THE_ENVIRONMENT, IN_AN_ADDRESS = "planted-in-a-file-7f3a", "planted-outside-91bc", "planted-in-url-55de"
JUDGE = '''
import logging, os

def judge(prompts, images, api_key, service, where):
    """Uses all of its secrets, and lets them slip into the log, the terminal's errors and its own exceptions."""
    logging.getLogger("judge").warning("asking %s with %s as %s", service, api_key, where)
    if os.environ.get("JUDGE_FAILS"):
        raise RuntimeError(f"{service} refuses {api_key} of {where}")
    return [float(image.float().mean()) / 255 for image in images]
'''
COMMAND = ".venv/bin/kedro run --params=grpo.steps=2,tracking.tensorboard=data/tensorboard,tracking.wandb=offline"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_project(tmp_path_factory.mktemp("secrets") / "project")
    (folder / "src" / "my_judge.py").write_text(JUDGE)
    options = {
        "api_key": IN_A_FILE,
        "where": "${oc.env:JUDGE_ACCOUNT}",
        "service": f"https://someone:{IN_AN_ADDRESS}@judge.example/v1",
    }
    rewards = {"judge": {"function": "my_judge:judge", "options": options}}
    (folder / "conf/local/parameters.yml").write_text(yaml.safe_dump({"rewards": rewards}))
    return folder


def places(project: Path, secret: str) -> list[str]:
    """Files below the project that hold ``secret``, as text, in UTF-16 or within a database."""
    forms = [secret.encode(), secret.encode("utf-16-le")]
    files = (path for path in project.rglob("*") if path.is_file() and ".venv" not in path.parts)
    return sorted(
        path.relative_to(project).as_posix() for path in files if any(form in path.read_bytes() for form in forms)
    )


@pytest.mark.slow
def test_a_whole_run_and_one_that_fails_write_no_secret(project: Path) -> None:
    secret = f"JUDGE_ACCOUNT={FROM_THE_ENVIRONMENT} "
    whole = paste(secret + COMMAND, project)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert "asking" in whole.stdout + whole.stderr
    resumed = paste(f"{secret}{COMMAND},resume=auto,grpo.steps=3 --pipeline=train", project)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    failed = paste(f"{secret}JUDGE_FAILS=1 {COMMAND},seed=1", project)
    assert failed.returncode == 1
    assert "refuses (hidden) of (hidden)" in failed.stdout + failed.stderr
    for planted, allowed in (
        (IN_A_FILE, ["conf/local/parameters.yml"]),
        (IN_AN_ADDRESS, ["conf/local/parameters.yml"]),
        (FROM_THE_ENVIRONMENT, []),
    ):
        assert places(project, planted) == allowed
        for run in (whole, resumed, failed):
            assert planted not in run.stdout + run.stderr
    kinds = {path.suffix for path in project.rglob("*") if path.is_file() and ".venv" not in path.parts}
    assert {".db", ".html", ".json", ".wandb", ".safetensors", ".parquet"} <= kinds, "what has been searched"
    assert environment(project).get("JUDGE_ACCOUNT") is None
