"""The text that a prompt asks for: what stands between quotation marks."""

from __future__ import annotations

import re

from visual_grpo.errors import UserError
from visual_grpo.types import PromptRecord

_QUOTED = re.compile("'([^']*)'"), re.compile("“([^“”]*)”"), re.compile('"([^"]*)"'), re.compile("「([^「」]*)」")
"""One pattern for each kind of marks that diffusers 0.42 looks for (`GlmImagePipeline.get_glyph_texts`): only such
text reaches the glyph encoder. Each is searched by itself, so that an apostrophe may pair with another."""


def quoted_texts(prompt: str) -> list[str]:
    """What the pipeline takes for texts to draw, in the prompt's order, empty ones left out."""
    found = [match for pattern in _QUOTED for match in pattern.finditer(prompt)]
    return [match[1] for match in sorted(found, key=lambda match: match.start()) if match[1].strip()]


def asked_text(record: PromptRecord) -> str | None:
    """The text that the record's image should show, None without one.

    ``record.metadata["text"]`` goes before the prompt's quotes. Raises UserError where it is not a string.
    """
    if "text" not in record.metadata:
        return " ".join(quoted_texts(record.prompt)) or None
    text = record.metadata["text"]
    if not isinstance(text, str):
        raise UserError(f"reward 'ocr': record {record.id!r} has metadata text {text!r}; expected a string")
    return text if text.strip() else None
