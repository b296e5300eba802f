"""Folders in which other processes are at work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from visual_grpo.folders import walked
from visual_grpo.tracking.deliver import _roots
from visual_grpo.tracking.lineage import dvc_files
from visual_grpo.tracking.spool import FOLDER


@pytest.fixture
def vanishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which another process removes a run's spool between its listing and a look into it."""
    kept, gone = tmp_path / "data/a.dvc", tmp_path / "data" / FOLDER / "run/files"
    gone.mkdir(parents=True)
    kept.write_text("outs: []")
    scandir = os.scandir

    def look(folder="."):
        if not isinstance(folder, int) and Path(folder).name == "files":
            monkeypatch.undo()
            shutil.rmtree(gone.parent)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", look)
    return tmp_path


def test_what_is_removed_meanwhile_is_left_out(vanishing: Path) -> None:
    assert {path.name for path in walked(vanishing)} == {"data", "a.dvc", FOLDER, "run", "files"}
    assert not (vanishing / "data" / FOLDER / "run").exists()


def test_a_run_starts_while_another_one_empties_its_spool(vanishing: Path) -> None:
    """Its lineage looks for what DVC tracks in all of ``data``."""
    assert dvc_files(vanishing) == [vanishing / "data/a.dvc"]


def test_a_delivery_looks_for_spools_while_another_one_empties_them(vanishing: Path) -> None:
    assert _roots([vanishing / "data"]) == [vanishing / "data" / FOLDER]
