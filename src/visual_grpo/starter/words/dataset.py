"""Writes the drawn words as a text-to-image dataset: prompts with target images."""

from __future__ import annotations

import json
from pathlib import Path

from visual_grpo.starter.stamped_folder import digest_of, is_current, whole_folder
from visual_grpo.starter.words.draw import draw
from visual_grpo.starter.words.world import WORDS, prompt_of

_VERSION = 1
"""To be raised when the same configuration draws other pictures."""
_TARGETS = "target_images"


def draw_words(folder: Path, records_per_prompt: int, height: int, width: int) -> str:
    """Writes ``records.jsonl`` and ``target_images/`` unless they already exist for the same arguments.

    Every word occurs ``records_per_prompt`` times with the same picture. ``height`` and ``width`` are pixels.
    Returns the digest of the arguments.
    """
    facts = {"words": _VERSION, "records_per_prompt": records_per_prompt, "height": height, "width": width}
    digest = digest_of(facts)
    if is_current(folder, digest):
        return digest
    with whole_folder(folder, digest) as fresh:
        (fresh / _TARGETS).mkdir()
        for word in WORDS:
            draw(word, height, width).save(fresh / _target(word))
        records = [
            {
                "id": f"word_{number:05d}",
                "prompt": prompt_of(word),
                "target_image": _target(word),
                "metadata": {"text": word},
            }
            for number, word in enumerate(WORDS * records_per_prompt)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (fresh / "records.jsonl").write_text(lines, encoding="utf-8")
    return digest


def _target(word: str) -> str:
    return f"{_TARGETS}/{word}.png"
