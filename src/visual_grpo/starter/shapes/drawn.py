"""Whether records are of drawn shapes, which alone the rewards of this world can judge."""

from __future__ import annotations

from collections.abc import Iterable

from visual_grpo.errors import UserError, counted
from visual_grpo.starter.shapes.world import ATTRIBUTES
from visual_grpo.types import PromptRecord

_SHOWN = 3


def check_drawn(reward: str, records: Iterable[PromptRecord]) -> None:
    """Raises UserError if a record lacks the attributes of a drawn object in its metadata."""
    others = [record.id for record in records if not all(key in record.metadata for key in ATTRIBUTES)]
    if others:
        shown = ", ".join(map(repr, others[:_SHOWN])) + " ..." * (len(others) > _SHOWN)
        raise UserError(
            f"the reward {reward!r} judges the shapes that the starter draws, by the metadata {', '.join(ATTRIBUTES)};"
            f" {counted(len(others), 'record')} {'lacks' if len(others) == 1 else 'lack'} them: {shown}."
            " Use a reward that fits your data: reward=auto chooses one"
        )
