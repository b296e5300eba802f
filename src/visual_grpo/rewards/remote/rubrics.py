"""The questions to a judge, and how a model's reply is read: P(yes) of its first word, or a score in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.ocr import asked_text
from visual_grpo.rewards.remote.client import RequestError

LEAST_MASS = 0.1
"""Minimum of P(yes) + P(no); below it the model did not answer the question."""
_AROUND = " \t\r\n.,:;!?\"'`*_()[]\u0120\u2581"
"""Characters around a word in a token; the last two are spaces in the vocabularies of GPT-2 and SentencePiece."""
_COUNTED = r"[\d.,]+[ \t]*(?!(?:stars?|points?)\b[^\w\n]*$)(?:[^\W\d_]|%)"
_RANGE = rf"(?:[-–]|[ \t]+to[ \t]+|(?:[ \t]+(?:and|or)[ \t]+|[ \t]*[-–][ \t]*)(?!{_COUNTED}))\d[\d.,]*"
"""What makes a number a range, as in "7-8" and "between 7 and 8 points", but not in "7 - 8 fingers are missing"."""
_AFTER_COLON, _LABELLED = (
    re.compile(rf"(?:score|rating)\b{between}[^\d\n-]{{0,12}}(?<![.,])(-?\d*[.,]?\d+(?:{_RANGE})?)", re.I | re.M)
    for between in (r"[^\w\n]*[:=]", "")
)
_NUMBER = re.compile(r"(?<![\w.])-?\d*\.?\d+(?![\w.]*\d)")
_SCALE = re.compile(r"[(\[]\s*(?:-?[\d.]+\s*(?:-|–|to)|out of)\s*-?[\d.]+\s*[)\]]", re.IGNORECASE)
"""The range itself, as in "Score (1-5): 4"."""


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """A question about an image."""

    question: str
    """May contain ``{prompt}``, the record's prompt, and ``{text}``, the text that its image should show."""
    source: bool = False
    """True if the source images are sent before the result."""
    of_several: str | None = None
    """The question about an edit of several sources; None = the same."""

    @property
    def fields(self) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(self.question) if name is not None}

    def question_about(self, record: PromptRecord) -> str | None:
        """Returns the question about a record; None if it is about a text and the record has none."""
        text = asked_text(record) if "text" in self.fields else ""
        question = (len(record.source_images) > 1 and self.of_several) or self.question
        return None if text is None else question.format(prompt=record.prompt, text=text)


RUBRICS = {
    "alignment": Rubric(
        question="Does this image show everything that the following description asks for, and as it is described?\n"
        "Description: {prompt}"
    ),
    "instruction": Rubric(
        question="The second image was made from the first by this instruction: {prompt}\n"
        "Does the second image show what the instruction asks for?",
        of_several="The last image was made from the images before it by this instruction: {prompt}\n"
        "Does the last image show what the instruction asks for?",
        source=True,
    ),
    "text": Rubric(
        question='Is the text "{text}" written in this image, completely legible and without a spelling mistake?'
    ),
    "identity": Rubric(
        question="The second image was made from the first by an edit. Is the person, animal or object that both are"
        " about still recognisably the same one?",
        of_several="The last image was made from the images before it. Are the persons, animals or objects that it"
        " takes from them still recognisably the same ones?",
        source=True,
    ),
}


def find_rubric(name: str, source: bool | None) -> Rubric:
    """The rubric of that name, or one with the user's question; ``source`` overrides whether the source is sent.

    Raises UserError for anything but a name or a question with known fields.
    """
    if name in RUBRICS:
        rubric = RUBRICS[name]
        return rubric if source is None else replace(rubric, source=source)
    if " " not in name.strip():
        raise UserError(
            f"rubric must be {', '.join(RUBRICS)} or a question, got {name!r}.{nearest_hint(name, RUBRICS)}"
        )
    try:
        custom = Rubric(question=name, source=bool(source))
        unknown = custom.fields - {"prompt", "text"}
    except ValueError as error:
        raise UserError(f"the rubric's braces do not match ({error}); write {{{{ for a brace itself") from error
    if unknown:
        raise UserError(f"a rubric may contain {{prompt}} and {{text}}, got {{{sorted(unknown)[0]}}}")
    return custom


@dataclass(frozen=True)
class Reply:
    """The text of a reply and the alternatives for its first word."""

    text: str
    top: Sequence[tuple[str, float]]
    """(token, log-probability) of the most likely first tokens that are not only white space."""
    cut: bool = False
    """True where the reply ended at ``max_tokens``."""


def reply_of(completion: Any) -> Reply:
    """Returns the first choice of a chat completion. Raises RequestError if there is none."""
    try:
        choice = completion["choices"][0]
        text = choice["message"]["content"]
        positions = (choice.get("logprobs") or {}).get("content") or []
        first = next((position for position in positions if str(position["token"]).strip(_AROUND)), None)
        listed = [] if first is None else first.get("top_logprobs") or [first]
        top = [(str(entry["token"]), float(entry["logprob"])) for entry in listed]
        if text is not None and not isinstance(text, str):
            raise TypeError("content is not a text")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"the answer is not a chat completion: {str(completion)[:200]}", by_sample=True) from error
    return Reply(text or "", top, choice.get("finish_reason") == "length")


def yes_probability(top: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Returns P(yes) / (P(yes) + P(no)) and P(yes) + P(no), summed over spellings (case, spaces, punctuation).

    The first is NaN if the second is below `LEAST_MASS`: the model answered something else.
    """
    mass = {"yes": 0.0, "no": 0.0}
    for token, logprob in top:
        word = token.strip(_AROUND).casefold()
        if word in mass and logprob <= 0.001:  # Log-probabilities; nothing else, nor NaN, counts.
            mass[word] += math.exp(logprob)
    total = mass["yes"] + mass["no"]
    return (mass["yes"] / total if total >= LEAST_MASS else math.nan), total


def score_in(text: str, low: float, high: float, pattern: re.Pattern[str] | None = None, *, cut: bool = False) -> float:
    """The score in a reply; NaN if there is none, several, a range, or one outside ``low`` to ``high``.

    That is the last match of ``pattern``; without one, the number after the last "Score:" or "Rating:", else the only
    one after "Score" or "Rating", else the only one. "7/10" is 7 if ``high`` is 10. Where the text was ``cut`` off, the
    only number counts if there is nothing else: the score would have come at the end.
    """
    if pattern is not None:
        return _within(pattern.findall(text)[-1:], low, high)
    text = _SCALE.sub("", text)
    scale = rf"((?<![\d.])(?<![:=])(?<![:=][ \t]){low:g}[ \t]*(?:-|–|to)|/|\bout of)[ \t]*{high:g}\b"
    text = re.sub(scale, "", text, flags=re.IGNORECASE)
    labelled = {_number(found): found for found in _LABELLED.findall(text)}.values()
    numbers = _AFTER_COLON.findall(text)[-1:] or labelled or ([text.strip()] if cut else _NUMBER.findall(text))
    return math.nan if re.search(r"\d\s*/\s*\d", text) else _within(numbers, low, high)


def _number(text: str) -> float:
    """Returns NaN for a text that is not a single number, such as a range."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return math.nan


def _within(numbers: Collection[str], low: float, high: float) -> float:
    scores = [*map(_number, numbers)]
    return scores[0] if len(scores) == 1 and low <= scores[0] <= high else math.nan
