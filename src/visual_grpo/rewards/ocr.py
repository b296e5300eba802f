"""Judges text in images: is what can be read there what the prompt asks for?

The score is that of Flow-GRPO (arXiv 2505.05470): one minus the edit distance over the asked text's length.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.quoted import asked_text
from visual_grpo.types import PromptRecord, RewardOutput


class OcrReward:
    """How much of the asked text the image shows: 1 = all of it and nothing else, 0 = nothing of it.

    The value is 1 - min(distance, n) / n with the Levenshtein distance to the asked text of n characters. Part
    ``accuracy`` is 1 where the two are equal, else 0. Case, white space and character width do not count. The
    text is ``record.metadata["text"]``, else what the prompt quotes; a record with neither is unscored.

    Args:
        line: where the image holds its one line of text, [top, left, bottom, right] as shares of height and
            width. Without it text is searched for in the whole image, which takes much longer.
    """

    needs_target = False

    def __init__(self, line: Sequence[float] | None = None) -> None:
        self.line = None if line is None else _checked_line(line)

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError where there are records and none asks for a text."""
        first, count = None, 0
        for record in records:
            if asked_text(record):
                return
            first, count = first or record, count + 1
        if first is not None:
            raise UserError(
                f"the reward 'ocr' scores text that a prompt puts in quotes (\"...\", '...', “...” or 「...」) or that"
                f" stands in metadata text, and none of {count} records has one; the first is"
                f" {first.id!r}: {first.prompt!r}. Quote the text in the prompts or remove the reward"
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        from visual_grpo.rewards.read_text import read_line, read_page

        asked = [asked_text(record) for record in prompts]
        rows = [row for row, text in enumerate(asked) if text]
        images = [samples[row] for row in rows]
        read = [read_page(image) for image in images] if self.line is None else read_line(images, self.line)
        values, accuracy = torch.full((len(samples),), torch.nan), torch.full((len(samples),), torch.nan)
        for row, text in zip(rows, read, strict=True):
            values[row] = closeness(text, asked[row] or "")
            accuracy[row] = float(values[row] == 1)
        return RewardOutput(values=values, parts={"accuracy": accuracy})


def closeness(read: str, asked: str) -> float:
    """1 - min(distance, n) / n over the n characters of ``asked``, both normalised."""
    wanted = normalised(asked)
    distance = Levenshtein.distance(normalised(read), wanted)
    return 1 - min(distance, len(wanted)) / len(wanted)


def normalised(text: str) -> str:
    """Without white space, case and full-width forms, which the recogniser gives now and then for Latin letters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _checked_line(line: Sequence[float]) -> tuple[float, float, float, float]:
    if len(line) == 4 and 0 <= line[0] < line[2] <= 1 and 0 <= line[1] < line[3] <= 1:
        top, left, bottom, right = line
        return top, left, bottom, right
    raise UserError(f"ocr: line must be [top, left, bottom, right] in shares from 0 to 1, got {line!r}")
