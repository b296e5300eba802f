"""Commands in a copy of the project, beside others, in a container: what cannot be right says so."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project

from tests.small_project import ROOT, small_project
from visual_grpo.hooks.cli import run
from visual_grpo.operations.retraining.__main__ import main
from visual_grpo.operations.retraining.job import Code


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing has been run in it."""
    return small_project(tmp_path_factory.mktemp("other places") / "project")


def call(project: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "KEDRO"))}
    environment |= {"PYTHONPATH": str(project / "src"), **variables}
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a project that runs this process's code."""
    for name in ("conf/base", "conf/local", ".dvc"):
        ignored = shutil.ignore_patterns("cache", "tmp", "config.local")
        shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True, ignore=ignored)
    for name in ("pyproject.toml", "dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/visual_grpo").symlink_to(ROOT / "src/visual_grpo")
    monkeypatch.chdir(tmp_path)
    # What Kedro adds to them.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return tmp_path


def test_the_code_of_another_checkout_does_not_run_under_this_ones_commit(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "src/visual_grpo").unlink()
    (here / "src/visual_grpo").mkdir()
    bootstrap_project(here)
    said = f"The code that would run is {ROOT / 'src/visual_grpo'}, but this project is {here}, "
    for told in (CliRunner().invoke(run, ["--pipelines=plan"]).output, (main([]), capsys.readouterr().out)[1]):
        assert said in " ".join(told.split())
        assert "Run: make setup && source .venv/bin/activate" in told


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("grpo: {stepz: 3}", "grpo.stepz = 3: this parameter does not exist. Did you mean 'grpo.steps'?"),
        pytest.param("model: {path: nowhere}", "dvc repro dvc.yaml:data_preparation: ", marks=pytest.mark.slow),
    ],
)
def test_the_last_line_and_the_notification_of_a_retraining_say_why_it_failed(
    here: Path, parameters: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "retrain: {notify: cat > told.json}\n"
    (here / "conf/local/parameters.yml").write_text(told + parameters, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert main([]) == Code.FAILED
    last = capsys.readouterr().out.splitlines()[-1]
    assert said in last
    assert "ended with exit code" not in last
    assert said in json.loads((here / "told.json").read_text())["sentence"]


def test_a_retraining_where_nothing_can_be_written_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data/.retraining.lock").mkdir(parents=True)  # Root may write where others may not.
    assert main([]) == Code.FAILED
    assert "data/.retraining.lock cannot be written: Is a directory" in capsys.readouterr().out.splitlines()[-1]


def test_make_clean_leaves_what_people_put_there(tmp_path: Path) -> None:
    kept = ["photos/a.png", "data/01_raw/own/a.png", "data/01_raw/own.dvc", "data/01_raw/votes/choices.jsonl"]
    kept += ["data/photos-460337/01_raw/votes/choices.jsonl", "data/photos-460337/06_models/base.dvc"]
    kept += ["data/01_raw/words/photo.png"]  # The starter puts nothing into a folder of one's own.
    made = ["data/01_raw/shapes/starter.json", "data/01_raw/shapes/a.png", "big/a.safetensors", "bigger/b.png"]
    made += ["data/text/03_primary/records.json", "data/05_model_input/records.parquet", "data/photos-460337/a/b.json"]
    for name in kept + made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link, folder in {"data/06_models": "big", "data/text/07_model_output": "bigger"}.items():
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / folder)
    call(tmp_path, "make", f"--makefile={ROOT / 'Makefile'}", "BIN=none", "clean").check_returncode()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_make_ui_says_that_a_port_is_taken_and_that_a_server_does_not_answer(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call(project, "make", "--old-file=setup", "ui", f"PORT={port}")
        assert done.returncode != 0
        assert (
            f"Port {port} is taken, perhaps by another make ui. Name a free one: make ui PORT={port + 1}" in done.stderr
        )
    away = call(project, "make", "--old-file=setup", "ui", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert away.returncode != 0
    assert "Error: MLflow (http://127.0.0.1:9) does not answer: " in away.stderr


@pytest.mark.slow
def test_make_ui_answers_under_the_name_at_which_mlflow_opens_no_assistant(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(project / "src")}
    words = ["make", "--old-file=setup", "ui", f"PORT={port}"]
    with subprocess.Popen(
        words, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as served:
        try:
            assert served.stdout is not None
            assert f"http://mlflow.localhost:{port}/#/experiments/" in served.stdout.readline()
            assert _search_runs(port, f"mlflow.localhost:{port}") == 200
            assert _search_runs(port, "evil.example") == 403, "a name that another can point to this machine"
        finally:
            os.killpg(served.pid, signal.SIGTERM)


def _search_runs(port: int, name: str) -> int:
    """The status of the page's request for runs, at an address with this name, as soon as MLflow answers."""
    headers = {"Host": name, "Origin": f"http://{name}", "Content-Type": "application/json"}
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.suppress(ConnectionRefusedError), contextlib.closing(connection):
            connection.request("POST", "/ajax-api/2.0/mlflow/runs/search", '{"experiment_ids": ["1"]}', headers)
            return connection.getresponse().status
        time.sleep(0.5)
    raise AssertionError("MLflow does not answer")


def test_mlflow_makes_its_database_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "R&D #1 é'%?"
    packages = folder / ".venv/lib/python3.11/site-packages"
    shutil.copytree(Path(mlflow.__file__).parent, packages / "mlflow", copy_function=os.symlink)
    for file in ("Makefile", "requirements.lock", "tools.lock", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)
    for program in (".venv/bin/python", ".venv-tools/bin/uv"):  # They install nothing.
        (folder / program).parent.mkdir(parents=True)
        (folder / program).symlink_to("/bin/true")
    (folder / ".venv-tools/.installed").touch()
    call(folder, "make", "setup").check_returncode()
    paths = f"{packages}{os.pathsep}{ROOT / 'src'}"
    done = call(folder, sys.executable, "-m", "visual_grpo.tracking.mlflow_api", PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert (folder / "mlflow.db").is_file()


@pytest.mark.parametrize(("made_for", "anew"), [(".", False), ("..", True)])
def test_make_setup_makes_an_environment_anew_that_was_copied_or_moved(
    tmp_path: Path, made_for: str, anew: bool
) -> None:
    folder = tmp_path / "R&D #1 é'"
    packages = folder / ".venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "_editable_impl_visual_grpo.pth").write_text(str((folder / made_for).resolve() / "src"))
    for name in ("Makefile", "requirements.lock", "tools.lock", "pyproject.toml", ".venv/.installed"):
        shutil.copy(ROOT / "Makefile", folder / name)
    planned = call(folder, "make", "--dry-run", "setup").stdout
    assert ("rm -rf .venv .venv-bench\n" in planned, "pip sync" in planned) == (anew, anew)
