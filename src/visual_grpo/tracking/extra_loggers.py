"""TensorBoard and Weights & Biases beside MLflow, through accelerate's trackers; one that fails ends no run."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from visual_grpo.common.errors import UserError
from visual_grpo.config import TrackingConfig

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from PIL.Image import Image

_INIT_SECONDS, _FINISH_SECONDS = 10.0, 60.0
"""Most seconds that a run waits for Weights & Biases."""

log = logging.getLogger(__name__)


class Log(Protocol):
    """Where a training's metrics and pictures go."""

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def image(self, image: Image, key: str, step: int) -> None: ...


def check_packages(config: TrackingConfig) -> None:
    """Raises UserError where a tracker is asked for whose package is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            raise UserError(
                f"tracking.{name} needs the package {name}, which is not installed. Install it with:"
                f" .venv-tools/bin/uv pip install --python .venv/bin/python {name}"
            )


@contextmanager
def open_logs(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> Iterator[list[Log]]:
    """The trackers that the parameters name, closed at the end.

    Args:
        name: the run's, as MLflow shows it.
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
        for each in logs:
            each.attempt(lambda tracker: tracker.finish())


def _tensorboard(config: TrackingConfig, name: str) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker(name.replace("/", "_"), Path(str(config.tensorboard)))


def _wandb(config: TrackingConfig, name: str, params: Mapping[str, Any]) -> GeneralTracker:
    import wandb
    from accelerate.tracking import WandBTracker

    silent = wandb.Settings(silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS)
    return WandBTracker("visual-grpo", name=name, config=dict(params), mode=config.wandb, settings=silent)


class _ExtraLog:
    """Passes everything on until it fails; what comes after that would fail too, or be incomplete."""

    def __init__(self, name: str, make: Callable[[], GeneralTracker], **of_images: str) -> None:
        from accelerate import PartialState

        PartialState()  # accelerate's own log asks for it.
        self._name, self._of_images = name, of_images
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
        self.attempt(lambda tracker: tracker.log_images({key: pixels}, step=step, **self._of_images))

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
