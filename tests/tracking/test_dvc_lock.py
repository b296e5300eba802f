"""A dvc.lock that DVC did not leave like that is refused with how to mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.tracking.dvc_lock import stages_of
from visual_grpo.tracking.lineage import recorded

LOCK = Path("conf/mine/dvc.lock")
DVC = [sys.executable, "-m", "dvc"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With the dvc.lock that DVC wrote for an environment."""
    (tmp_path / "conf/mine").mkdir(parents=True)
    (tmp_path / "raw.txt").write_text("a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/one").write_text("b")
    stage = "{wdir: ../.., cmd: cp raw.txt made.txt, deps: [raw.txt, folder], outs: [made.txt]}"
    (tmp_path / "conf/mine/dvc.yaml").write_text(f"stages: {{copy: {stage}}}")
    subprocess.run([*DVC, "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*DVC, "repro", "--quiet", "conf/mine/dvc.yaml"], cwd=tmp_path, check=True)
    return tmp_path


def damaged(text: str, how: str) -> str:
    if how == "merged":
        return f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> other\n"
    if how == "half":
        return text[: text.index("md5")]
    others = {"a list": "- 1\n", "no stages": "schema: '2.0'\n", "no command": "schema: '2.0'\nstages: {a: }"}
    return others.get(how, "")


@pytest.mark.parametrize("how", ["empty", "merged", "half", "a list", "no stages", "no command"])
def test_a_damaged_one_is_told_with_the_remedy(project: Path, how: str) -> None:
    whole = (project / LOCK).read_text()
    assert list(stages_of(LOCK, project)) == ["copy"]
    assert "made.txt" in recorded(project)
    (project / LOCK).write_text(damaged(whole, how))
    with pytest.raises(UserError, match=r"^conf/mine/dvc\.lock is damaged: ") as told:
        recorded(project)
    side = " --ours" if how == "merged" else ""
    assert f": git checkout{side} conf/mine/dvc.lock\n" in str(told.value)
    assert str(told.value).endswith("rm conf/mine/dvc.lock && .venv/bin/dvc repro conf/mine/dvc.yaml")


def test_every_place_at_which_one_can_be_cut_is_noticed_or_harmless(project: Path) -> None:
    """Cut after a whole entry, it is one of a stage that depends on less: DVC runs that stage again."""
    whole = (project / LOCK).read_text()
    for length in range(1, len(whole)):
        (project / LOCK).write_text(whole[:length])
        try:
            found = stages_of(LOCK, project)
        except UserError:
            continue
        assert whole[length - 1] == "\n"
        assert all({"path", "md5"} <= entry.keys() for entry in found["copy"].get("deps", []))


def test_none_is_no_fault(tmp_path: Path) -> None:
    assert stages_of(LOCK, tmp_path) == {}
