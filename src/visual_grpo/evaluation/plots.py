"""Plots of the evaluation and of training. They need no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"stock": "#0969da", "rollout": "#bc4c00", "sde": "#1a7f37"}
OFFSET = 0.14
"""Half the distance between the samplers' marks on one row."""


def differences(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Forest plot: trained minus baseline with 95% intervals, one panel per split and reward.

    ``entries`` come from `compare.compare`. Each reward has its own panel because units differ.
    """
    splits = list(dict.fromkeys(entry["split"] for entry in entries))
    families = _families(entries)
    rows = [len(names) for names in families]
    figure = Figure(figsize=(4.6 * len(splits) + 1.2, 0.42 * sum(rows) + 0.5 * len(rows) + 0.9), layout="constrained")
    axes = figure.subplots(
        len(families),
        len(splits),
        squeeze=False,
        sharex="row",
        sharey="row",
        height_ratios=[n + 0.8 for n in rows],
    )
    for panels, names in zip(axes, families, strict=True):
        for axis, split in zip(panels, splits, strict=True):
            _forest(axis, [e for e in entries if e["split"] == split and e["name"] in names], names)
    for axis, split in zip(axes[0], splits, strict=True):
        axis.set_title(split.replace("_", "-") + " prompts")
    handles, labels = axes[0][0].get_legend_handles_labels()
    title = "trained minus baseline, 95% interval over prompts"
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def reward_curve(history: pd.DataFrame) -> Figure:
    """Mean reward of each training step (``reward/total``) and of the intermediate evaluations (``eval/total``)."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    reward = history["reward/total"]
    axis.plot(history["step"], reward, color=COLOURS["rollout"], alpha=0.3, linewidth=1)
    smooth = reward.rolling(max(1, len(reward) // 15), min_periods=1, center=True).mean()
    axis.plot(
        history["step"],
        smooth,
        color=COLOURS["rollout"],
        label="training prompts, rollout sampler (smoothed)",
    )
    if "eval/total" in history:
        judged = history.dropna(subset=["eval/total"])
        axis.plot(
            judged["step"],
            judged["eval/total"],
            "o-",
            color=COLOURS["stock"],
            label="eval prompts, stock sampler",
        )
    axis.set(xlabel="step", ylabel="mean reward")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def _families(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Groups score names by reward, in the order of the entries."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(entry["name"] for entry in entries):
        families.setdefault(name.split("/")[0], []).append(name)
    return list(families.values())


def _forest(axis: Axes, entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    samplers = list(dict.fromkeys(entry["sampler"] for entry in entries))
    for number, sampler in enumerate(samplers):
        shift = OFFSET * (2 * number - len(samplers) + 1)
        measured = [e for e in entries if e["sampler"] == sampler and e["ci_low"] is not None]
        axis.errorbar(
            [e["difference"] for e in measured],
            [names.index(e["name"]) + shift for e in measured],
            xerr=[
                [e["difference"] - e["ci_low"] for e in measured],
                [e["ci_high"] - e["difference"] for e in measured],
            ],
            fmt="o",
            markersize=5,
            capsize=3,
            color=COLOURS.get(sampler),
            label=f"{sampler} sampler",
        )
    axis.axvline(0, color="#8c959f", linewidth=1, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
