"""A vision-language model as a judge, at any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.common.errors import UserError, sanitize
from visual_grpo.common.files import write_atomically
from visual_grpo.common.images import read_image, to_pil
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.remote.client import (
    RequestError,
    ScoredSample,
    ServerRefusedError,
    ServerReward,
    reward_output,
    shown,
)
from visual_grpo.rewards.remote.rubrics import Reply, find_rubric, reply_of, score_in, yes_probability

log = logging.getLogger(__name__)

COMPLETIONS, MODELS = "/chat/completions", "/models"
MODES = ("yes_probability", "score")
_TOP = 20
"""The most alternatives that OpenAI's API gives for a token."""


@dataclass(eq=False)
class VlmJudge(ServerReward):
    """Scores each image by a vision-language model's answer to a question about it. See docs/reward_workers.md.

    Answers that cannot be parsed are unscored. Samples whose requests failed for good are unscored too and count for
    `max_failed_share`.

    Args:
        url: the endpoint's base address, with its version.
        model: null = the only one that the endpoint lists.
        rubric: ``alignment``, ``instruction``, ``text``, ``identity``, or a question with {prompt} and {text}.
        mode: ``yes_probability``, P(yes) / (P(yes) + P(no)) of the first word, or ``score``, a number in the reply.
        score_range: [lowest, highest] of a score.
        pattern: a regular expression whose group is the score in a reply; null = the number after "Score".
        source: send the image that was edited before the result; null = as the rubric needs it.
        cache: a folder in which answers are kept, found by image, question, model and settings; null = none is kept.
        max_tokens: of a reply; null = 1 for yes_probability, 512 for a score. A reply that is cut off there has a
            score only if it begins with it, or ``pattern`` finds it.
        extra: further entries of the request, such as {max_completion_tokens: 1, max_tokens: null}; null removes one.
            Without them the temperature and the seed are 0.
    """

    url: str = "http://127.0.0.1:8000/v1"
    _: KW_ONLY
    model: str | None = None
    rubric: str = "alignment"
    mode: str = "yes_probability"
    score_range: Sequence[float] = (1, 10)
    pattern: str | None = None
    source: bool | None = None
    image_size: int | None = 512
    image_format: str = "jpeg"
    cache: str | None = None
    max_tokens: int | None = None
    extra: Mapping[str, Any] | None = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise UserError(f"vlm_judge: mode must be {' or '.join(MODES)}, got {self.mode!r}")
        self._rubric = find_rubric(self.rubric, self.source)
        self.low, self.high = _range(self.score_range)
        self._pattern = None if self.pattern is None else _compiled(self.pattern)
        self.needs = Needs(source=self._rubric.source)
        settings: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": self.max_tokens or 512}
        if self.mode == "yes_probability":
            settings |= {"max_tokens": self.max_tokens or 1, "logprobs": True, "top_logprobs": _TOP}
        self.settings = {key: value for key, value in {**settings, **(self.extra or {})}.items() if value is not None}

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if the question is about a text and no record asks for one."""
        if records and all(self._rubric.question_about(record) is None for record in records):
            raise UserError(
                f"vlm_judge: the rubric asks for the text in the image, and none of {len(records)} records has any."
                " Quote the text in the prompts, or choose a different rubric"
            )

    def check_machine(self) -> None:
        """Asks whether the endpoint is there and has the model. Raises UserError."""
        listed = self.get(MODELS, "Start a server there (docs/reward_workers.md), or set the option url")
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [str(entry.get("id")) for entry in entries or [] if isinstance(entry, dict)]
        url, has = shown(self.url), ", ".join(map(repr, names[:10])) or "none"
        if self.model is None and len(names) != 1:
            raise ServerRefusedError(f"the option model must name one of the models of {url}, which lists {has}")
        if self.model is not None and self.model not in names:
            raise ServerRefusedError(f"the option model asks for {self.model!r}, and {url} has {has}")
        self.model = self.model or names[0]

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        if self.model is None:
            self.check_machine()
        bodies = [self._body(record, sample) for record, sample in zip(prompts, samples, strict=True)]
        replies = self._replies([body for body in dict.fromkeys(bodies) if body is not None])
        answers = [ScoredSample(math.nan) if body is None else self._judged(replies[body]) for body in bodies]
        self._warn([reply for reply in replies.values() if isinstance(reply, Reply)])
        return reward_output(answers)

    def _replies(self, bodies: Sequence[bytes]) -> dict[bytes, Reply | RequestError]:
        """Asks each body once, unless its answer is cached."""
        cached = {body: reply for body in bodies if (reply := self._cached(body)) is not None}
        pending = [body for body in bodies if body not in cached]

        def read(answer: Any, rows: Sequence[int]) -> Sequence[Reply]:
            reply = reply_of(answer)
            if not _is_unparsed(self._judged(reply)):
                self._keep(pending[rows[0]], reply)
            return [reply]

        replies = self.ask(COMPLETIONS, len(pending), 1, lambda rows: pending[rows[0]], read)
        return {**cached, **dict(zip(pending, replies, strict=True))}

    def _cached(self, body: bytes) -> Reply | None:
        """None too for a file that cannot be read, which is written again."""
        if self.cache is None:
            return None
        try:
            return Reply(**json.loads(self._file(body).read_bytes()))
        except (OSError, TypeError, ValueError):
            return None

    def _keep(self, body: bytes, reply: Reply) -> None:
        if self.cache is None:
            return
        try:
            write_atomically(self._file(body), json.dumps(asdict(reply)))
        except OSError as error:
            raise UserError(f"the cache {self.cache} cannot be written: {error}") from error

    def _file(self, body: bytes) -> Path:
        key = hashlib.sha256(shown(self.url).encode() + b"\n" + body).hexdigest()
        return Path(self.cache or "") / key[:2] / f"{key[2:]}.json"

    def _body(self, record: PromptRecord, sample: Tensor) -> bytes | None:
        """None for a record that the question does not fit."""
        question = self._rubric.question_about(record)
        if question is None:
            return None
        images = [read_image(path) for path in record.source_images] if self._rubric.source else []
        urls = [f"data:image/{self.image_format};base64,{self.encoded(image)}" for image in [*images, to_pil(sample)]]
        hint = "Answer with one word, Yes or No."
        if self.mode == "score":
            hint = f"Give a score from {self.low:g} (not at all) to {self.high:g} (perfectly)."
            hint += " End with a line of Score: and the number."
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": f"{question}\n{hint}"}]}]
        return json.dumps({"model": self.model, "messages": messages, **self.settings}, sort_keys=True).encode()

    def _judged(self, reply: Reply | RequestError) -> ScoredSample | RequestError:
        if isinstance(reply, RequestError):
            return reply
        if self.mode == "score":
            return ScoredSample(score_in(reply.text, self.low, self.high, self._pattern, cut=reply.cut))
        value, mass = yes_probability(reply.top)
        return ScoredSample(value, {"yes_or_no": mass})

    def _warn(self, replies: Sequence[Reply]) -> None:
        odd = [reply for reply in replies if _is_unparsed(self._judged(reply))]
        if not odd:
            return
        remedy = ""
        if self.mode == "yes_probability" and not odd[0].top:
            remedy = ": it has no log-probabilities; the endpoint must support top_logprobs, or set mode to score"
        if self.mode == "score" and (cut := sum(reply.cut for reply in odd)):
            remedy = f": {cut} of them ended at max_tokens; raise it"
        log.warning(
            "vlm_judge: %d of %d answers could not be parsed and are unscored, such as %r%s",
            *(len(odd), len(replies), sanitize(odd[0].text[:200]), remedy),
        )


def _is_unparsed(answer: ScoredSample | RequestError) -> bool:
    return isinstance(answer, ScoredSample) and math.isnan(answer.value)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"vlm_judge: pattern is not a valid regular expression: {error}") from error
    if compiled.groups != 1:
        raise UserError(f"vlm_judge: pattern must have one group, which holds the score, got {compiled.groups}")
    return compiled


def _range(bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise UserError(f"vlm_judge: score_range must be [lowest, highest], got {bounds!r}")
    return low, high
