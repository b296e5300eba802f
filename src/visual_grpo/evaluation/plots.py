"""Plots of the training history. They need no display."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from visual_grpo.evaluation.comparison import EVAL_SAMPLER

EVAL_COLOUR, ROLLOUT_COLOUR = "#0969da", "#bc4c00"
UNSCORED = "reward/unscored_share"
METRICS = {
    "kl": (
        "KL to the base model",
        "How far the policy has moved. It rises while the policy learns; a sudden jump is a warning.",
    ),
    "entropy": ("Entropy", "How varied the samples are, in nats a token. A fall towards 0 means that they collapse."),
    "clip_fraction": (
        "Clip share",
        "Share of decisions whose ratio left the clip range. Far above 0.2 the steps are too large.",
    ),
    UNSCORED: ("Unscored share", "Share of training samples that could not be scored."),
}
"""Column of the history, alone or after a module's name -> title and how to read it."""
_EVENTS = ("clip_fraction", UNSCORED)
"""Shares of what need not happen: a curve that is always 0 is left out."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    title: str
    caption: str
    figure: Figure

    @property
    def data_uri(self) -> str:
        """Encodes the figure as SVG; the same bytes for the same figure."""
        file = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def training_curves(history: pd.DataFrame, base: float | None) -> list[Curves]:
    """Plots the reward and those `METRICS` that the history has; ``base`` is the base model's evaluation (step 0)."""
    caption = "Mean total. Training samples as in training, eval prompts by the plain pipeline; step 0 = base."
    curves = [Curves(title="Reward", caption=caption, figure=_reward(history, base))]
    for metric, (title, caption) in METRICS.items():
        found = columns_of(history, metric)
        columns = {
            name: column for name, column in found.items() if metric not in _EVENTS or history[column].gt(0).any()
        }
        if not columns:
            continue
        figure, axis = _chart()
        for name, column in columns.items():
            _plot_smoothed(axis, history, column, name)
        if metric not in history:  # The columns are of modules.
            axis.legend(frameon=False)
        curves.append(Curves(title=title, caption=caption, figure=figure))
    return curves


def columns_of(history: pd.DataFrame, metric: str) -> dict[str, str]:
    """Maps modules to the columns of their ``metric``; ``all`` where there is one only."""
    if metric in history:
        return {"all": metric}
    columns = {name: name.partition("/") for name in history.columns}
    return {module: name for name, (module, _, rest) in columns.items() if rest == metric}


def base_value(baseline: pd.DataFrame, prompts: int | None) -> float | None:
    """Returns the mean total that an evaluation before the first step would have had: of the first sample of
    each of ``prompts`` eval prompts at the eval sampler; None without such samples.

    ``baseline`` has the columns of ``scores.parquet``; ``prompts`` None = all of them.
    """
    rows = baseline[(baseline["sampler"] == EVAL_SAMPLER) & (baseline["split"] == "eval") & (baseline["index"] == 0)]
    order = rows["id"].map(lambda name: hashlib.sha256(name.encode()).digest()).sort_values().index[:prompts]
    value = rows.loc[order, "total"].mean()
    return None if math.isnan(value) else float(value)


def _reward(history: pd.DataFrame, base: float | None) -> Figure:
    """Plots the mean reward of each step and the evaluations in training, if any."""
    figure, axis = _chart()
    smoothed = _window(len(_points(history, "reward/total")[1])) > 1
    label = "training samples (smoothed)" if smoothed else "training samples"
    _plot_smoothed(axis, history, "reward/total", label, ROLLOUT_COLOUR)
    steps, judged = _points(history, "eval/total") if "eval/total" in history else ([], [])
    if base is not None and 0 not in list(steps):
        steps, judged = [0, *steps], [base, *judged]
    if len(steps):
        axis.plot(steps, judged, "o-", color=EVAL_COLOUR, label="eval prompts")
    axis.legend(frameon=False)
    return figure


def _plot_smoothed(axis: Axes, history: pd.DataFrame, column: str, label: str, colour: str | None = None) -> None:
    """Plots a running mean, and the values behind it as a thin line."""
    steps, values = _points(history, column)
    smooth = values.rolling(_window(len(values)), min_periods=1, center=True).mean()
    (line,) = axis.plot(steps, smooth, color=colour, label=label)
    axis.plot(steps, values, color=line.get_color(), alpha=0.3, linewidth=1)


def _window(values: int) -> int:
    """Returns over how many of its ``values`` a curve's running mean goes."""
    return max(1, values // 15)


def _chart() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.1), layout="constrained")
    axis = figure.subplots()
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _points(history: pd.DataFrame, column: str) -> tuple[Any, Any]:
    """Selects the steps with finite values."""
    rows = history[np.isfinite(history[column].astype(float))]
    return rows["step"], rows[column]
