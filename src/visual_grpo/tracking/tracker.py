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
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from visual_grpo.common.errors import UserError
from visual_grpo.config import TrackingConfig
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.sync import sync_output

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from PIL.Image import Image

Item = Callable[["MlflowClient", str], Any] | list[Any]
"""A call with the client and the run's id, or a list of metrics; queued metrics are sent together."""

WAIT = 30.0
"""Timeout in seconds of the start of a run; MLflow may have to create its tables."""
EVERY = 5.0
"""Seconds between two requests, so that one request carries many steps."""
PAUSE = 60.0
"""Seconds without requests after a failure."""
LAST_CHANCE = 60.0
"""Timeout in seconds of the end of a run, which sends the rest."""
_WANDB_INIT_SECONDS, _WANDB_FINISH_SECONDS = 10.0, 60.0
"""Timeouts of Weights & Biases."""

log = logging.getLogger(__name__)


class Log(Protocol):
    """Takes a training's metrics and images: MLflow, TensorBoard or Weights & Biases."""

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def image(self, image: Image, key: str, step: int) -> None: ...


class Tracker:
    """Logs to one MLflow run; unless it was started, to nothing."""

    _active: Tracker | None = None

    def __init__(
        self, name: str = "", output: Path = Path(), say: Callable[[str], None] = print, key: str = ""
    ) -> None:
        self.run_id: str | None = None
        """The MLflow run's id; its key, if MLflow was away when the run began; None if MLflow is off."""
        self.run_name = name
        """As MLflow shows it."""
        self.continues = False
        """True if it goes on in an earlier run."""
        self.evaluates = False
        """True if it evaluates, in a run that had ended before."""
        self._output, self._say, self._key = output, say, key
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._known_steps: dict[str, set[int]] | None = None
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._answered, self._closing = threading.Event(), threading.Event()
        self._is_open = self._has_warned = False

    @classmethod
    def active(cls) -> Tracker:
        """The tracker of the command that is running, or one that does nothing."""
        return Tracker._active or cls()

    @classmethod
    def start(cls, name: str, output: Path, say: Callable[[str], None], *, earlier: str | None = None) -> Self:
        """Begins to log to a run at the address in use, which is active until it ends.

        Args:
            output: the folder of outputs that the command writes to.
            say: shows a line to the user, from any thread.
            earlier: the run that it continues: its id, or the key that stands for it.
        """
        tracker = cls(name, output, say, earlier or uuid.uuid4().hex)
        tracker._thread.start()
        if not tracker._answered.wait(WAIT):
            tracker._fails(f"no answer in {WAIT:g} s")
        run = tracker._run
        tracker.run_id = tracker._key if run is None else run.info.run_id
        tracker.run_name = name if run is None else run.info.run_name
        tracker.continues = earlier is not None and (run is None or tracker._known_steps is not None)
        tracker._is_open, Tracker._active = True, tracker
        return tracker

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs ``values`` of a training's ``step`` (1 = the first). A step that is logged again changes nothing."""
        if self._is_open and values:
            from mlflow.entities import Metric

            at = int(time.time() * 1000)
            self._put([Metric(name, float(value), at, step) for name, value in values.items()])

    def image(self, image: Image, key: str, step: int) -> None:
        """Logs an image under ``key``; MLflow shows the steps of one key as a series."""
        self._put(lambda client, run: mlflow_api.log_pictures(client, run, {(key, step): lambda: image}))

    def tags(self, mapping: Mapping[str, object]) -> None:
        """Sets tags; existing tags are replaced."""
        self._put(lambda client, run: mlflow_api.set_tags(client, run, mapping))

    def params(self, mapping: Mapping[str, object]) -> None:
        """Logs parameters. MLflow cannot overwrite one: another value of a resumed run is the tag ``resumed.NAME``."""
        self._put(lambda client, run: mlflow_api.set_params(client, run, mapping))

    def name(self) -> str | None:
        """``NAME (the beginning of the id)``; None without a run."""
        return None if self.run_id is None else f"{self.run_name} ({self.run_id[:8]})"

    def evaluation_begins(self, command: str) -> None:
        """Says that the run, which has ended before, is evaluated now; if that fails, the training is still good."""
        self.evaluates = True
        self._put(lambda client, run: mlflow_api.remove_tags(client, run, {"evaluate.error", "evaluate.error.node"}))
        self.tags({"evaluate.command": command, mlflow_api.EVALUATION: "running"})

    def end(self, status: Literal["KILLED", "FAILED", "FINISHED"]) -> None:
        """Ends the run, and adds what it lacks of the results on disk."""
        if not self._is_open:
            return
        self._is_open, Tracker._active = False, None

        def last(client: MlflowClient, run: str) -> None:
            sync_output(client, self._output, open_run=run)
            if self.evaluates:
                client.set_tag(run, mlflow_api.EVALUATION, status.lower())
            client.set_terminated(run, "FINISHED" if self.evaluates else status)

        self._last = last
        self._closing.set()
        self._thread.join(LAST_CHANCE)
        if self._thread.is_alive():
            self._fails("no answer")

    def _put(self, item: Item) -> None:
        if self._is_open:
            self._items.put(item)

    def _work(self) -> None:
        """Sends items in their order. After a failure they are dropped for a while."""
        works, again = self._send([]), time.monotonic() + PAUSE
        self._answered.set()
        while not self._closing.wait(EVERY):
            items = self._waiting()
            if items and (works or time.monotonic() >= again):
                works, again = self._send(items), time.monotonic() + PAUSE
        if works:
            self._send(self._waiting())
        self._send([self._last])  # Even if the others failed.

    def _waiting(self) -> list[Item]:
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    def _send(self, items: list[Item]) -> bool:
        """Returns True if MLflow took all."""
        try:
            client = self._client = self._client or mlflow_api.connect()
            run = (self._run or self._open(client)).info.run_id
            metrics = [metric for item in items if isinstance(item, list) for metric in item]
            mlflow_api.log_metrics(client, run, metrics, self._known_steps)
            for item in items:
                if not isinstance(item, list):
                    item(client, run)
        except Exception as error:
            self._fails(mlflow_api.in_a_line(error))
            return False
        return True

    def _open(self, client: MlflowClient) -> Run:
        run = mlflow_api.find_run(client, self._key)
        if run is not None and mlflow_api.is_active(run):
            self._known_steps = {}
            client.update_run(run.info.run_id, status="RUNNING")  # Whatever ended it.
        else:
            run = mlflow_api.make_run(client, self._key, self.run_name, int(time.time() * 1000))
        client.set_tag(run.info.run_id, mlflow_api.OUTPUT, mlflow_api.output_tag(self._output))
        self._run = run
        self._answered.set()
        mlflow_api.close_killed(client, self._output, run.info.run_id)
        if self._known_steps is None:
            sync_output(client, self._output, run.info.run_id)
        return run

    def _fails(self, why: str) -> None:
        self._answered.set()
        if not self._has_warned:
            self._has_warned = True
            self._say(
                f"MLflow ({mlflow_api.shown()}) fails: {why.rstrip('.')}. The run goes on; what MLflow lacks"
                " of its results is on disk, and the next command or `make sync` adds it."
            )


