"""TensorBoard and Weights & Biases beside MLflow, each through its own client; one that fails ends no run."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from visual_grpo.config import TrackingConfig
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

_INIT_SECONDS, _FINISH_SECONDS = 10.0, 60.0
"""Most seconds that a run waits for Weights & Biases."""

log = logging.getLogger(__name__)

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Log(Protocol):
    """Where a training's metrics and pictures go."""

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def image(self, image: Image, key: str, step: int) -> None: ...


def check_packages(config: TrackingConfig) -> None:
    """Raises UserError where a tracker is asked for whose package is not installed."""
    for name, package in _PACKAGES.items():
        if getattr(config, name) is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"tracking.{name} needs the package {package}, which is not installed. Install it with:"
                f" .venv-tools/bin/uv pip install --python .venv/bin/python {package}"
            )


@contextmanager
def open_logs(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> Iterator[list[Log]]:
    """The trackers that the parameters name, closed at the end.

    Args:
        name: of the run, as MLflow shows it.
        params: the flat parameters.
    """
    opened: dict[str, Callable[[], AbstractContextManager[Log]]] = {}
    if (folder := config.tensorboard) is not None:
        opened["TensorBoard"] = lambda: _tensorboard(folder, name)
    if (mode := config.wandb) is not None:
        opened["Weights & Biases"] = lambda: _wandb(mode, name, params)
    with ExitStack() as stack:
        yield [stack.enter_context(_careful(tracker, opening)) for tracker, opening in opened.items()]


class _Careful:
    """Passes everything on until it fails; what comes after that would fail too, or be incomplete."""

    def __init__(self, tracker: str) -> None:
        self._tracker = tracker
        self._log: Log | None = None

    def open(self, log: Log) -> None:
        self._log = log

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._try(lambda log: log.metrics(values, step))

    def image(self, image: Image, key: str, step: int) -> None:
        self._try(lambda log: log.image(image, key, step))

    def failed(self, error: Exception) -> None:
        log.warning("%s fails and gets nothing from here on: %s. The run goes on.", self._tracker, error)
        self._log = None

    def _try(self, send: Callable[[Log], None]) -> None:
        if self._log is not None:
            try:
                send(self._log)
            except Exception as error:
                self.failed(error)


@contextmanager
def _careful(tracker: str, opening: Callable[[], AbstractContextManager[Log]]) -> Iterator[Log]:
    """A tracker whose errors, also when it is opened and closed, are told and not raised."""
    careful = _Careful(tracker)
    with ExitStack() as stack:
        try:
            careful.open(stack.enter_context(opening()))
        except Exception as error:
            careful.failed(error)
        closing = stack.pop_all()
    try:
        yield careful
    finally:
        try:
            closing.close()
        except Exception as error:
            careful.failed(error)


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, image: Image, key: str, step: int) -> None:
        import numpy as np

        self._writer.add_image(key, np.asarray(image.convert("RGB")), step, dataformats="HWC")


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def image(self, image: Image, key: str, step: int) -> None:
        import wandb

        self._run.log({key: wandb.Image(image)}, step=step)


@contextmanager
def _tensorboard(folder: str, name: str) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(_folder_of_run(Path(folder), name.replace("/", "_")))
    try:
        yield _TensorBoard(writer)
    finally:
        writer.close()


def _folder_of_run(folder: Path, name: str) -> Path:
    """That of the run's first part where it was resumed: its name may have said other steps, but had the same id."""
    key = re.search(r"\(\w{8}\)$", name)
    earlier = sorted(folder.glob(f"*{key[0]}")) if key else []
    return earlier[0] if earlier else folder / name


@contextmanager
def _wandb(mode: Literal["online", "offline"], name: str, params: Mapping[str, Any]) -> Iterator[Log]:
    import wandb

    silent = wandb.Settings(silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS)
    run = wandb.init(project="visual-grpo", name=name, config=dict(params), mode=mode, settings=silent)
    try:
        yield _Wandb(run)
    finally:
        run.finish()
