"""Where a run comes from, on real git and DVC repositories."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.operations.reproduction.repositories import dvc, git, repository
from visual_grpo.common.errors import UserError
from visual_grpo.tracking import run_context


@pytest.fixture
def project(tmp_path: Path) -> Path:
    repository(tmp_path / "project")
    (tmp_path / "project/data").mkdir()
    return tmp_path / "project"


def test_commit_and_state(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD")
    assert run_context.git_tags(project) == {"git.commit": head, "git.state": "clean"}
    for file, state in (
        ("notes.md", "clean"),
        ("tests/test_mine.py", "clean"),
        ("my_rewards.py", "dirty"),
        ("mine/rewards.py", "dirty"),
        ("examples/words/words.txt", "dirty"),
    ):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text("b = 2\n")
        assert run_context.git_tags(project)["git.state"] == state, file
        git(project, "add", ".")
        git(project, "commit", "-qm", file)


def test_the_changes_applied_to_the_commit_give_the_same_files(project: Path, tmp_path: Path) -> None:
    assert (run_context.git_tags(tmp_path), run_context.changes(tmp_path)) == ({}, b""), "without git"
    assert run_context.changes(project) == b""
    files = {"src/code.py": b"a = 2\r\n", "src/new.py": b"c = 3\n", "my_rewards.py": "b = 2 # é\n".encode("latin-1")}
    files["mine/rewards.py"] = b"d = 4\n"
    (project / "mine").mkdir()
    for file, content in files.items():
        (project / file).write_bytes(content)
    (tmp_path / "changes.diff").write_bytes(run_context.changes(project))
    git(tmp_path, "clone", "-q", "project", "copy")
    git(tmp_path / "copy", "apply", "../changes.diff")
    assert {file: (tmp_path / "copy" / file).read_bytes() for file in files} == files


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("diff.external", "echo"),
        ("color.ui", "always"),
        ("diff.noprefix", "true"),
        ("diff.mnemonicPrefix", "true"),
        ("diff.context", "0"),
        ("diff.relative", "true"),
        ("diff.upper.textconv", "tr a-z A-Z <"),
        ("status.showUntrackedFiles", "no"),
    ],
)
def test_a_users_settings_of_git_change_neither_the_state_nor_the_changes(
    project: Path, tmp_path: Path, setting: str, value: str
) -> None:
    below = project / "below"
    (below / "src").mkdir(parents=True)
    (below / "src/code.py").write_text("".join(f"x{line} = 1\n" for line in range(20)))
    (project / ".gitattributes").write_text("*.py diff=upper\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "below")
    git(tmp_path, "clone", "-q", "project", "copy")
    git(project, "config", setting, value)
    assert run_context.git_tags(below)["git.state"] == "clean"
    (below / "src/new.py").write_text("b = 2\n")
    assert run_context.git_tags(below)["git.state"] == "dirty"
    (below / "src/code.py").write_text((below / "src/code.py").read_text().replace("x5 = 1", "x5 = 500"))
    (tmp_path / "changes.diff").write_bytes(run_context.changes(below))
    git(tmp_path / "copy", "apply", "../changes.diff")
    for file in ("below/src/code.py", "below/src/new.py"):
        assert (tmp_path / "copy" / file).read_bytes() == (project / file).read_bytes()


def test_only_what_is_read_and_is_as_recorded_has_a_dvc_hash(project: Path) -> None:
    assert run_context.dvc_tags(project, ["data"]) == {}
    for name in ("data/a", "data/b", "photos"):
        (project / name).mkdir()
        (project / name / "file").write_text(name)
    (project / "conf/mine").mkdir(parents=True)
    stage = "{wdir: ../.., cmd: mkdir -p data/mine && cp photos/file data/mine/file, outs: [data/mine/file]}"
    (project / "conf/mine/dvc.yaml").write_text(f"stages: {{make: {stage}}}")
    dvc(project, "init", "-q")
    dvc(project, "add", "-q", "data/a", "data/b", "photos")
    dvc(project, "repro", "conf/mine/dvc.yaml")
    tags = run_context.dvc_tags(project, ["data", "photos"])
    assert tags.keys() == {"dvc.data/a", "dvc.data/b", "dvc.photos", "dvc.data/mine/file"}
    assert run_context.dvc_tags(project, ["data/a", "data/c", "photos"]).keys() == {"dvc.data/a", "dvc.photos"}
    (project / "data/a/file").write_text("changed")
    assert run_context.dvc_tags(project, ["data/a", "data/b"]) == {"dvc.data/b": tags["dvc.data/b"]}
    (project / ".git").rename(project / "no-git")
    assert run_context.dvc_tags(project, ["data"]) == {}


def test_a_damaged_dvc_lock_is_told_with_the_remedy(project: Path) -> None:
    dvc(project, "init", "-q")
    (project / "dvc.yaml").write_text("stages: {make: {cmd: make, outs: [data/a]}}")
    assert run_context.recorded(project) == {}
    for damaged in ("- 1\n", "<<<<<<< HEAD\nschema: '2.0'\n=======\n"):
        (project / "dvc.lock").write_text(damaged)
        with pytest.raises(UserError, match=r"^DVC: .*dvc\.lock.*git checkout"):
            run_context.recorded(project)


def test_mlflow_shows_who_ran_which_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/kedro", "run"])
    tags = run_context.tags(tmp_path)
    assert (tags["mlflow.user"], tags["mlflow.source.name"]) == ("ada", "/somewhere/bin/kedro")


def test_the_command_pastes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/kedro", "run", "--params=data.path=my photos,seed=3"])
    assert run_context.command() == ".venv/bin/kedro run '--params=data.path=my photos,seed=3'"
    monkeypatch.setattr(sys, "argv", ["/lib/kedro/__main__.py", "run"])
    assert run_context.command() == ".venv/bin/kedro run"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py", "a b"])
    assert run_context.command() == "python train.py 'a b'"
