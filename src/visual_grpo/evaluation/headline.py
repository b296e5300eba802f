"""The verdict of an evaluation: a few numbers and one plain sentence.

The score is the mean total on held-out prompts at the stock sampler. Beside it stand what could not be scored, the
task's own measure, and the best that the base model reaches by a cheap change of its sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.evaluation.paired import CONFIDENCE

TASK_MEASURES = {
    "shapes/all": "all right",
    "ocr/accuracy": "read without a mistake",
    "negative_points/gIoU": "gIoU",
}
"""Scores that say in the task's own terms how many samples are right, and what they are called."""
NAMES = ("the base model", "the trained model")
FEW = 10
FEW_NOTE = f"Fewer than {FEW} independent prompts: too few to rely on the interval."
EVAL_NOTE = "Eval prompts also occur in training, and they choose the best adapter."
_NUMBERS = ("baseline", "trained", "difference", "ci_low", "ci_high")

Entry = Mapping[str, Any]
"""What `compare.compare` says of one score, split and sampler."""


def headline(
    entries: Sequence[Entry],
    controls: Sequence[Entry] = (),
    *,
    score: str = "total",
    names: tuple[str, str] = NAMES,
) -> dict[str, Any]:
    """The verdict on ``score``, for held-out prompts and the stock sampler if there are any.

    ``entries`` come from `compare.compare`, ``controls`` from `compare.compare_controls`. ``verdict`` is ``better`` or
    ``worse`` if the interval excludes 0, else ``not shown``. A gain is also not shown where significantly more samples
    of the trained model could not be scored: it is measured only on those that could. ``names`` are of the two sides,
    for the sentence. The control is that with the highest mean of the base model; chosen on the same samples, it is
    rather too good than too bad. ``task`` and ``control`` are None if there is none.
    """
    split, sampler = main_view(entries)
    rows = {entry["name"]: entry for entry in entries if (entry["split"], entry["sampler"]) == (split, sampler)}
    entry = rows[score]
    measure = next((name for name in TASK_MEASURES if name in rows), None)
    found = {
        "score": score,
        "names": list(names),
        "split": split,
        "sampler": sampler,
        **_numbers(entry),
        "confidence": CONFIDENCE,
        **{key: entry[key] for key in ("prompts", "units", "images")},
        "unscored": _unscored(entry),
        "control": _best_control(controls, score),
        "task": None if measure is None else {"name": TASK_MEASURES[measure], "score": measure} | _task(rows[measure]),
        "verdict": verdict(entry),
    }
    return found | {"sentence": _sentence(found, names)}


def verdict(entry: Entry) -> str:
    """``better``, ``worse`` or ``not shown``."""
    if entry["ci_low"] is None or entry["ci_low"] <= 0 <= entry["ci_high"]:
        return "not shown"
    if entry["ci_high"] < 0:
        return "worse"
    return "not shown" if _more_unscored(entry) else "better"


def main_view(entries: Sequence[Entry]) -> tuple[str, str]:
    """The most important split and sampler: held-out prompts and the stock sampler if available."""
    views = dict.fromkeys((entry["split"], entry["sampler"]) for entry in entries)
    return min(views, key=lambda view: (view[0] != "held_out", view[1] != "stock"))


def result(found: Mapping[str, Any]) -> dict[str, Any]:
    """Only the numbers of a headline, nested: what is compared between runs. What is undefined is left out."""
    unscored = {side: found["unscored"][side] for side in ("baseline", "trained")}
    blocks = {found["score"]: found, "task": found["task"], "control": found["control"]}
    numbers = {
        name: {key: block[key] for key in _NUMBERS if block.get(key) is not None}
        for name, block in blocks.items()
        if block
    }
    return numbers | {"unscored": unscored, "prompts": found["prompts"], "images": found["images"]}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The headline in words: its sentence, then the task's measure, the control and what was unscored, if any."""
    return [
        found["sentence"],
        *([task_line(found["task"], found["names"])] if found["task"] else []),
        *([control_line(found["control"])] if found["control"] else []),
        *([unscored_line(found["unscored"])] if _any_unscored(found["unscored"]) else []),
        *([FEW_NOTE] if found["units"] < FEW else []),
        *([EVAL_NOTE] if found["split"] == "eval" else []),
    ]


