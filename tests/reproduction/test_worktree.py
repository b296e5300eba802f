"""The code of a run in a separate folder, on real git repositories."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reproduction.repositories import commit, git, repository
from visual_grpo.errors import UserError
from visual_grpo.reproduction.worktree import checked_out
from visual_grpo.tracking import lineage


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path / "project"


def test_the_commit_with_its_changes_is_checked_out_and_the_working_tree_stays(project: Path) -> None:
    first = repository(project)
    (project / "src/code.py").write_text("a = 2\n")
    (project / "my_reward.py").write_text("b = 1\n")
    patch = lineage.changes(project)
    commit(project)
    (project / "src/code.py").write_text("a = 3\n")
    before = git(project, "status", "--porcelain")
    with checked_out(project, first, patch, print) as place:
        assert (place.code / "src/code.py").read_text() == "a = 2\n"
        assert (place.code / "my_reward.py").read_text() == "b = 1\n"
        assert git(place.code, "rev-parse", "HEAD") == first
    assert not place.folder.exists()
    assert git(project, "worktree", "list").count("\n") == 0
    assert (git(project, "status", "--porcelain"), (project / "src/code.py").read_text()) == (before, "a = 3\n")


def test_a_project_below_the_repositorys_root_is_found_there(project: Path) -> None:
    (project / "below").mkdir(parents=True)
    (project / "below/file").write_text("x")
    state = repository(project)
    with checked_out(project / "below", state, "", print) as place:
        assert (place.code / "file").read_text() == "x"


def test_hooks_of_the_repository_do_not_run(project: Path, tmp_path: Path) -> None:
    state = repository(project)
    hook = project / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    with checked_out(project, state, "", print):
        pass
    assert not (tmp_path / "ran").exists()


def test_what_is_kept_is_said(project: Path) -> None:
    state, said = repository(project), list[str]()
    with checked_out(project, state, "", said.append) as place:
        place.kept = True
    assert place.code.is_dir()
    assert str(place.folder) in said[0]
    shutil.rmtree(place.folder)


def test_an_interrupt_leaves_no_worktree(project: Path) -> None:
    state = repository(project)
    with pytest.raises(KeyboardInterrupt), checked_out(project, state, "", print) as place:
        raise KeyboardInterrupt
    assert not place.folder.exists()
    assert git(project, "worktree", "list").count("\n") == 0


def test_a_commit_that_is_not_there_is_told_with_the_remedy(project: Path) -> None:
    repository(project)
    with (
        pytest.raises(UserError, match=r"0000000, is not in this repository(?s:.)*git fetch --all"),
        checked_out(project, "0" * 40, "", print),
    ):
        pass


def test_no_repository_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is in no git repository"), checked_out(tmp_path, "0" * 40, "", print):
        pass


def test_changes_that_do_not_apply_are_told_and_leave_nothing(project: Path) -> None:
    state = repository(project)
    (project / "src/code.py").write_text("a = 2\n")
    patch = lineage.changes(project).replace("a = 1", "a = 9")
    with (
        pytest.raises(UserError, match=r"changes\.diff of its adapters\) do not apply(?s:.)*src/code\.py"),
        checked_out(project, state, patch, print),
    ):
        pass
    assert git(project, "worktree", "list").count("\n") == 0


WORKING = """
import subprocess, sys, time
from pathlib import Path
from visual_grpo.reproduction.worktree import checked_out
with checked_out(Path(sys.argv[1]), sys.argv[2], "", print) as place:
    child = subprocess.Popen(["sleep", "60"], pass_fds=[place.descriptor])
    print(place.folder, child.pid, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_one_has_left_is_removed_once_nobody_works_there(project: Path) -> None:
    state, said = repository(project), list[str]()
    with checked_out(project, state, "", print) as place:
        place.kept = True
    command = [sys.executable, "-c", WORKING, str(project), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as working:
        assert working.stdout is not None
        name, child = working.stdout.readline().split()
        try:
            with checked_out(project, state, "", said.append):
                assert Path(name).is_dir(), "another one that is running"
            working.kill()
            working.wait()
            with checked_out(project, state, "", said.append):
                assert Path(name).is_dir(), "what it had started still runs"
        finally:
            os.kill(int(child), signal.SIGKILL)
    assert said == []
    for _ in range(100):  # The system closes the files of a killed process a little later.
        with checked_out(project, state, "", said.append) as own:
            listed = git(project, "worktree", "list")
        if said:
            break
        time.sleep(0.05)
    assert said == [f"Removed {name}, which a reproduction that was killed had left"]
    assert not Path(name).exists()
    assert str(own.folder) in listed
    assert name not in listed
    assert place.code.is_dir(), "what is kept on purpose stays"
    shutil.rmtree(place.folder)
