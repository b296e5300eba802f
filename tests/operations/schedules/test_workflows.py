"""The workflows' steps on local repositories, and that GitHub would accept the files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operations.reproduction.repositories import git
from tests.small_project import ROOT
from visual_grpo.operations.retraining.job import Code

RETRAIN = ROOT / "schedules/github-actions.yml"
UPGRADE = ROOT / ".github/workflows/upgrade.yml"
MERGE, CALL, KEEP = (
    "Start from the last retraining, with the main branch merged",
    "Retrain",
    "Keep the results",
)
_PYTHON = f"""#!/bin/bash
if [ "$1" = -m ]; then
    echo "of $(cat news)" > dvc.lock; mkdir -p data/08_reporting; cd data/08_reporting
    echo "{{\\"code\\": $CODE, \\"outcome\\": \\"it\\", \\"sentence\\": \\"said\\"}}" > retraining.json
    exit "$CODE"
fi
exec {sys.executable} "$@"
"""


def read(file: Path) -> dict[str, Any]:
    """YAML 1.1 takes the key ``on`` for true."""
    tree: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in tree.items()}


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in read(file)["jobs"].values() for step in job["steps"]]


def script(file: Path, name: str) -> str:
    """Of the step with this name."""
    [found] = [step["run"] for step in steps(file) if step.get("name") == name]
    return str(found)


def run(text: str, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a step's script in ``folder``, with ``shell: bash``."""
    assert "${{" not in text
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


class Runner:
    """A runner's checkout of a repository, with stand-ins for the retraining and DVC."""

    def __init__(self, folder: Path) -> None:
        self.origin, self.work, self.summary = folder / "origin", folder / "work", folder / "summary"
        self.origin.mkdir()
        git(self.origin, "init", "--quiet")
        (self.origin / "params.yaml").touch()
        (self.origin / ".gitignore").write_text(".venv\ndata\n")
        shutil.copytree(ROOT / "schedules", self.origin / "schedules")
        self.push_news("1")
        git(folder, "clone", "--quiet", str(self.origin), str(self.work))
        (self.work / ".venv/bin").mkdir(parents=True)
        for name, text in {"python": _PYTHON, "dvc": "#!/bin/bash\n"}.items():
            (self.work / ".venv/bin" / name).write_text(text)
            (self.work / ".venv/bin" / name).chmod(0o755)

    def push_news(self, text: str) -> None:
        """A change of the main branch."""
        (self.origin / "news").write_text(text)
        git(self.origin, "add", "--all")
        git(self.origin, "commit", "--quiet", "--message", f"News {text}")

    def retrain(self, code: int) -> int:
        """The exit code of the step that retrains; what follows is run only if that is 0."""
        git(self.work, "fetch", "--quiet", "origin")
        commit = git(self.work, "rev-parse", "origin/main")
        git(self.work, "checkout", "--quiet", "--force", "--detach", commit)
        own = {"GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_SHA": commit, "CODE": str(code)}
        variables = read(RETRAIN)["env"] | own
        done = run(script(RETRAIN, MERGE), self.work, variables)
        assert done.returncode == 0, done.stderr
        called = run(script(RETRAIN, CALL), self.work, variables)
        self.said = called.stdout
        if called.returncode == 0:
            done = run(script(RETRAIN, KEEP), self.work, variables)
            assert done.returncode == 0, done.stderr
        return called.returncode

    def log(self) -> list[str]:
        return git(self.origin, "log", "--first-parent", "--format=%s", "retraining").splitlines()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_every_training_is_a_commit_on_the_branch_and_the_main_branch_flows_into_it(runner: Runner) -> None:
    assert runner.retrain(Code.DONE) == 0
    assert runner.log() == ["Retrained", "News 1"]
    runner.push_news("2")
    assert runner.retrain(Code.NOT_PROMOTED) == 0
    before = runner.log()
    assert len(before) == 4
    assert git(runner.origin, "show", "retraining:dvc.lock") == "of 2"
    assert git(runner.origin, "log", "--format=%s", "main").splitlines() == ["News 2", "News 1"]
    assert runner.retrain(Code.DONE) == 0
    assert runner.log() == before, "nothing was to be done, so nothing is committed"


