"""Scores text in images: does the image show the text that the prompt asks for?

As in Flow-GRPO (arXiv 2505.05470), the score is one minus the edit distance divided by the requested text's length.
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
    """How closely the text in the image matches the requested text: 1 = exactly, 0 = not at all.

    The value is 1 - min(distance, n) / n with the Levenshtein distance to the requested text of n characters. Part
    ``accuracy`` is 1 if the two are equal, else 0. Case, white space and character width are ignored. The requested
    text is ``record.metadata["text"]``, else the quoted text in the prompt; a record with neither is unscored.

    Args:
        line: the region of the image's single line of text, [top, left, bottom, right] as shares of height and
            width. Without it, text is detected in the whole image, which takes much longer.
    """

    def __init__(self, line: Sequence[float] | None = None) -> None:
        self.line = None if line is None else _checked_line(line)

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if there are records but none of them asks for text."""
        first, count = None, 0
        for record in records:
            if asked_text(record):
                return
            first, count = first or record, count + 1
        if first is not None:
            raise UserError(
                f"the reward 'ocr' scores text that is quoted in the prompt (\"...\", '...', “...” or 「...」) or given"
                f" as metadata text, and none of {count} records has any; the first is"
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
    """1 - min(distance, n) / n, where n is the length of ``asked``; both texts are normalised first."""
    wanted = normalised(asked)
    distance = Levenshtein.distance(normalised(read), wanted)
    return 1 - min(distance, len(wanted)) / len(wanted)


def normalised(text: str) -> str:
    """Removes white space, case and full-width forms (which the recogniser sometimes returns for Latin letters)."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _checked_line(line: Sequence[float]) -> tuple[float, float, float, float]:
    if len(line) == 4 and 0 <= line[0] < line[2] <= 1 and 0 <= line[1] < line[3] <= 1:
        top, left, bottom, right = line
        return top, left, bottom, right
    raise UserError(f"ocr: line must be [top, left, bottom, right] in shares from 0 to 1, got {line!r}")
