"""Commits of dvc.lock on a branch, beside whatever the user has in the working tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.retraining.branch import changed, check, commit, uncommitted


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.com")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text("old\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=first")
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
    made = commit(repository, "retraining", ["dvc.lock", "start.yml"], "Retrained")
    assert made == git(repository, "rev-parse", "retraining")
    assert git(repository, "show", "retraining:dvc.lock") == "new"
    assert git(repository, "show", "retraining:code.py") == "1"
    assert git(repository, "ls-tree", "--name-only", "retraining").split() == ["code.py", "dvc.lock"]
    assert git(repository, "log", "-1", "--format=%s", "retraining") == "Retrained"
    assert git(repository, "rev-parse", "retraining^") == git(repository, "rev-parse", "main")
    assert git(repository, "status", "--porcelain") == before
    assert git(repository, "symbolic-ref", "--short", "HEAD") == "main"


def test_the_branch_that_is_checked_out_goes_on_with_the_rest_as_it_was(repository: Path) -> None:
    (repository / "dvc.lock").write_text("new\n")
    before = half_done(repository)
    commit(repository, "main", ["dvc.lock"], "Retrained")
    assert git(repository, "show", "HEAD:dvc.lock") == "new"
    assert git(repository, "ls-tree", "--name-only", "HEAD").split() == ["code.py", "dvc.lock"]
    # Only dvc.lock is no longer changed.
    assert git(repository, "status", "--porcelain").splitlines() == [
        line for line in before.splitlines() if "dvc.lock" not in line
    ]


def test_the_same_contents_make_no_second_commit(repository: Path) -> None:
    assert commit(repository, "retraining", ["dvc.lock"], "Retrained") is None
    (repository / "dvc.lock").write_text("new\n")
    first = commit(repository, "retraining", ["dvc.lock"], "Retrained")
    assert commit(repository, "retraining", ["dvc.lock"], "Retrained") is None
    (repository / "dvc.lock").write_text("newer\n")
    assert commit(repository, "retraining", ["dvc.lock"], "Retrained") not in (None, first)
    assert git(repository, "rev-parse", "retraining^") == first


def test_without_a_repository_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"retrain\.commit: git rev-parse failed: .*not a git repository"):
        commit(tmp_path, "retraining", [], "Retrained")


def test_a_name_that_git_refuses_is_noticed_before_anything_is_done(repository: Path, tmp_path: Path) -> None:
    check(repository, "retraining")
    with pytest.raises(UserError, match=r"'re training\.\.x', which is no name of a branch"):
        check(repository, "re training..x")
    git(repository, "checkout", "--quiet", "--orphan", "empty")
    with pytest.raises(UserError, match=r"retrain\.commit: git rev-parse failed"):
        check(repository, "retraining")


def test_what_no_commit_has_is_named_be_it_the_first_that_git_tells(repository: Path, tmp_path: Path) -> None:
    assert changed(repository, ["dvc.lock", "start.yml"]) == uncommitted(repository, ["dvc.lock"]) == []
    (repository / "dvc.lock").write_text("new\n")
    (repository / "code.py").write_text("2\n")
    assert changed(repository, ["dvc.lock", "start.yml"]) == ["dvc.lock"]
    assert uncommitted(repository, ["dvc.lock"]) == ["code.py"]
    (repository / "start.yml").write_text("")
    assert changed(repository, ["dvc.lock", "start.yml"]) == ["dvc.lock", "start.yml"]


def test_a_folder_without_a_repository_has_nothing_to_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "dvc.lock").write_text("new")
    assert changed(tmp_path, ["dvc.lock"]) == []
