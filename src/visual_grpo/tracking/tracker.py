"""Logs a run to MLflow, TensorBoard and Weights & Biases; no failure of theirs ends the command.

A background thread sends to MLflow, because MLflow's own asynchronous logging keeps a process alive while a request
hangs, and does not report failures. `sync` later adds what a failure left out from the files on disk.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from visual_grpo.common.errors import UserError
from visual_grpo.config import TrackingConfig
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.sync import sync_output

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from PIL.Image import Image

Request = Callable[["MlflowClient", str], object]
"""A call with the client and the run's id."""

WAIT, LAST_CHANCE = 30.0, 60.0
"""Timeouts in seconds: of a run's start, for which MLflow may have to create its tables, and of its end."""
PAUSE = 60.0
"""Seconds without requests after a failure."""
_WANDB_SETTINGS = {"silent": True, "console": "off", "init_timeout": 10.0, "finish_timeout": 60.0}

log = logging.getLogger(__name__)


class Tracker:
    """Logs to one MLflow run; unless it was started, to nothing."""

    _active: Tracker | None = None

    def __init__(
        self, name: str = "", output: Path = Path(), say: Callable[[str], None] = print, key: str = ""
    ) -> None:
        self.run_id: str | None = None
        """The MLflow run's id; its key, if MLflow was away when the run began; None if it was not started."""
        self.run_name = name
        self.continues = False
        """True if it goes on in an earlier run."""
        self.evaluates = False
        """True if it evaluates, in a run that had ended before."""
        self._output, self._say, self._key = output, say, key
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._known_steps: dict[str, set[int]] = {}
        self._own: dict[str, str] = {}
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._answered, self._again = threading.Event(), 0.0
        self._is_open = self._has_warned = False

    def __deepcopy__(self, memo: object) -> Self:
        return self  # Kedro copies what a node receives, and a run is one.

    @classmethod
    def active(cls) -> Tracker:
        """The tracker of the command that is running, or one that does nothing."""
        return Tracker._active or cls()

    @classmethod
    def start(cls, name: str, output: Path, say: Callable[[str], None], *, earlier: str | None = None) -> Self:
        """Begins to log to a run at the address in use; ``earlier`` is the id or key of the run that it continues."""
        tracker = cls(name, output, say, earlier or uuid.uuid4().hex)
        tracker.continues = earlier is not None
        tracker._thread.start()
        if not tracker._answered.wait(WAIT):
            tracker._fails(f"no answer in {WAIT:g} s")
        run = tracker._run
        tracker.run_id = tracker._key if run is None else run.info.run_id
        tracker.run_name = name if run is None else run.info.run_name
        tracker._is_open, Tracker._active = True, tracker
        return tracker

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs ``values`` of a training's ``step`` (1 = the first). A step that is logged again changes nothing."""
        if self._is_open:
            at = int(time.time() * 1000)
            points = [(name, float(value), at, step) for name, value in values.items()]
            self._put(lambda client, run: mlflow_api.log_metrics(client, run, points, self._known_steps))

    def image(self, image: Image, key: str, step: int) -> None:
        """Logs an image under ``key``; MLflow shows the steps of one key as a series."""
        self._put(lambda client, run: mlflow_api.log_picture(client, run, image, key, step))

    def tags(self, mapping: Mapping[str, object]) -> None:
        self._put(lambda client, run: mlflow_api.set_tags(client, run, mapping))

    def own(self, tag: str, digest: str) -> None:
        """Notes a digest of what this run made, by which the project knows it as its own (`tracking.trust`)."""
        self._own[tag] = digest
        self.tags(self._own)

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Names the run that was resumed by what it has become, unless the user has renamed it."""

        def request(client: MlflowClient, run_id: str) -> None:
            run = client.get_run(run_id)
            if run.data.tags.get(mlflow_api.NAMED) == run.info.run_name:
                name = new_name(run.info.run_name)
                client.update_run(run_id, name=name)
                client.set_tag(run_id, mlflow_api.NAMED, name)
                self.run_name = name

        self._put(request)

    def params(self, mapping: Mapping[str, object]) -> None:
        self._put(lambda client, run: mlflow_api.set_params(client, run, mapping))

    def name(self) -> str | None:
        """``NAME (the beginning of the id)``; None without a run."""
        return None if self.run_id is None else f"{self.run_name} ({self.run_id[:8]})"

    def evaluation_begins(self, command: str) -> None:
        """Says that the run, which has ended before, is evaluated now; if that fails, the training is still good."""
        self.evaluates = True
        earlier = {"evaluate.error": "", "evaluate.error.node": ""}
        self.tags({"evaluate.command": command, mlflow_api.EVALUATION: "running"} | earlier)

    def end(self, status: Literal["KILLED", "FAILED", "FINISHED"]) -> None:
        """Ends the run, and adds the missing results from disk."""
        if not self._is_open:
            return
        self._is_open, Tracker._active = False, None

        def last(client: MlflowClient, run: str) -> None:
            mlflow_api.set_tags(client, run, self._own)  # Again: MLflow may have been away.
            sync_output(client, self._output, open_run=run)
            if self.evaluates:
                client.set_tag(run, mlflow_api.EVALUATION, status.lower())
            client.set_terminated(run, "FINISHED" if self.evaluates else status)

        self._last = last
        self._requests.put(None)
        self._thread.join(LAST_CHANCE)
        if self._thread.is_alive():
            self._fails("no answer")

    def _put(self, request: Request) -> None:
        if self._is_open:
            self._requests.put(request)

    def _work(self) -> None:
        """Sends the requests in their order. After a failure they are dropped for a while."""
        self._send(lambda client, run: None)  # Opens the run.
        self._answered.set()
        while (request := self._requests.get()) is not None:
            if time.monotonic() >= self._again:
                self._send(request)
        self._send(self._last)  # Even if the other calls failed.

    def _send(self, request: Request) -> None:
        try:
            client = self._client = self._client or mlflow_api.connect()
            run = self._run or self._open(client)
            request(client, run.info.run_id)
        except Exception as error:
            self._again = time.monotonic() + PAUSE
            self._fails(mlflow_api.in_a_line(error))

    def _open(self, client: MlflowClient) -> Run:
        run = mlflow_api.find_run(client, self._key)
        self.continues = run is not None and mlflow_api.is_active(run)
        if run is None or not mlflow_api.is_active(run):
            experiment = mlflow_api.experiment_id(client)
            tags = {mlflow_api.KEY: self._key, mlflow_api.NAMED: self.run_name}
            run = client.create_run(experiment, tags=tags, run_name=self.run_name)
        client.update_run(run.info.run_id, status="RUNNING")  # Whatever ended it.
        client.set_tag(run.info.run_id, mlflow_api.OUTPUT, mlflow_api.output_tag(self._output))
        self._run = run
        self._answered.set()
        mlflow_api.close_killed(client, self._output, run.info.run_id)
        if not self.continues:
            sync_output(client, self._output, run.info.run_id)
        return run

    def _fails(self, why: str) -> None:
        self._answered.set()
        if not self._has_warned:
            self._has_warned = True
            later = "The run continues; the next command or `make sync` adds the missing results from disk."
            self._say(f"MLflow ({mlflow_api.shown()}) fails: {why.rstrip('.')}. {later}")


def check_packages(config: TrackingConfig) -> None:
    """Raises UserError if ``tracking.tensorboard`` or ``tracking.wandb`` is set and its package is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            command = f".venv-tools/bin/uv pip install --python .venv/bin/python {name}"
            raise UserError(f"tracking.{name} needs the package {name}. Install it: {command}")


