"""The environment of a run's lock, and whose code it imports."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.reproduction.environment import environment_of

ROOT = Path(__file__).parents[2]
LOCK = "requirements.lock"
UV = shutil.which("uv") or (ROOT / ".venv-tools/bin/uv").is_file()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project, and beside it the code of a run with the same lock."""
    for name in ("project", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).write_text("# nothing\n")
    (tmp_path / "project/.venv-tools").symlink_to(ROOT / ".venv-tools")
    return tmp_path / "project"


def test_with_the_same_lock_it_is_the_present_one(project: Path) -> None:
    found = environment_of(project.parent / "code", project, project.parent, "3.11.7", print)
    assert (found.python, found.new) == (Path(sys.executable), False)


def test_its_variables_are_not_those_of_the_command(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    monkeypatch.setenv("KEDRO_ENV", "mine")
    monkeypatch.setenv("PYTHONPATH", "before")
    code = project.parent / "code"
    found = environment_of(code, project, project.parent, None, print).variables()
    assert not {"MLFLOW_RUN_ID", "KEDRO_ENV"} & found.keys()
    assert found["MLFLOW_TRACKING_URI"] == f"sqlite:///{code}/mlflow.db"
    assert found["PYTHONPATH"] == f"{code}/src:before"


def test_it_must_import_the_code_of_the_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = project.parent / "code"
    found = environment_of(code, project, project.parent, None, print)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with pytest.raises(UserError, match=r"imports visual_grpo from .*, expected .*code/src"):
        found.facts(["torch"])
    (code / "src/visual_grpo").mkdir(parents=True)
    (code / "src/visual_grpo/__init__.py").write_text("")
    facts = found.facts(["torch", "no-such-library"])
    assert facts["versions"]["torch"].split(".")[0].isdecimal()
    assert facts["versions"]["no-such-library"] == "none"


def test_a_commit_without_a_lock_is_told(project: Path) -> None:
    (project.parent / "code" / LOCK).unlink()
    with pytest.raises(UserError, match=r"has no requirements\.lock"):
        environment_of(project.parent / "code", project, project.parent, None, print)


@pytest.mark.skipif(not UV, reason="uv is installed by make setup")
def test_another_lock_is_installed_into_an_environment_of_its_own(project: Path) -> None:
    code, said = project.parent / "code", list[str]()
    (code / LOCK).write_text("# nothing, too\n")
    found = environment_of(code, project, project.parent, "3.11.7", said.append)
    assert found.new
    assert found.python.is_relative_to(project.parent / "environment")
    assert found.python.exists()
    assert "is another than the present one" in said[0]


@pytest.mark.skipif(not UV, reason="uv is installed by make setup")
def test_a_package_that_cannot_be_had_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    code = project.parent / "code"
    (code / LOCK).write_text(f"no-such-package-here==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(UserError, match=r"cannot be installed(?s:.)*a network is needed(?s:.)*no-such-package-here"):
        environment_of(code, project, project.parent, None, print)


def test_without_uv_it_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".venv-tools").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    (project.parent / "code" / LOCK).write_text("other")
    with pytest.raises(UserError, match="uv, which installs the run's packages, is not there"):
        environment_of(project.parent / "code", project, project.parent, None, print)
