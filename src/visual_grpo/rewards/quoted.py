"""Extracts the text that a prompt asks for: the text in quotation marks."""

from __future__ import annotations

import re

from visual_grpo.errors import UserError
from visual_grpo.types import PromptRecord

_QUOTED = re.compile("'([^']*)'"), re.compile("“([^“”]*)”"), re.compile('"([^"]*)"'), re.compile("「([^「」]*)」")
"""One pattern for each kind of quotation marks that diffusers 0.42 recognises (`GlmImagePipeline.get_glyph_texts`),
because only this text reaches the glyph encoder. As there, two apostrophes can match as a pair of quotation marks."""


def quoted_texts(prompt: str) -> list[str]:
    """The quoted texts that the pipeline would draw, in the prompt's order, without empty ones."""
    found = [match for pattern in _QUOTED for match in pattern.finditer(prompt)]
    return [match[1] for match in sorted(found, key=lambda match: match.start()) if match[1].strip()]


def asked_text(record: PromptRecord) -> str | None:
    """The text that the record's image should show; None if there is none.

    ``record.metadata["text"]`` takes precedence over the prompt's quotes. Raises UserError if it is not a string.
    """
    if "text" not in record.metadata:
        return " ".join(quoted_texts(record.prompt)) or None
    text = record.metadata["text"]
    if not isinstance(text, str):
        raise UserError(f"reward 'ocr': record {record.id!r} has metadata text {text!r}; expected a string")
    return text if text.strip() else None
