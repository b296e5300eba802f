"""A reward that a different process computes: a worker with its own environment, asked over HTTP."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint, sanitize
from visual_grpo.common.images import read_image, to_pil
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.ocr import asked_text, closeness
from visual_grpo.rewards.remote.client import (
    RequestError,
    ScoredSample,
    ServerRefusedError,
    ServerReward,
    check_whole_number,
    reward_output,
    shown,
)
from visual_grpo.rewards.remote.local_worker import started_worker

_PART = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LARGEST = 3.4e38
"""Rewards are float32."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The content of one request."""

    images: Sequence[str]
    """Base64 of image files."""
    records: Sequence[PromptRecord]
    sources: Sequence[Sequence[str]] | None
    """The images to edit, per sample; None if they are not sent."""
    model: str | None
    """The weights, or the reward, that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    path: str
    body: Callable[[Batch], dict[str, Any]]
    answers: Callable[[dict[str, Any], Batch], list[ScoredSample | RequestError]]
    models: Callable[[dict[str, Any]], Sequence[str] | None]
    """The models that GET /health names; None if it names none."""


def _body(batch: Batch) -> dict[str, Any]:
    body = {
        "images": batch.images,
        "prompts": [record.prompt for record in batch.records],
        "metadata": [dict(record.metadata) for record in batch.records],
    }
    return body if batch.sources is None else {**body, "sources": batch.sources}


def _flow_factory_body(batch: Batch) -> dict[str, Any]:
    prompts = [record.prompt for record in batch.records]
    body = {"image": batch.images, "prompt": prompts}
    return body if batch.sources is None else {**body, "condition_images": batch.sources}


def _unirl_body(batch: Batch) -> dict[str, Any]:
    requests = []
    for row, (image, record) in enumerate(zip(batch.images, batch.records, strict=True)):
        # A history of turns: the images that are edited come before the result.
        sources = [] if batch.sources is None else [{"text": "", "image_b64": source} for source in batch.sources[row]]
        turns = [*sources, {"text": record.prompt, "image_b64": image}]
        request = {"history": turns, "required_rewards": [batch.model], "metadata": dict(record.metadata)}
        requests.append(request)
    return {"requests": requests}


def _unirl_answers(answer: dict[str, Any], batch: Batch) -> list[ScoredSample | RequestError]:
    results, errors = _checked_list("results", answer.get("results"), len(batch.images)), answer.get("errors")
    reasons = errors if isinstance(errors, list) and len(errors) == len(results) else [None] * len(results)
    return [_unirl_scored(*pair, batch.model) for pair in zip(results, reasons, strict=True)]


def _unirl_scored(result: Any, errors: Any, reward: str | None) -> ScoredSample | RequestError:
    """The score is the metric named as the reward, else ``overall``, else the only one; NaN means unscored."""
    metrics = result.get(reward) if isinstance(result, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        why = errors.get(reward) if isinstance(errors, dict) else None
        return RequestError(f"no score of {reward!r}: {sanitize(str(why or 'the service does not say why'))[:200]}")
    names = [name for name in (reward, "overall") if name in metrics] or list(metrics)
    if names[0] not in (reward, "overall") and len(metrics) > 1:
        return RequestError(f"neither {reward!r} nor 'overall' is among its metrics {', '.join(metrics)}"[:200])
    score = metrics[names[0]]
    parts = {re.sub(r"[^A-Za-z0-9_.-]", "_", name): part for name, part in metrics.items() if name != names[0]}
    return _judged(None if isinstance(score, float) and math.isnan(score) else score, parts)


PROTOCOLS = {
    "worker": Protocol(
        path="/score",
        body=_body,
        answers=lambda answer, batch: (
            _read_texts(answer["texts"], batch.records)
            if answer.get("texts") is not None
            else _scored(answer.get("scores"), answer.get("parts"), len(batch.images))
        ),
        models=lambda health: None if health.get("model") is None else [str(health["model"])],
    ),
    "flow_factory": Protocol(
        path="/compute",
        body=_flow_factory_body,
        answers=lambda answer, batch: _scored(answer.get("rewards"), None, len(batch.images)),
        models=lambda health: None,
    ),
    "unirl": Protocol(
        path="/score",
        body=_unirl_body,
        answers=_unirl_answers,
        models=lambda health: list(health["rewards"]) if isinstance(health.get("rewards"), dict) else None,
    ),
}
"""``flow_factory``: as the code of its example server has it (reward_server/example_server.py, since January 2026);
``unirl``: as that of UniRL's reward service (reward_service/schemas.py, June 2026)."""


