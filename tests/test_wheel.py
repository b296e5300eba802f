"""The wheel holds the whole package, and README's Python runs with it where there is no repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import mypy.api
import pytest

from tests.markdown import ROOT, Block, blocks
from visual_grpo.training.components import load_model

pytestmark = pytest.mark.slow
SNIPPETS = [block for block in blocks("python", page=ROOT / "README.md") if block.file is None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `uv build --wheel` makes it: uv calls this backend too."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, which sees the locked packages but not the repository."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", str(folder), cwd=folder)
    made = folder / "bin" / "python"
    run(str(made), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=folder)
    # A .pth file in a folder that a .pth file names is not read: an editable install stays out.
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "locked.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return made


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = run("git", "ls-files", "src/visual_grpo", cwd=ROOT).split()
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {path.removeprefix("src/") for path in listed} - held == set()
    assert {name.split("/")[0] for name in held} == {"visual_grpo", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}


def test_it_is_the_wheel_that_is_imported(python: Path, tmp_path: Path) -> None:
    place = run(str(python), "-c", "import visual_grpo; print(visual_grpo.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(python.parents[1])


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.heading)
def test_the_readmes_python_runs_outside_of_the_repository(
    block: Block, python: Path, pipeline_folder: Path, tmp_path: Path
) -> None:
    """Literally, in a folder that holds a model and its adapters where a run would have left them."""
    shutil.copytree(pipeline_folder, tmp_path / "data/06_models/base")
    load_model(str(pipeline_folder), train=["ar", "dit"]).adapters.save(tmp_path / "data/06_models/adapters")
    run(str(python), "-W", "error::DeprecationWarning:__main__", "-c", block.text, cwd=tmp_path)


def test_a_type_checker_sees_the_readmes_names(python: Path, tmp_path: Path) -> None:
    """As a user runs it: plain mypy, without this repository's settings and plugins."""
    [script] = [block.text for block in SNIPPETS if "load_policy" in block.text]
    names = ("GRPOConfig", "GRPOTrainer", "RewardSet", "load_policy", "policy")
    revealed = "\n".join(f"reveal_type({name})" for name in names)
    (tmp_path / "script.py").write_text(f"{script}\n{revealed}\nGRPOConfig(nonsense=1)\n", encoding="utf-8")
    options = (f"--python-executable={python}", "--config-file=", f"--cache-dir={tmp_path}")
    report, errors, _ = mypy.api.run([*options, str(tmp_path / "script.py")])
    types = [line.split('"')[1] for line in report.splitlines() if "Revealed type" in line]
    assert len(types) == len(names), report + errors
    assert "Any" not in types
    [error] = [line for line in report.splitlines() if "error: " in line]
    assert 'Unexpected keyword argument "nonsense" for "GRPOConfig"' in error
