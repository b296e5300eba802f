"""TensorBoard and Weights & Biases beside MLflow, through accelerate's trackers; one that fails ends no run."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from visual_grpo.config import TrackingConfig
from visual_grpo.errors import UserError

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
    if (folder := config.tensorboard) is not None:
        logs.append(_ExtraLog("TensorBoard", lambda: _tensorboard(Path(folder), name), dataformats="NHWC"))
    if (mode := config.wandb) is not None:
        logs.append(_ExtraLog("Weights & Biases", lambda: _wandb(mode, name, params)))
    try:
        yield list[Log](logs)
    finally:
        for each in logs:
            each.close()


class _ExtraLog:
    """Passes everything on until it fails; what comes after that would fail too, or be incomplete."""

    def __init__(self, name: str, make: Callable[[], GeneralTracker], **of_images: str) -> None:
        self._name, self._of_images = name, of_images
        self._tracker: Any = None
        with self._warning():
            from accelerate import PartialState

            PartialState()  # accelerate's own log asks for it.
            tracker = make()
            tracker.start()
            self._tracker = tracker

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        with self._warning():
            if self._tracker is not None:
                self._tracker.log(dict(values), step=step)

    def image(self, image: Image, key: str, step: int) -> None:
        import numpy as np

        with self._warning():
            if self._tracker is not None:
                pixels = np.asarray(image.convert("RGB"))[None]
                self._tracker.log_images({key: pixels}, step=step, **self._of_images)

    def close(self) -> None:
        with self._warning():
            if self._tracker is not None:
                self._tracker.finish()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            log.warning("%s fails and gets nothing from here on: %s. The run goes on.", self._name, error)


def _tensorboard(folder: Path, name: str) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    # The name of a resumed run may have said other steps, but had the same id.
    key = re.search(r"\(\w{8}\)$", name)
    earlier = sorted(folder.glob(f"*{key[0]}")) if key else []
    return TensorBoardTracker(earlier[0].name if earlier else name.replace("/", "_"), folder)


def _wandb(mode: str, name: str, params: Mapping[str, Any]) -> GeneralTracker:
    import wandb
    from accelerate.tracking import WandBTracker

    silent = wandb.Settings(silent=True, console="off", init_timeout=_INIT_SECONDS, finish_timeout=_FINISH_SECONDS)
    return WandBTracker("visual-grpo", name=name, config=dict(params), mode=mode, settings=silent)
