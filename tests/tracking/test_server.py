"""A real MLflow server that is killed in the middle of a run and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.tracking.conftest import EXPERIMENT, Project
from tests.tracking.toy_adapters import MODULE_FILES, adapters, base_model
from visual_grpo.errors import UserError
from visual_grpo.tracking import asking, registry

SECONDS = 120


class Server:
    def __init__(self, project: Project) -> None:
        self.port = 18765
        self.project = project
        self.log = (project.folder / "server.log").open("a")
        self.process: subprocess.Popen[bytes] | None = None
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = f"--backend-store-uri={self.project.uri}"
        artifacts = f"--artifacts-destination={self.project.folder / 'artifacts'}"
        command = [sys.executable, "-m", "mlflow", "server", store, artifacts, f"--port={self.port}", "--workers=1"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, Path(self.log.name).read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(project: Project) -> Iterator[Server]:
    server = Server(project)
    yield server
    server.kill()
    server.log.close()


@pytest.mark.slow
def test_a_server_that_is_killed_for_half_of_a_run_has_all_of_it_once(project: Project, server: Server):
    database = project.uri
    server.start()
    project.uri = server.uri
    training = Project(project.folder, server.uri)
    training.artifact_root = None
    tracker = training.start()
    (project.folder / "adapters").mkdir()
    (project.folder / "adapters/weights").write_text("w")
    for step in range(1, 201):
        tracker.metrics({f"m{number}": step / 7 for number in range(60)}, step)
        if step % 20 == 0:
            tracker.image(Image.new("RGB", (8, 8)), "samples", step)
        if step == 50:
            time.sleep(6)
            server.kill()
        if step == 150:
            project.uri = database
            server.start()
            time.sleep(1)
        time.sleep(0.05)
    tracker.folder(project.folder / "adapters", "adapters")
    tracker.model(project.folder / "adapters", "adapter", {})
    tracker.finished()
    assert [line[:14] for line in training.said] == ["MLflow (http:/", "MLflow is back"], training.said
    client = training.client
    run = client.get_run(tracker.run_id or "")
    assert run.info.status == "FINISHED"
    for name in ("m0", "m59"):
        assert training.curve(tracker.run_id, name) == [(step, step / 7) for step in range(1, 201)]
    images = [file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    assert sorted(int(name.split("+")[2]) for name in images) == list(range(20, 201, 20))
    assert [file.path for file in client.list_artifacts(run.info.run_id, "adapters")] == ["adapters/weights"]
    assert run.outputs is not None
    assert len(run.outputs.model_outputs) == 1
    assert client.get_experiment_by_name(EXPERIMENT) is not None
    assert not training.spools.exists()


@pytest.mark.slow
def test_versions_on_a_server_are_made_promoted_and_brought_here(project: Project, server: Server, tmp_path: Path):
    server.start()
    training = Project(project.folder, server.uri)
    training.artifact_root = None
    tracker = training.start()
    tracker.finished()
    first, second = (
        registry.register(server.uri, "served", folder, experiment=EXPERIMENT)
        for folder in (
            adapters(tmp_path / seed, base_model(tmp_path / f"base {seed}"), weights=seed, mlflow_run_id=tracker.run_id)
            for seed in ("seed 0", "seed 1")
        )
    )
    assert (first.version, second.version, second.run_id) == (1, 2, tracker.run_id)
    assert registry.register(server.uri, "served", tmp_path / "seed 1", experiment=EXPERIMENT) == second
    registry.promote(server.uri, "served", 1)
    registry.promote(server.uri, "served", 2)
    found = registry.champion(server.uri, "served")
    assert found is not None
    here = found.adapters()
    assert (here / "ar" / MODULE_FILES["ar"]).read_text() == "seed 1 ar best"
    assert "visual_grpo_adapters_" in str(here), "a temporary copy"
    assert registry.rollback(server.uri, "served") == (2, 1)
    with pytest.raises(UserError, match="shapes@champion"):
        registry.rollback(server.uri, "shapes")
    server.kill()
    began = time.monotonic()
    with pytest.raises(UserError, match="does not answer"):
        registry.promote(server.uri, "served", 2)
    assert time.monotonic() - began < asking.WAIT + 5