def task_line(task: Mapping[str, Any], names: Sequence[str] = NAMES) -> str:
    """The task's own measure of both sides."""
    if task["difference"] is None:
        return f"{task['name']}: no pair of samples could be judged."
    base, trained = names
    return f"{task['name']}: {task['baseline']:.3f} of {base}, {task['trained']:.3f} of {trained}, {change(task)}."


def control_line(control: Mapping[str, Any]) -> str:
    """How the trained model compares with the base model's best control."""
    settings = control["sampler"].removeprefix("stock ")
    if control["difference"] is None:
        return f"Control: the base model with {settings} has no sample that could be scored."
    return (
        f"Control: without training, {settings} gives the base model {control['baseline']:.3f}"
        f" (the best of {control['of']}); the trained model against that: {change(control)}."
    )


def unscored_line(unscored: Mapping[str, Any]) -> str:
    """How many samples of each side could not be scored, and whether that differs."""
    counts = f"Could not be scored: base {unscored['baseline']}, trained {unscored['trained']} of {unscored['of']} each"
    return f"{counts}; the shares differ." if unscored["differs"] else f"{counts}."


def change(block: Mapping[str, Any]) -> str:
    """``+0.385 [+0.330, +0.444]``; without the interval where there is none."""
    interval = "" if block["ci_low"] is None else f" [{block['ci_low']:+.3f}, {block['ci_high']:+.3f}]"
    return f"{block['difference']:+.3f}{interval}"


def extent(entry: Entry) -> str:
    """``34 held-out prompts``, with the number of independent groups if it is smaller."""
    prompts = f"{entry['prompts']} {entry['split'].replace('_', '-')} prompt{'s' * (entry['prompts'] != 1)}"
    return prompts if entry["units"] == entry["prompts"] else f"{prompts} in {entry['units']} groups"


def _numbers(entry: Entry) -> dict[str, float | None]:
    keys = ("baseline_mean", "trained_mean", "difference", "ci_low", "ci_high")
    return {name: entry[key] for name, key in zip(_NUMBERS, keys, strict=True)}


def _task(entry: Entry) -> dict[str, Any]:
    return _numbers(entry) | {"unscored": _unscored(entry), "verdict": verdict(entry)}


def _unscored(entry: Entry) -> dict[str, Any]:
    return {
        "baseline": entry["unscored_baseline"],
        "trained": entry["unscored_trained"],
        "of": entry["samples"],
        "differs": entry["unscored_differs"],
    }


def _best_control(controls: Sequence[Entry], score: str) -> dict[str, Any] | None:
    entries = [entry for entry in controls if entry["name"] == score]
    if not entries:
        return None
    best = max(entries, key=lambda e: float("-inf") if e["baseline_mean"] is None else e["baseline_mean"])
    return {"sampler": best["sampler"], "of": len(entries)} | _numbers(best)


def _sentence(found: Mapping[str, Any], names: tuple[str, str]) -> str:
    base, trained = names
    where = f"On {extent(found)} ({found['images']} pairs)"
    if found["difference"] is None:
        return f"No pair of samples could be scored, so nothing is shown about {trained}."
    interval = "no interval" if found["ci_low"] is None else f"{found['confidence']:.0%} interval"
    means = (
        f"mean {found['score']} {found['trained']:.3f} against {found['baseline']:.3f} of {base},"
        f" {change(found)} ({interval})"
    )
    if found["verdict"] != "not shown":
        return f"{where} {trained} is {found['verdict']}: {means}."
    if found["ci_low"] is not None and found["ci_low"] > 0:
        unscored = found["unscored"]
        return (
            f"{where} it is not shown that {trained} is better: {unscored['trained']} of its {unscored['of']} samples"
            f" could not be scored (base: {unscored['baseline']}); of the rest, {means}."
        )
    return f"{where} no difference is shown: {means}."


def _more_unscored(entry: Entry) -> bool:
    return entry["unscored_differs"] and entry["unscored_trained"] > entry["unscored_baseline"]


def _any_unscored(unscored: Mapping[str, Any]) -> bool:
    return bool(unscored["baseline"] or unscored["trained"])
