"""Which metrics go to MLflow: those to compare runs by. ``training.csv`` and ``evaluation.json`` have all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST = 60
"""Metrics of a run, with room for its result: more, and nobody finds the curve that matters."""
GAIN = "result/gain"
"""What `make ui` sorts the runs by."""
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


def result_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The headline of an evaluation (``evaluation.headline.headline``) as metrics; what is undefined is left out.

    ``result/gain``: trained minus base on the held-out total at the stock sampler, ``low`` and ``high`` its interval;
    ``unscored`` and ``unscored_base``: numbers of samples that no judge could score; ``gain_over_control``: against the
    base model at its best cheap setting; and the task's own measure under its name.
    """
    task, control = found["task"], found["control"]
    metrics = {
        "gain": found["difference"],
        "low": found["ci_low"],
        "high": found["ci_high"],
        "base": found["baseline"],
        "trained": found["trained"],
        "unscored": found["unscored"]["trained"],
        "unscored_base": found["unscored"]["baseline"],
    }
    if control:
        metrics |= {"gain_over_control": control["difference"], "low_over_control": control["ci_low"]}
    if task:
        metrics |= {task["name"]: task["trained"], f"{task['name']} base": task["baseline"]}
    return {f"result/{name}": float(value) for name, value in metrics.items() if value is not None}