@contextmanager
def open_logs(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> Iterator[list[ExtraLog]]:
    """Opens TensorBoard and Weights & Biases as the parameters ask, and closes them at the end."""
    from accelerate import PartialState, tracking

    PartialState()  # Required by accelerate's logging.
    logs = []
    if config.tensorboard is not None:
        tensorboard = tracking.TensorBoardTracker(name.replace("/", "_"), config.tensorboard)
        logs.append(ExtraLog(tensorboard, dataformats="NHWC"))
    if config.wandb is not None:
        wandb = tracking.WandBTracker(
            "visual-grpo", name=name, config=dict(params), mode=config.wandb, settings=_WANDB_SETTINGS
        )
        logs.append(ExtraLog(wandb))
    try:
        yield logs
    finally:
        for logger in logs:
            logger.attempt("finish")


class ExtraLog:
    """Passes values to one of accelerate's trackers; after its first failure it is dropped with a warning."""

    def __init__(self, tracker: GeneralTracker, **image_options: str) -> None:
        self._tracker, self._image_options, self._works = tracker, image_options, True
        self.attempt("start")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.attempt("log", dict(values), step=step)

    def image(self, image: Image, key: str, step: int) -> None:
        pixels = np.asarray(image.convert("RGB"))[None]
        self.attempt("log_images", {key: pixels}, step=step, **self._image_options)

    def attempt(self, method: str, *values: Any, **options: Any) -> None:
        """Calls the tracker, unless it has failed."""
        try:
            if self._works:
                getattr(self._tracker, method)(*values, **options)
        except Exception as error:
            self._works = False
            log.warning("%s failed and gets nothing from here on: %s. The run continues.", self._tracker.name, error)
