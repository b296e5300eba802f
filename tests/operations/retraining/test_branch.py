"""Commits of dvc.lock on a branch, beside whatever the user has in the working tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operations.reproduction.repositories import commit as commit_all
from tests.operations.reproduction.repositories import git
from visual_grpo.operations.retraining.job import commit

FILES = [Path("dvc.lock")]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.com")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text("old\n")
    commit_all(tmp_path)
    return tmp_path


def half_done(folder: Path) -> str:
    """What a user may be in the middle of; returns what git says of it."""
    (folder / "code.py").write_text("2\n")
    (folder / "new.py").write_text("3\n")
    git(folder, "add", "new.py")
    return git(folder, "status", "--porcelain")


def test_another_branch_gets_the_file_and_nothing_else_changes(repository: Path) -> None:
    (repository / "dvc.lock").write_text("new\n")
    before = half_done(repository)
    made = commit(repository, "retraining", FILES, "Retrained")
    assert made == git(repository, "rev-parse", "retraining")
    assert git(repository, "show", "retraining:dvc.lock") == "new"
    assert git(repository, "show", "retraining:code.py") == "1"
    assert git(repository, "ls-tree", "--name-only", "retraining").split() == ["code.py", "dvc.lock"]
    assert git(repository, "log", "-1", "--format=%s", "retraining") == "Retrained"
    assert git(repository, "rev-parse", "retraining^") == git(repository, "rev-parse", "main")
    assert git(repository, "status", "--porcelain") == before
    assert git(repository, "symbolic-ref", "--short", "HEAD") == "main"


def test_the_branch_that_is_checked_out_goes_on_with_the_rest_as_it_was(repository: Path) -> None:
    half_done(repository)
    (repository / "dvc.lock").write_text("new\n")
    commit(repository, "main", FILES, "Retrained")
    assert git(repository, "show", "HEAD:dvc.lock") == "new"
    assert git(repository, "status", "--porcelain").split() == ["M", "code.py", "A", "new.py"]


def test_the_same_contents_make_no_second_commit(repository: Path) -> None:
    assert commit(repository, "retraining", FILES, "Retrained") is None
    (repository / "dvc.lock").write_text("new\n")
    first = commit(repository, "retraining", FILES, "Retrained")
    assert commit(repository, "retraining", FILES, "Retrained") is None
    (repository / "dvc.lock").write_text("newer\n")
    assert commit(repository, "retraining", FILES, "Retrained") not in (None, first)
    assert git(repository, "rev-parse", "retraining^") == first
