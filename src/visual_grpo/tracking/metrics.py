"""Which metrics of a training step go to MLflow: those to compare runs by. ``training.csv`` has all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST = 60
"""Metrics of a run, with room for its result: more, and nobody finds the curve that matters."""

_MODULE = (
    r"reward/total(_std)?|reward/unscored_share|zero_variance_share|advantage/abs_mean|kl|entropy|approx_kl"
    r"|clip_fraction|ratio/first_max_abs_log|sampler_gap/(?:mean|max)|grad_norm|learning_rate|updates_left_out"
    r"|speed/samples_per_second"
)
_RUN = r"eval/.+|watch/.+|samples|seconds/step|memory_gb"


def tracked(row: Mapping[str, float], modules: tuple[str, ...], rewards: tuple[str, ...]) -> dict[str, float]:
    """The metrics of ``row`` that MLflow shows.

    Args:
        row: a row of ``training.csv``; with several modules each has metrics under ``NAME/``.
        modules: the trained ones.
        rewards: all of them; those of weight 0 are guards, to be watched beside the total.
    """
    own = "|".join([_MODULE, *(rf"reward/{re.escape(name)}" for name in rewards)])
    prefix = f"({'|'.join(map(re.escape, modules))})/" if len(modules) > 1 else ""
    wanted = re.compile(rf"{prefix}({own})|reward/total|{_RUN}")
    return {name: value for name, value in row.items() if wanted.fullmatch(name)}
