"""The JSON that reward services speak: this project's own, and those of two others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from visual_grpo.rewards.remote.answers import Scored, check_length, judged, scored
from visual_grpo.rewards.remote.faults import Lost
from visual_grpo.visible_text import visible


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is asked in one request."""

    images: Sequence[str]
    """Base64 of image files."""
    prompts: Sequence[str]
    metadata: Sequence[Any]
    sources: Sequence[Sequence[str]] | None
    """The images that were edited, of each sample; None if they are not sent."""
    model: str | None
    """The weights, or the reward, that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a batch is asked and answered."""

    path: str
    body: Callable[[Batch], dict[str, Any]]
    answers: Callable[[dict[str, Any], Batch], list[Scored | Lost]]
    models: Callable[[dict[str, Any]], Sequence[str] | None]
    """What GET /health says is there; None if it does not."""


def _own_body(batch: Batch) -> dict[str, Any]:
    body = {"images": batch.images, "prompts": batch.prompts, "metadata": batch.metadata}
    return body if batch.sources is None else {**body, "sources": batch.sources}


def _own_answers(answer: dict[str, Any], batch: Batch) -> list[Scored | Lost]:
    return scored(answer.get("scores"), answer.get("parts"), len(batch.images))


def _own_models(health: dict[str, Any]) -> Sequence[str] | None:
    return [str(health["model"])] if health.get("model") is not None else None


def _flow_factory_body(batch: Batch) -> dict[str, Any]:
    body: dict[str, Any] = {"images": batch.images, "prompts": batch.prompts}
    return body if batch.sources is None else {**body, "condition_images": batch.sources}


def _flow_factory_answers(answer: dict[str, Any], batch: Batch) -> list[Scored | Lost]:
    return scored(answer.get("rewards"), None, len(batch.images))


def _unirl_body(batch: Batch) -> dict[str, Any]:
    requests = []
    for row, (image, prompt) in enumerate(zip(batch.images, batch.prompts, strict=True)):
        # A history of turns: the images that are edited come before the result.
        sources = [] if batch.sources is None else [{"text": "", "image_b64": source} for source in batch.sources[row]]
        turns = [*sources, {"text": prompt, "image_b64": image}]
        requests.append({"history": turns, "required_rewards": [batch.model], "metadata": batch.metadata[row]})
    return {"requests": requests}


def _unirl_answers(answer: dict[str, Any], batch: Batch) -> list[Scored | Lost]:
    results, errors = answer.get("results"), answer.get("errors")
    check_length("results", results, len(batch.images))
    reasons = errors if isinstance(errors, list) and len(errors) == len(batch.images) else [None] * len(batch.images)
    return [_unirl_scored(*pair, batch.model) for pair in zip(results or [], reasons, strict=True)]


def _unirl_scored(result: Any, errors: Any, reward: str | None) -> Scored | Lost:
    """The score is the metric named as the reward, else ``overall``, else the only one; their NaN means unscored."""
    metrics = result.get(reward) if isinstance(result, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        why = errors.get(reward) if isinstance(errors, dict) else None
        return Lost(f"no score of {reward!r}: {visible(str(why or 'the service does not say why'))[:200]}")
    names = [name for name in (reward, "overall") if name in metrics] or list(metrics)
    if names[0] not in (reward, "overall") and len(metrics) > 1:
        return Lost(f"neither {reward!r} nor 'overall' is among its metrics {', '.join(metrics)}"[:200])
    score = metrics[names[0]]
    parts = {re.sub(r"[^A-Za-z0-9_.-]", "_", name): part for name, part in metrics.items() if name != names[0]}
    return judged(None if isinstance(score, float) and math.isnan(score) else score, parts)


def _unirl_models(health: dict[str, Any]) -> Sequence[str] | None:
    rewards = health.get("rewards")
    return list(rewards) if isinstance(rewards, dict) else None


PROTOCOLS = {
    "worker": Protocol(path="/score", body=_own_body, answers=_own_answers, models=_own_models),
    "flow_factory": Protocol(
        path="/compute", body=_flow_factory_body, answers=_flow_factory_answers, models=lambda health: None
    ),
    "unirl": Protocol(path="/score", body=_unirl_body, answers=_unirl_answers, models=_unirl_models),
}
"""``flow_factory`` and ``unirl``: as their documentation describes them in 2026."""
