"""Which pairs of samples a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL.Image import Image

from visual_grpo.evaluation import pictures
from visual_grpo.evaluation.compare import join
from visual_grpo.evaluation.generate import read_scores
from visual_grpo.images import read_image

SHOWN = 6
"""Maximum number of pairs in a picture."""


def all_pairs(baseline: Path, trained: Path) -> pd.DataFrame:
    """The rows of `compare.join` with their ``difference`` of totals; NaN where a side could not be scored."""
    rows = join(read_scores(baseline), read_scores(trained))
    rows = rows.assign(difference=rows["total_trained"] - rows["total_baseline"])
    return rows.sort_values(["split", "sampler", "id", "index"], ignore_index=True)


def choose(rows: pd.DataFrame, split: str, sampler: str, shown: int = SHOWN) -> dict[str, pd.DataFrame]:
    """Pairs of one split to show, at most one per prompt.

    ``samples``: of ``sampler``, evenly spaced over the prompts, independent of the result. Of all samplers, so that
    none hides in another: ``gains`` and ``losses``, the largest increases and decreases of the total, and ``unscored``,
    where a side could not be scored, the trained side first.
    """
    rows = rows[rows["split"] == split]
    first = rows[rows["sampler"] == sampler].drop_duplicates("id")
    spaced = np.unique(np.linspace(0, len(first) - 1, min(shown, len(first))).round().astype(int))
    ranked = rows.sort_values("difference", kind="stable")
    falls = ranked[ranked["difference"] < 0].drop_duplicates("id")
    rises = ranked[ranked["difference"] > 0][::-1].drop_duplicates("id")
    unscored = rows[rows["difference"].isna()]
    unscored = unscored.loc[unscored["total_trained"].notna().sort_values(kind="stable").index].drop_duplicates("id")
    return {
        "samples": first.iloc[spaced],
        "gains": rises[:shown],
        "losses": falls[:shown],
        "unscored": unscored[:shown],
    }


def load(rows: pd.DataFrame, baseline: Path, trained: Path) -> list[pictures.Pair]:
    """The pairs with their images; those of several samplers say which."""
    several = rows["sampler"].nunique() > 1
    return [
        pictures.Pair(
            prompt=pictures.caption(row["prompt"], row["id"]) + (f"\n({row['sampler']})" if several else ""),
            baseline=read_image(baseline / row["file_baseline"]),
            trained=read_image(trained / row["file_trained"]),
            baseline_reward=row["total_baseline"],
            trained_reward=row["total_trained"],
            source=_source(baseline, row.get("source")),
        )
        for row in rows.to_dict("records")
    ]


def _source(folder: Path, paths: Sequence[str] | None) -> Image | None:
    """The source images side by side; ``paths`` are relative to ``folder``. None if there are none."""
    return None if paths is None else pictures.beside([read_image(folder / path) for path in paths])
