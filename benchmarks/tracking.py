"""Measures what tracking costs a training, with an MLflow server that is killed for half of it and comes back.

Steps of the default model alternate in one process between a training that logs and one that does not: the wall time of
a step, logging included, and CPU seconds, which other programs disturb less. At the end, every value that was logged
must be in MLflow once.

    python benchmarks/tracking.py                                # the starter's model, 40 steps of each
    python benchmarks/tracking.py --model PATH --steps 100
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from PIL import Image
from step import base_config, brightness, distinct_prompts

from visual_grpo.common import quiet_libraries
from visual_grpo.grpo.sampling import PromptOrder
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.sync import tracked
from visual_grpo.tracking.tracker import Tracker
from visual_grpo.training import components

BLOCK = 4
"""Steps in a row with, and then without tracking."""
IMAGES_EVERY = 10
PORT = 18766


class Server:
    """A separate MLflow server in ``folder``."""

    uri = f"http://127.0.0.1:{PORT}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; it answers some seconds later."""
        store = f"--backend-store-uri=sqlite:///{self._folder / 'mlflow.db'}"
        artifacts = f"--artifacts-destination={self._folder / 'artifacts'}"
        command = [sys.executable, "-m", "mlflow", "server", store, artifacts, f"--port={PORT}", "--workers=1"]
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=silent, stderr=silent, start_new_session=True)

    def wait(self) -> None:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()  # noqa: S310
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("The MLflow server did not start.")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder)
        try:
            _measure(arguments, folder, server)
        finally:
            server.kill()


def _measure(arguments: argparse.Namespace, folder: Path, server: Server) -> None:
    server.start()
    server.wait()
    config = base_config("ar", arguments.model)
    spec = components.make_run_spec(config, arguments.model)
    image: Any = components.build_model(config, arguments.model)
    trainer: Any = components.build_trainer(config, spec, image, RewardSet({"brightness": (brightness, 1.0)}))
    [module] = trainer.modules.values()
    records = distinct_prompts(module.config.prompts_per_step)
    order = PromptOrder(records, module.seed)
    mlflow.set_tracking_uri(server.uri)
    tracker = Tracker.start("benchmark", folder / "data", print)
    picture = Image.effect_noise((512, 512), 64)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu = {True: 0.0, False: 0.0}
    calls: list[float] = []
    module.take_step(records, order)  # A warm-up.
    for number in range(2 * arguments.steps):
        logs = number // BLOCK % 2 == 0
        step = len(seconds[True]) + 1
        if logs and step == arguments.steps // 4:
            server.kill()
        if logs and step == arguments.steps * 3 // 4:
            server.start()
            server.wait()  # Its start takes the processor from the steps.
        began, cpu_before = time.perf_counter(), time.process_time()
        row = tracked(module.take_step(records, order).values, ("ar",), ("brightness",))
        if logs:
            called = time.perf_counter()
            tracker.metrics(row, step)
            if step % IMAGES_EVERY == 0:
                tracker.image(picture, "samples", step)
            calls.append(time.perf_counter() - called)
        seconds[logs].append(time.perf_counter() - began)
        cpu[logs] += time.process_time() - cpu_before
    began = time.perf_counter()
    tracker.end("FINISHED")
    end = time.perf_counter() - began
    _check(server, str(tracker.run_id), set(row), arguments.steps)
    middle = {logs: statistics.median(values) for logs, values in seconds.items()}
    whole = {logs: sum(values) for logs, values in seconds.items()}
    print(
        f"{arguments.steps} steps each: median {middle[True]:.4f} s with tracking, {middle[False]:.4f} s without"
        f" ({100 * (middle[True] / middle[False] - 1):+.2f}%); all steps {whole[True]:.2f} s, {whole[False]:.2f} s"
        f" ({100 * (whole[True] / whole[False] - 1):+.2f}%), of which"
        f" CPU {cpu[True]:.2f} s, {cpu[False]:.2f} s ({100 * (cpu[True] / cpu[False] - 1):+.2f}%), all threads.\n"
        f"On the training's thread tracking took {sum(calls):.3f} s of it ({100 * sum(calls) / whole[True]:.2f}%; a"
        f" step's metrics {1e6 * statistics.median(calls):.0f} us, with an image at most {1e3 * max(calls):.0f} ms);"
        f" the end of the run {end:.1f} s."
    )


def _check(server: Server, run_id: str, metrics: set[str], steps: int) -> None:
    client = MlflowClient(server.uri)
    for name in metrics:
        found = [point.step for point in client.get_metric_history(run_id, name)]
        assert sorted(found) == list(range(1, steps + 1)), (name, found)
    print(f"{len(metrics)} metrics of {steps} steps are in MLflow, each once.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/06_models/base", help="the starter's model")
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    main()
