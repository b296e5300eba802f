"""The JSON that reward services speak, this project's own and two others', and images as text in it."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from visual_grpo.common.errors import UserError, sanitize
from visual_grpo.common.types import RewardOutput
from visual_grpo.rewards.remote.client import Lost, RequestError

JPEG_QUALITY = 95
_PART = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_PARTS = 64
_LARGEST = 3.4e38
"""Rewards are float32."""


class Encoder:
    """Encodes images as base64 of PNG or JPEG files.

    Args:
        image_format: ``png`` (exact) or ``jpeg`` (quality 95, no colour subsampling): smaller and sooner encoded.
        image_size: pixels of the longer side, to which larger images are scaled down (Lanczos); None = as they are.
    """

    def __init__(self, image_format: str, image_size: int | None) -> None:
        if image_format not in ("png", "jpeg"):
            raise UserError(f"image_format must be png or jpeg, got {image_format!r}")
        if image_size is not None and (not isinstance(image_size, int) or image_size < 1):
            raise UserError(f"image_size must be a number of pixels of at least 1, or null, got {image_size!r}")
        self.image_format = image_format
        self.image_size = image_size

    def base64(self, image: Image.Image) -> str:
        """Encodes an RGB image."""
        if self.image_size is not None and max(image.size) > self.image_size:
            scale = self.image_size / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        if self.image_format == "jpeg":
            image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        else:
            image.save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode("ascii")

    def data_url(self, image: Image.Image) -> str:
        return f"data:image/{self.image_format};base64,{self.base64(image)}"


@dataclass(frozen=True)
class Scored:
    """The judgement of one sample."""

    value: float
    """NaN = the server cannot judge it."""
    parts: Mapping[str, float] = field(default_factory=dict)


def reward_output(answers: Sequence[Scored | Lost], names: Sequence[str] | None = None) -> RewardOutput:
    """Collects B answers into [B] tensors; ``names`` of the parts, None = all that occur."""
    judged = [answer if isinstance(answer, Scored) else Scored(math.nan) for answer in answers]
    if names is None:
        names = list(dict.fromkeys(name for answer in judged for name in answer.parts))
    return RewardOutput(
        values=torch.tensor([answer.value for answer in judged], dtype=torch.float32),
        parts={
            name: torch.tensor([answer.parts.get(name, math.nan) for answer in judged], dtype=torch.float32)
            for name in names
        },
        failed={row: answer.reason for row, answer in enumerate(answers) if isinstance(answer, Lost)},
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The content of one request."""

    images: Sequence[str]
    """Base64 of image files."""
    prompts: Sequence[str]
    metadata: Sequence[Any]
    sources: Sequence[Sequence[str]] | None
    """The images to edit, per sample; None if they are not sent."""
    model: str | None
    """The weights, or the reward, that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    path: str
    body: Callable[[Batch], dict[str, Any]]
    answers: Callable[[dict[str, Any], Batch], list[Scored | Lost]]
    models: Callable[[dict[str, Any]], Sequence[str] | None]
    """The models that GET /health names; None if it names none."""


def _worker_body(batch: Batch) -> dict[str, Any]:
    body = {"images": batch.images, "prompts": batch.prompts, "metadata": batch.metadata}
    return body if batch.sources is None else {**body, "sources": batch.sources}


def _worker_models(health: dict[str, Any]) -> Sequence[str] | None:
    return [str(health["model"])] if health.get("model") is not None else None


def _flow_factory_body(batch: Batch) -> dict[str, Any]:
    body: dict[str, Any] = {"images": batch.images, "prompts": batch.prompts}
    return body if batch.sources is None else {**body, "condition_images": batch.sources}


def _unirl_body(batch: Batch) -> dict[str, Any]:
    requests = []
    for row, (image, prompt) in enumerate(zip(batch.images, batch.prompts, strict=True)):
        # A history of turns: the images that are edited come before the result.
        sources = [] if batch.sources is None else [{"text": "", "image_b64": source} for source in batch.sources[row]]
        turns = [*sources, {"text": prompt, "image_b64": image}]
        requests.append({"history": turns, "required_rewards": [batch.model], "metadata": batch.metadata[row]})
    return {"requests": requests}


def _unirl_answers(answer: dict[str, Any], batch: Batch) -> list[Scored | Lost]:
    count, errors = len(batch.images), answer.get("errors")
    results = _checked_list("results", answer.get("results"), count)
    reasons = errors if isinstance(errors, list) and len(errors) == count else [None] * count
    return [_unirl_scored(*pair, batch.model) for pair in zip(results, reasons, strict=True)]


def _unirl_scored(result: Any, errors: Any, reward: str | None) -> Scored | Lost:
    """The score is the metric named as the reward, else ``overall``, else the only one; NaN means unscored."""
    metrics = result.get(reward) if isinstance(result, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        why = errors.get(reward) if isinstance(errors, dict) else None
        return Lost(f"no score of {reward!r}: {sanitize(str(why or 'the service does not say why'))[:200]}")
    names = [name for name in (reward, "overall") if name in metrics] or list(metrics)
    if names[0] not in (reward, "overall") and len(metrics) > 1:
        return Lost(f"neither {reward!r} nor 'overall' is among its metrics {', '.join(metrics)}"[:200])
    score = metrics[names[0]]
    parts = {re.sub(r"[^A-Za-z0-9_.-]", "_", name): part for name, part in metrics.items() if name != names[0]}
    return _judged(None if isinstance(score, float) and math.isnan(score) else score, parts)


def _unirl_models(health: dict[str, Any]) -> Sequence[str] | None:
    rewards = health.get("rewards")
    return list(rewards) if isinstance(rewards, dict) else None


PROTOCOLS = {
    "worker": Protocol(
        path="/score",
        body=_worker_body,
        answers=lambda answer, batch: _scored(answer.get("scores"), answer.get("parts"), len(batch.images)),
        models=_worker_models,
    ),
    "flow_factory": Protocol(
        path="/compute",
        body=_flow_factory_body,
        answers=lambda answer, batch: _scored(answer.get("rewards"), None, len(batch.images)),
        models=lambda health: None,
    ),
    "unirl": Protocol(path="/score", body=_unirl_body, answers=_unirl_answers, models=_unirl_models),
}
"""``flow_factory`` and ``unirl``: as their documentation describes them in 2026."""


def _scored(scores: Any, parts: Any, count: int) -> list[Scored | Lost]:
    """Checks ``scores``, a list of numbers and nulls, and ``parts``, name -> such a list or None.

    Raises:
        RequestError: not one entry per sample.
    """
    _checked_list("scores", scores, count)
    parts = {} if parts is None else parts
    if not isinstance(parts, dict) or len(parts) > _MOST_PARTS or not all(map(_PART.fullmatch, parts)):
        raise RequestError(
            f"its parts must be an object of at most {_MOST_PARTS} lists with names of letters, digits and _.-,"
            f" got {_short(parts)}",
            by_sample=True,
        )
    columns = {name: _checked_list(f"parts.{name}", column, count) for name, column in parts.items()}
    return [_judged(score, {name: column[row] for name, column in columns.items()}) for row, score in enumerate(scores)]


def _judged(score: Any, parts: Mapping[str, Any]) -> Scored | Lost:
    """Null is unscored, anything but a finite number is lost; a part that is no number is NaN."""
    value = math.nan if score is None else _number(score)
    if score is not None and math.isnan(value):
        return Lost(f"its score is {_short(score)}, not a finite number or null")
    return Scored(value, {name: _number(part) for name, part in parts.items()})


def _checked_list(what: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, list):
        raise RequestError(f"its {what} must be a list, got {_short(values)}", by_sample=True)
    if len(values) != count:
        raise RequestError(f"its {what} are {len(values)} for {count} images", by_sample=True)
    return values


def _number(value: Any) -> float:
    """NaN for anything but a finite number of float32; ``true`` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return math.nan
    return float(value)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a very large number"
    return text if len(text) <= 60 else f"{text[:60]}..."