def _scored(scores: Any, parts: Any, count: int) -> list[ScoredSample | RequestError]:
    """Checks ``scores``, a list of numbers and nulls, and ``parts``, name -> such a list. Raises RequestError."""
    _checked_list("scores", scores, count)
    parts = {} if parts is None else parts
    if not isinstance(parts, dict) or not all(map(_PART.fullmatch, parts)):
        expected = "an object of lists with names of letters, digits and _.-"
        raise RequestError(f"its parts must be {expected}, got {parts!r:.60}", by_sample=True)
    columns = {name: _checked_list(f"parts.{name}", column, count) for name, column in parts.items()}
    return [_judged(score, {name: column[row] for name, column in columns.items()}) for row, score in enumerate(scores)]


def _read_texts(texts: Any, records: Sequence[PromptRecord]) -> list[ScoredSample | RequestError]:
    """Scores the texts of images as the reward ``ocr`` does. Raises RequestError."""
    answers: list[ScoredSample | RequestError] = []
    for text, record in zip(_checked_list("texts", texts, len(records)), records, strict=True):
        requested = asked_text(record)
        if not isinstance(text, str):
            answers.append(RequestError(f"its text is {text!r:.60}, not a string"))
        elif requested is None:
            answers.append(ScoredSample(math.nan))
        else:
            value = closeness(text, requested)
            answers.append(ScoredSample(value, {"accuracy": float(value == 1)}))
    return answers


def _judged(score: Any, parts: Mapping[str, Any]) -> ScoredSample | RequestError:
    """Null is unscored, anything but a finite number is lost; a part that is not a number is NaN."""
    value = math.nan if score is None else _number(score)
    if score is not None and math.isnan(value):
        return RequestError(f"its score is {score!r:.60}, not a finite number or null")
    return ScoredSample(value, {name: _number(part) for name, part in parts.items()})


def _checked_list(what: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, list):
        raise RequestError(f"its {what} must be a list, got {values!r:.60}", by_sample=True)
    if len(values) != count:
        raise RequestError(f"its {what} are {len(values)} for {count} images", by_sample=True)
    return values