@pytest.mark.parametrize("code", sorted(Code))
def test_only_what_is_no_failure_is_green_and_pushed(runner: Runner, code: int) -> None:
    green = code in (Code.DONE, Code.NOT_PROMOTED)
    assert runner.retrain(code) == (0 if green else code)
    assert ("::notice title=Not promoted::" in runner.said) is (code == Code.NOT_PROMOTED)
    assert ("::error title=Retraining failed::" in runner.said) is not green
    assert bool(git(runner.origin, "branch", "--list", "retraining")) is green
    assert runner.summary.read_text() == "## it\n\nsaid\n"


@pytest.mark.parametrize("file", [RETRAIN, UPGRADE], ids=lambda file: file.name)
def test_what_a_workflow_names_is_there(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for step in steps(file):
        text = step.get("run", "")
        subprocess.run(["bash", "-n", "-c", text], check=True)
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
        for path in re.findall(r"(?:schedules|\.ci)/[\w./]+", text):
            assert (ROOT / path).exists(), path
    assert (read(file)["concurrency"] or {})["group"]


def test_the_upgrade_tells_what_has_changed(tmp_path: Path) -> None:
    (tmp_path / "before").write_text(
        "a==1.0 \\\n    --hash=x\nb==2 ; sys_platform == 'linux'\nb==3 ; sys_platform != 'linux'\ngone==1\nsame[x]==1\n"
    )
    (tmp_path / "after").write_text("a==1.1 \\\n    --hash=y\nb==2 ; sys_platform == 'linux'\nnew==0.1\nsame[x]==1\n")
    words = [sys.executable, str(ROOT / ".ci/lock_changes.py"), str(tmp_path / "before"), str(tmp_path / "after")]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == (
        "| package | from | to |\n|---|---|---|\n"
        "| a | 1.0 | 1.1 |\n| b | 2, 3 | 2 |\n| gone | 1 | - |\n| new | - | 0.1 |\n"
    )


def test_the_upgrade_fails_and_tells_where_a_check_fails() -> None:
    check, propose = read(UPGRADE)["jobs"].values()
    checks = [step["id"] for step in check["steps"] if step.get("continue-on-error")]
    assert checks == ["lint", "tests", "audit", "gate"]
    assert all(check["outputs"][own] == f"${{{{ steps.{own}.outcome }}}}" for own in checks)
    assert "failure" in check["steps"][-1]["if"]
    told = propose["steps"][-1]["env"]["CHECKS"]
    assert all(f"needs.check.outputs.{own} }}}}" in told for own in checks)
    assert propose["if"] == "!cancelled() && needs.check.outputs.changed == 'true'"


def test_the_upgrade_proposes_the_locks_and_nothing_else(tmp_path: Path) -> None:
    """Whatever new packages have put beside them."""
    origin, work, locks = tmp_path / "origin", tmp_path / "work", ("requirements.lock", "workers/a/requirements.lock")
    (origin / "workers/a").mkdir(parents=True)
    shutil.copytree(ROOT / ".ci", origin / ".ci")
    git(origin, "init", "--quiet")
    for name in (*locks, "Makefile"):
        (origin / name).write_text("a==1 \\\n")
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "--message", "Before")
    git(tmp_path, "clone", "--quiet", str(origin), str(work))
    for name in (*locks, "Makefile", "new.lock", ".ci/lock_changes.py"):
        (work / "upgraded" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "upgraded" / name).write_text("a==2 \\\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gh").write_text('#!/bin/bash\n[ "$2" = list ] && echo 0 || echo "$@" >> "$CALLS"\n')
    (tmp_path / "bin/gh").chmod(0o755)
    variables = {name: str(tmp_path / name) for name in ("GITHUB_STEP_SUMMARY", "CALLS")}
    variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "BRANCH": "upgrade", "CHECKS": "lint: success\n"}
    done = run(script(UPGRADE, "Open a pull request"), work, variables)
    assert done.returncode == 0, done.stderr
    assert git(origin, "diff", "--name-only", "main", "upgrade").splitlines() == list(locks)
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().startswith("- lint: success\n\n| package | from | to |\n")
    assert (tmp_path / "CALLS").read_text().startswith("pr create --title Upgrade dependencies")
