"""GLM-Image's processor with a preview of a different size.

Text-to-image generates a preview grid before the image's own tokens, 16 x 16 at a square format
whatever the resolution. A small model trained with fewer preview tokens says so in
``visual_grpo.json`` next to its ``model_index.json``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from transformers import GlmImageProcessor

FACTS = "visual_grpo.json"
STOCK_SIDE = 16
PIXELS_PER_TOKEN = 32


class PreviewProcessor(GlmImageProcessor):
    """``preview_side`` tokens a side at a square format; the stock processor's is 16."""

    preview_side = STOCK_SIDE

    @classmethod
    def of(cls, stock: GlmImageProcessor, preview_side: int) -> PreviewProcessor:
        """The same processor with a preview of ``preview_side`` tokens a side."""
        processor = cls(stock.image_processor, stock.tokenizer, stock.chat_template)
        processor.preview_side = preview_side
        return processor

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Rows and columns of the image's tokens and of the preview's."""
        rows, columns = height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN
        ratio = math.sqrt(rows / columns)
        preview = max(1, int(self.preview_side * ratio)), max(1, int(self.preview_side / ratio))
        return rows, columns, *preview


def preview_side(pipeline_folder: str) -> int:
    """Returns the preview side that the folder names; 16 for a released model."""
    facts = Path(pipeline_folder) / FACTS
    if not facts.is_file():
        return STOCK_SIDE
    return int(json.loads(facts.read_text(encoding="utf-8"))["preview_side"])