def check_packages(config: TrackingConfig) -> None:
    """Raises UserError if ``tracking.tensorboard`` or ``tracking.wandb`` is set and its package is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            raise UserError(
                f"tracking.{name} needs the package {name}, which is not installed. Install it with:"
                f" .venv-tools/bin/uv pip install --python .venv/bin/python {name}"
            )


@contextmanager
def open_logs(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> Iterator[list[Log]]:
    """Opens TensorBoard and Weights & Biases as the parameters ask, and closes them at the end.

    Args:
        name: the MLflow run's name.
        params: the flat parameters.
    """
    logs = []
    if config.tensorboard is not None:
        logs.append(_ExtraLog("TensorBoard", lambda: _tensorboard(config, name), dataformats="NHWC"))
    if config.wandb is not None:
        logs.append(_ExtraLog("Weights & Biases", lambda: _wandb(config, name, params)))
    try:
        yield list[Log](logs)
    finally:
        for logger in logs:
            logger.attempt(lambda tracker: tracker.finish())


def _tensorboard(config: TrackingConfig, name: str) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker(name.replace("/", "_"), Path(str(config.tensorboard)))


def _wandb(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> GeneralTracker:
    import wandb
    from accelerate.tracking import WandBTracker

    settings = wandb.Settings(
        silent=True, console="off", init_timeout=_WANDB_INIT_SECONDS, finish_timeout=_WANDB_FINISH_SECONDS
    )
    return WandBTracker("visual-grpo", name=name, config=dict(params), mode=config.wandb, settings=settings)


class _ExtraLog:
    """Passes values to one of accelerate's trackers; after its first failure it is dropped with a warning."""

    def __init__(self, name: str, make: Callable[[], GeneralTracker], **image_options: str) -> None:
        from accelerate import PartialState

        PartialState()  # Required by accelerate's logging.
        self._name, self._image_options = name, image_options
        self._tracker: GeneralTracker | None = None
        try:
            tracker = make()
            tracker.start()
            self._tracker = tracker
        except Exception as error:
            self._drop(error)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.attempt(lambda tracker: tracker.log(dict(values), step=step))

    def image(self, image: Image, key: str, step: int) -> None:
        import numpy as np

        pixels = np.asarray(image.convert("RGB"))[None]
        self.attempt(lambda tracker: tracker.log_images({key: pixels}, step=step, **self._image_options))

    def attempt(self, call: Callable[[Any], object]) -> None:
        """Calls the tracker, unless it has failed."""
        try:
            if self._tracker is not None:
                call(self._tracker)
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        self._tracker = None
        log.warning("%s fails and gets nothing from here on: %s. The run goes on.", self._name, error)
