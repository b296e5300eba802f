"""DVC's stages of a small real repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from visual_grpo.retraining.commands import Commands, dvc
from visual_grpo.retraining.outcome import DataRefusedError, StageFailedError
from visual_grpo.retraining.stages import Stages

STAGES = """
stages:
  data_preparation:
    cmd: cp raw.txt prepared.txt
    deps: [raw.txt]
    outs: [prepared.txt]
"""


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    """Prepared once, of raw data that are others now."""
    subprocess.run(dvc("init", "--no-scm", "--quiet"), cwd=tmp_path, check=True)
    (tmp_path / "dvc.yaml").write_text(STAGES)
    (tmp_path / "raw.txt").write_text("earlier")
    found = Stages(Path("dvc.yaml"), Commands(project=tmp_path, deadline=None))
    found.prepare(lambda: None)
    (tmp_path / "raw.txt").write_text("later")
    return found


def refuse() -> None:
    raise DataRefusedError("too few")


def test_data_that_are_refused_make_room_for_the_earlier_ones(stages: Stages) -> None:
    folder, lock = stages.commands.project, stages.lock.read_bytes()
    with pytest.raises(DataRefusedError, match=r"^too few$"):
        stages.prepare(refuse)
    assert (folder / "prepared.txt").read_text() == "earlier"
    assert stages.lock.read_bytes() == lock
    stages.prepare(lambda: None)
    assert (folder / "prepared.txt").read_text() == "later"


def test_a_call_after_one_that_was_killed_before_the_check_puts_the_earlier_ones_back(stages: Stages) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    folder, lock = stages.commands.project, stages.lock.read_bytes()
    with pytest.raises(Killed):
        stages.prepare(die)
    assert stages.lock.read_bytes() != lock
    with pytest.raises(DataRefusedError):
        stages.prepare(refuse)
    assert stages.lock.read_bytes() == lock
    assert (folder / "prepared.txt").read_text() == "earlier"


def test_data_that_cannot_be_prepared_make_room_for_the_earlier_ones(stages: Stages) -> None:
    folder = stages.commands.project
    (folder / "raw.txt").unlink()
    with pytest.raises(StageFailedError, match="dvc repro"):
        stages.prepare(lambda: None)
    assert (folder / "prepared.txt").read_text() == "earlier"
    assert not (folder / ".dvc.lock.earlier").exists()


def test_data_that_are_refused_stay_refused_where_the_earlier_ones_are_gone(stages: Stages) -> None:
    shutil.rmtree(stages.commands.project / ".dvc/cache")
    with pytest.raises(DataRefusedError, match=r"too few\nThe earlier data could not be put back: .*checkout"):
        stages.prepare(refuse)


def test_imported_data_beside_the_folder_of_data_are_updated_too(tmp_path: Path) -> None:
    subprocess.run(dvc("init", "--no-scm", "--quiet"), cwd=tmp_path, check=True)
    (tmp_path / "elsewhere").write_text("1")
    subprocess.run(dvc("import-url", "--quiet", str(tmp_path / "elsewhere"), "mine"), cwd=tmp_path, check=True)
    (tmp_path / "elsewhere").write_text("22")
    assert Stages(Path("dvc.yaml"), Commands(project=tmp_path, deadline=None)).update_imports() == ["mine.dvc"]
    assert (tmp_path / "mine").read_text() == "22"


def test_an_environment_that_is_not_there_is_told_without_a_traceback() -> None:
    words = [sys.executable, "-m", "visual_grpo.retraining", "--env=nosuch"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout + done.stderr == done.stdout
    assert done.stdout.startswith("Error: There is no environment 'nosuch' in ")
    assert len(done.stdout.splitlines()) == 1