def _number(value: Any) -> float:
    """NaN for anything but a finite number of float32; ``true`` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return math.nan
    return float(value)


HEALTH = "/health"
log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class HttpReward(ServerReward):
    """The score that a worker at ``url`` gives each image, in the worker's scale; texts that it reads are scored as by
    the reward ``ocr``.

    A sample for which the worker says null is unscored. One for which asking failed for good is unscored too, and
    counts for `max_failed_share`. See docs/reward_workers.md.

    Args:
        model: the weights that the worker must say it has; null = any. With ``unirl``: the reward of the service.
        protocol: ``worker`` (docs/reward_workers.md), ``flow_factory`` or ``unirl``.
        batch_size: images in a request.
        sources: send the images that were edited too; every record must have one.
        worker: folder of an installed worker, such as workers/tesseract, which each process starts for itself, in
            place of a ``url``.
        environment: variables of that worker.
        metadata: names that every scored record's metadata must have; a run in which no record has them is refused.
    """

    model: str | None = None
    protocol: str = "worker"
    batch_size: int = 16
    sources: bool = False
    worker: str | None = None
    environment: Mapping[str, str] | None = None
    metadata: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            hint = nearest_hint(self.protocol, PROTOCOLS)
            raise UserError(f"http: protocol must be {', '.join(PROTOCOLS)}, got {self.protocol!r}.{hint}")
        if self.protocol == "unirl" and self.model is None:
            raise UserError("http: with protocol unirl, model must name the reward of the service")
        check_whole_number("http: batch_size", self.batch_size, 1)
        if isinstance(self.metadata, str):
            raise UserError(f"http: metadata must be a list of names, got {self.metadata!r}: [{self.metadata}]")
        if self.worker is not None and self.url != ServerReward.url:
            raise UserError(f"http: url is {shown(self.url)} and worker is {self.worker!r}; expected one of them")
        if self.worker is not None and self.api_key is not None:
            raise UserError("http: api_key is for a server at url; a worker that this process starts has its own key")
        if self.worker is None and self.environment is not None:
            raise UserError("http: environment is for a worker that this process starts: name the worker with worker")
        self._protocol = PROTOCOLS[self.protocol]
        self._reasons: set[str] = set()
        self.needs = Needs(source=self.sources)

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        if records and not any(record.metadata.keys() >= {*self.metadata} for record in records):
            raise UserError(
                f"{self.worker or shown(self.url)} scores records with the metadata {', '.join(self.metadata)}, which"
                f" none of {len(records)} records has; the first is"
                f" {records[0].id!r}. Add the metadata (docs/reward_workers.md), or choose a different reward"
            )

    def check_machine(self) -> None:
        """Asks whether the worker is there, has loaded its weights, and which. Raises UserError."""
        self._start()
        remedy = "Start the worker there (docs/reward_workers.md), or set the option url"
        health = self.get(HEALTH, remedy)
        status = health.get("status") if isinstance(health, dict) else None
        if status != "ok":
            hint = "it still loads its weights: start the run again when it says ok" if status == "loading" else ""
            url = shown(self.url) + HEALTH
            raise UserError(f'{url} must answer {{"status": "ok"}}, got {str(health)[:200]}. {hint}'.rstrip())
        self._check_model(self._protocol.models(health))

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        self._start()
        # Retries, halves, and several samples of one source encode no image twice.
        encoded = cache(lambda row: self.encoded(to_pil(samples[row])))
        source = cache(lambda path: self.encoded(read_image(path)))

        def batch(rows: Sequence[int]) -> Batch:
            edited = [[source(path) for path in prompts[row].source_images] for row in rows] if self.sources else None
            return Batch(
                images=[encoded(row) for row in rows],
                records=[prompts[row] for row in rows],
                sources=edited,
                model=self.model,
            )

        def body(rows: Sequence[int]) -> bytes:
            content = self._protocol.body(batch(rows))
            try:
                return json.dumps(content, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                ids = ", ".join(repr(prompts[row].id) for row in rows[:5])
                raise UserError(f"http: the metadata of the records {ids} is not valid JSON: {error}") from error

        def read(answer: Any, rows: Sequence[int]) -> list[ScoredSample | RequestError]:
            return self._read(answer, batch(rows))

        return reward_output(self.ask(self._protocol.path, len(samples), self.batch_size, body, read))

    def _start(self) -> None:
        if self.worker is not None:
            running = started_worker(self.worker, self.environment or {})
            self.url, self._headers["Authorization"] = running.url, f"Bearer {running.key}"

    def _read(self, answer: Any, batch: Batch) -> list[ScoredSample | RequestError]:
        url = shown(self.url + self._protocol.path)
        if not isinstance(answer, dict):
            raise RequestError(f"{url} must answer with a JSON object, got {str(answer)[:100]}", by_sample=True)
        if answer.get("model") is not None:  # A worker may have been restarted with other weights.
            self._check_model([str(answer["model"])])
        why = sanitize(str(answer.get("unscored") or ""))[:200]
        if why and why not in self._reasons:
            self._reasons.add(why)
            log.warning("the worker at %s leaves images unscored: %s", shown(self.url), why)
        try:
            return self._protocol.answers(answer, batch)
        except RequestError as error:
            raise RequestError(f"{url}: {error.reason}", by_sample=error.by_sample) from error

    def _check_model(self, models: Sequence[str] | None) -> None:
        if self.model is None or (models is not None and self.model in models):
            return
        has = "does not say which it has" if models is None else f"has {', '.join(map(repr, models)) or 'none'}"
        raise ServerRefusedError(f"the option model asks for {self.model!r}, and the worker at {shown(self.url)} {has}")
