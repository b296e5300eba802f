"""TensorBoard and Weights & Biases beside MLflow, each through its own client."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from visual_grpo.config import TrackingConfig
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

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
    with ExitStack() as stack:
        logs: list[Log] = []
        if config.tensorboard is not None:
            logs.append(stack.enter_context(_tensorboard(config.tensorboard, name)))
        if config.wandb is not None:
            logs.append(stack.enter_context(_wandb(config.wandb, name, params)))
        yield logs


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

    writer = SummaryWriter(f"{folder}/{name.replace('/', '_')}")
    try:
        yield _TensorBoard(writer)
    finally:
        writer.close()


@contextmanager
def _wandb(mode: Literal["online", "offline"], name: str, params: Mapping[str, Any]) -> Iterator[Log]:
    import wandb

    silent = wandb.Settings(silent=True, console="off")
    run = wandb.init(project="visual-grpo", name=name, config=dict(params), mode=mode, settings=silent)
    try:
        yield _Wandb(run)
    finally:
        run.finish()
