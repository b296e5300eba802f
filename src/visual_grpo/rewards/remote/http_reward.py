"""A reward that another process computes: a worker with its own environment, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.images import is_image, read_image, to_pil
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.remote.client import Lost, RefusedError, RequestError, ServerReward, check_whole_number, shown
from visual_grpo.rewards.remote.protocols import PROTOCOLS, Batch, Encoder, Scored, reward_output

HEALTH = "/health"


@dataclass(kw_only=True, eq=False)
class HttpReward(ServerReward):
    """The score that a worker at ``url`` gives each image, in the worker's scale.

    A sample for which the worker says null is unscored. One for which asking failed for good is unscored too, and
    counts for `max_failed_share`. See docs/reward_workers.md.

    Args:
        model: the weights that the worker must say it has; null = any. With ``unirl``: the reward of the service.
        protocol: ``worker`` (docs/reward_workers.md), ``flow_factory`` or ``unirl``.
        batch_size: images in a request.
        image_format: ``png`` or ``jpeg``.
        image_size: pixels of the longer side, to which larger images are scaled down; null = as they are.
        sources: send the images that were edited too; every record must have one.
        parts: the components of the worker's scores that are reported; null = all.
    """

    model: str | None = None
    protocol: str = "worker"
    batch_size: int = 16
    image_format: str = "png"
    image_size: int | None = None
    sources: bool = False
    parts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            hint = nearest_hint(self.protocol, PROTOCOLS)
            raise UserError(f"http: protocol must be {', '.join(PROTOCOLS)}, got {self.protocol!r}.{hint}")
        if self.protocol == "unirl" and self.model is None:
            raise UserError("http: with protocol unirl, model must name the reward of the service")
        check_whole_number("http: batch_size", self.batch_size, 1)
        self._protocol = PROTOCOLS[self.protocol]
        self.encoder = Encoder(self.image_format, self.image_size)
        self.needs = Needs(source=self.sources)

    def check_machine(self) -> None:
        """Asks whether the worker is there, has loaded its weights, and which. Raises UserError."""
        remedy = "Start the worker there (docs/reward_workers.md: make worker NAME=...), or set the option url"
        health = self.get(HEALTH, remedy)
        status = health.get("status") if isinstance(health, dict) else None
        if status != "ok":
            hint = "it still loads its weights: start the run again when it says ok" if status == "loading" else ""
            url = shown(self.url) + HEALTH
            raise UserError(f'{url} must answer {{"status": "ok"}}, got {str(health)[:200]}. {hint}'.rstrip())
        self._check_model(self._protocol.models(health))

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        if wrong := [type(sample).__name__ for sample in samples if not is_image(sample)]:
            raise UserError(f"http: a worker scores images, got {wrong[0]}")
        # Retries, halves, and several samples of one source encode no image twice.
        encoded = cache(lambda row: self.encoder.base64(to_pil(samples[row])))
        source = cache(lambda path: self.encoder.base64(read_image(path)))

        def batch(rows: Sequence[int]) -> Batch:
            edited = [[source(path) for path in prompts[row].source_images] for row in rows] if self.sources else None
            return Batch(
                images=[encoded(row) for row in rows],
                prompts=[prompts[row].prompt for row in rows],
                metadata=[dict(prompts[row].metadata) for row in rows],
                sources=edited,
                model=self.model,
            )

        answers = self.ask(
            self._protocol.path,
            len(samples),
            self.batch_size,
            lambda rows: _json(self._protocol.body(batch(rows)), [prompts[row].id for row in rows]),
            lambda answer, rows: self._read(answer, batch(rows)),
        )
        return reward_output(answers, self.parts)

    def _read(self, answer: Any, batch: Batch) -> list[Scored | Lost]:
        url = shown(self.url + self._protocol.path)
        if not isinstance(answer, dict):
            raise RequestError(f"{url} must answer with a JSON object, got {str(answer)[:100]}", by_sample=True)
        if answer.get("model") is not None:  # A worker may have been restarted with other weights.
            self._check_model([str(answer["model"])])
        try:
            return self._protocol.answers(answer, batch)
        except RequestError as error:
            raise RequestError(f"{url}: {error.reason}", by_sample=error.by_sample) from error

    def _check_model(self, there: Sequence[str] | None) -> None:
        if self.model is None or (there is not None and self.model in there):
            return
        has = "does not say which it has" if there is None else f"has {', '.join(map(repr, there)) or 'none'}"
        raise RefusedError(f"the option model asks for {self.model!r}, and the worker at {shown(self.url)} {has}")


def _json(body: Mapping[str, Any], ids: Sequence[str]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"http: the metadata of the records {', '.join(map(repr, ids[:5]))} is no JSON: {error}"
        ) from error
