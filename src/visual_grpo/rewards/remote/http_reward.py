"""A reward that another process computes: a worker with its own environment, asked over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.images import is_image, read_image, to_pil
from visual_grpo.rewards.remote.client import TRANSPORT, Client, Lost, RefusedError, RequestError, shown
from visual_grpo.rewards.remote.protocols import PROTOCOLS, Batch, Encoder, Scored, reward_output
from visual_grpo.types import Needs, PromptRecord, RewardOutput

HEALTH = "/health"


class HttpReward:
    """The score that a worker at ``url`` gives each image, in the worker's scale.

    A sample for which the worker says null is unscored. One for which asking failed for good is unscored too, and
    counts for `max_failed_share`. See docs/reward_workers.md.

    Args:
        url: the worker's base address.
        model: the weights that the worker must say it has; null = any. With ``unirl``: the reward of the service.
        protocol: ``worker`` (docs/reward_workers.md), ``flow_factory`` or ``unirl``.
        timeout: seconds for one request.
        deadline: seconds for all requests about one batch of samples, with their retries.
        retries: further attempts after a failure that may pass.
        concurrency: requests at a time.
        batch_size: images in a request.
        stop_after: requests in a row that may fail for good before the run stops; 0 = any number.
        image_format: ``png`` or ``jpeg``.
        image_size: pixels of the longer side, to which larger images are scaled down; null = as they are.
        sources: send the images that were edited too; every record must have one.
        parts: the components of the worker's scores that are reported; null = all.
        headers: of every request.
        api_key: sent as ``Authorization: Bearer``.
    """

    waits = True
    transport = TRANSPORT

    def __init__(
        self,
        url: str = "http://127.0.0.1:8765",
        model: str | None = None,
        protocol: str = "worker",
        timeout: float = 60.0,
        deadline: float = 600.0,
        retries: int = 5,
        concurrency: int = 4,
        batch_size: int = 16,
        stop_after: int = 5,
        image_format: str = "png",
        image_size: int | None = None,
        sources: bool = False,
        parts: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise UserError(
                f"http: protocol must be {', '.join(PROTOCOLS)}, got {protocol!r}.{nearest_hint(protocol, PROTOCOLS)}"
            )
        if protocol == "unirl" and model is None:
            raise UserError("http: with protocol unirl, model must name the reward of the service")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"http: batch_size must be a whole number of at least 1, got {batch_size!r}")
        self.client = Client(
            url,
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            concurrency=concurrency,
            stop_after=stop_after,
            api_key=api_key,
            headers=headers,
        )
        self.protocol = PROTOCOLS[protocol]
        self.model = model
        self.batch_size = batch_size
        self.encoder = Encoder(image_format, image_size)
        self.sources = sources
        self.parts = None if parts is None else list(parts)
        self.needs = Needs(source=sources)

    def check_machine(self) -> None:
        """Asks whether the worker is there, has loaded its weights, and which. Raises UserError."""
        url = shown(self.client.url)
        health = self.client.get(
            HEALTH, "Start the worker there (docs/reward_workers.md: make worker NAME=...), or set the option url"
        )
        if not isinstance(health, dict) or health.get("status") != "ok":
            status = health.get("status") if isinstance(health, dict) else None
            hint = "it still loads its weights: start the run again when it says ok" if status == "loading" else ""
            raise UserError(f'{url}{HEALTH} must answer {{"status": "ok"}}, got {str(health)[:200]}. {hint}'.rstrip())
        self._check_model(self.protocol.models(health))

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        if wrong := [type(sample).__name__ for sample in samples if not is_image(sample)]:
            raise UserError(f"http: a worker scores images, got {wrong[0]}")
        # Retries, halves, and several samples of one source encode no image twice.
        encoded = cache(lambda row: self.encoder.base64(to_pil(samples[row])))
        source = cache(lambda path: self.encoder.base64(read_image(path)))

        def batch(rows: Sequence[int]) -> Batch:
            return Batch(
                images=[encoded(row) for row in rows],
                prompts=[prompts[row].prompt for row in rows],
                metadata=[dict(prompts[row].metadata) for row in rows],
                sources=[[source(path) for path in prompts[row].source_images] for row in rows]
                if self.sources
                else None,
                model=self.model,
            )

        answers = self.client.ask(
            self.protocol.path,
            len(samples),
            self.batch_size,
            lambda rows: _json(self.protocol.body(batch(rows)), [prompts[row].id for row in rows]),
            lambda answer, rows: self._read(answer, batch(rows)),
        )
        return reward_output(answers, self.parts)

    def _read(self, answer: Any, batch: Batch) -> list[Scored | Lost]:
        url = shown(self.client.url + self.protocol.path)
        if not isinstance(answer, dict):
            raise RequestError(f"{url} must answer with a JSON object, got {str(answer)[:100]}", by_sample=True)
        if answer.get("model") is not None:  # A worker may have been restarted with other weights.
            self._check_model([str(answer["model"])])
        try:
            return self.protocol.answers(answer, batch)
        except RequestError as error:
            raise RequestError(f"{url}: {error.reason}", by_sample=error.by_sample) from error

    def _check_model(self, there: Sequence[str] | None) -> None:
        if self.model is None or (there is not None and self.model in there):
            return
        has = "does not say which it has" if there is None else f"has {', '.join(map(repr, there)) or 'none'}"
        raise RefusedError(
            f"the option model asks for {self.model!r}, and the worker at {shown(self.client.url)} {has}"
        )


def _json(body: Mapping[str, Any], ids: Sequence[str]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"http: the metadata of the records {', '.join(map(repr, ids[:5]))} is no JSON: {error}"
        ) from error
