"""An evaluation in MLflow: a handful of metrics to sort runs by, and the whole table as one artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAIN = "result/gain"
"""What `make ui` sorts the runs by."""
TABLE = "evaluation/scores.json"


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
