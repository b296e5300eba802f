"""What UnifiedReward says of an image: a line ``Alignment Score (1-5): 3.6`` for each aspect."""

from __future__ import annotations

import re

ASPECTS = ("Alignment", "Coherence", "Style")
_LINE = re.compile(r"(Alignment|Coherence|Style) Score \(1-5\):\s*(\d+(?:\.\d+)?)(?![\d.]*\d)")


def parse(text: str) -> dict[str, float | None]:
    """The score of every aspect, 1 to 5; None for one that is missing, stated twice or outside the range."""
    found: dict[str, list[float]] = {aspect: [] for aspect in ASPECTS}
    for aspect, number in _LINE.findall(text):
        found[aspect].append(float(number))
    return {aspect: own[0] if len(own) == 1 and 1 <= own[0] <= 5 else None for aspect, own in found.items()}


def mean(scores: dict[str, float | None]) -> float | None:
    """Over the aspects; None unless all have a score: a mean of others would be of another scale."""
    known = [score for score in scores.values() if score is not None]
    return sum(known) / len(ASPECTS) if len(known) == len(ASPECTS) else None
