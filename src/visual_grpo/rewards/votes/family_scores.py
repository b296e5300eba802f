"""Which picture won, family by family: Bradley-Terry scores of the pictures themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from visual_grpo.rewards.votes.bradley_terry import bradley_terry
from visual_grpo.rewards.votes.choices import Choice

RIDGE = 0.1
"""Of the pictures' scores: a normal prior of variance 10, which hardly moves a picture with many choices."""


def family_scores(choices: Sequence[Choice]) -> pd.DataFrame:
    """Columns family, picture, choices and score (log odds within the family), the best of each family first."""
    frames = [
        _of_family(family, [c for c in choices if c.of.family == family and c.preference is not None])
        for family in dict.fromkeys(choice.of.family for choice in choices)
    ]
    columns = ["family", "picture", "choices", "score"]
    return pd.concat([pd.DataFrame(columns=columns), *(frame for frame in frames if len(frame))], ignore_index=True)


def _of_family(family: str, choices: Sequence[Choice]) -> pd.DataFrame:
    pictures = sorted({name for choice in choices for name in (choice.of.first, choice.of.second)})
    place = {name: number for number, name in enumerate(pictures)}
    first = [place[choice.of.first] for choice in choices]
    second = [place[choice.of.second] for choice in choices]
    preference = np.array([choice.preference for choice in choices], dtype=np.float64)
    scores = bradley_terry(first, second, preference, len(pictures), RIDGE)
    table = pd.DataFrame(
        {
            "family": family,
            "picture": pictures,
            "choices": [first.count(number) + second.count(number) for number in range(len(pictures))],
            "score": scores,
        }
    )
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)
