"""The training history as small charts: points in the units of an SVG, which follows the page's colours."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.ticker import MaxNLocator

from visual_grpo.evaluation.compare import STOCK

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 26
"""Margins around the plotted area."""
METRICS = {
    "kl": ("KL to the base model", "How far the policy has moved. A steady rise is normal, a jump is not."),
    "entropy": ("Entropy", "How varied the samples are, in nats a token. A fall towards 0 means that they collapse."),
    "clip_fraction": (
        "Clip share",
        "Share of decisions whose ratio left the clip range. Far above 0.2 the steps are too large.",
    ),
    "reward/unscored_share": ("Unscored share", "Share of training samples that could not be scored."),
}
"""Column of the history, alone or after a module's name -> title and how to read it."""


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: list[tuple[float, float]]
    """(x, y) in the chart's units."""
    dots: bool = False
    """Marked points, such as evaluations, instead of a line through every step."""
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    series: list[Series]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def charts(history: pd.DataFrame, base: float | None) -> list[Chart]:
    """The reward and whichever of `METRICS` the history has; ``base`` is the base model's evaluation (step 0)."""
    found = [_reward(history, base)]
    for metric, (title, caption) in METRICS.items():
        columns = _columns(history, metric)
        if metric == "reward/unscored_share" and not history[columns].gt(0).to_numpy().any():
            continue
        lines = {(_module(name, metric) or "all"): _values(history, name) for name in columns}
        if lines:
            found.append(_chart(title, caption, lines))
    return found


def base_value(baseline: pd.DataFrame, prompts: int | None) -> float | None:
    """What the evaluation in training would have measured before the first step: the mean total of the first sample of
    each of ``prompts`` eval prompts at the stock sampler; None without such samples.

    ``baseline`` has the columns of ``scores.parquet``; ``prompts`` None = all of them.
    """
    rows = baseline[(baseline["sampler"] == STOCK) & (baseline["split"] == "eval") & (baseline["index"] == 0)]
    order = rows["id"].map(lambda name: hashlib.sha256(name.encode()).digest()).sort_values().index[:prompts]
    value = rows.loc[order, "total"].mean()
    return None if math.isnan(value) else float(value)


def _reward(history: pd.DataFrame, base: float | None) -> Chart:
    reward = _values(history, "reward/total")
    lines = {"": reward, "training samples (smoothed)": _smooth(reward)}
    judged = _values(history, "eval/total") if "eval/total" in history else []
    if base is not None and not any(step == 0 for step, _ in judged):
        judged = [(0.0, base), *judged]
    caption = "Mean total. Training samples are drawn as in training; eval prompts at the stock sampler, step 0 = base."
    return _chart("Reward", caption, lines, {"eval prompts": judged} if judged else {}, faint=("",))


def _chart(
    title: str,
    caption: str,
    lines: dict[str, list[tuple[float, float]]],
    dots: dict[str, list[tuple[float, float]]] | None = None,
    faint: Sequence[str] = (),
) -> Chart:
    dots = dots or {}
    every = [point for points in (*lines.values(), *dots.values()) for point in points]
    x, x_ticks = _axis([step for step, _ in every] or [0.0], LEFT, WIDTH - RIGHT, whole=True)
    y, y_ticks = _axis([value for _, value in every] or [0.0], HEIGHT - BOTTOM, TOP)
    return Chart(
        title=title,
        caption=caption,
        series=[
            Series(
                name=name,
                points=[(round(x(step), 1), round(y(value), 1)) for step, value in points],
                dots=name in dots,
                faint=name in faint,
            )
            for name, points in (lines | dots).items()
        ],
        x_ticks=x_ticks,
        y_ticks=y_ticks,
    )


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.per_unit, self.start = low, (end - start) / (high - low), start

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.per_unit


def _axis(
    values: Sequence[float], start: float, end: float, *, whole: bool = False
) -> tuple[_Scale, list[tuple[float, str]]]:
    """The scale of an axis from ``start`` to ``end`` that holds the values, and its (position, label) ticks."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = [float(tick) for tick in MaxNLocator(nbins=4, integer=whole).tick_values(low, high)]
    scale = _Scale(min(low, ticks[0]) if not whole else low, max(high, ticks[-1]) if not whole else high, start, end)
    shown = [tick for tick in ticks if not whole or low <= tick <= high]
    return scale, [(round(scale(tick), 1), f"{tick:.4g}") for tick in shown]


def _columns(history: pd.DataFrame, metric: str) -> list[str]:
    """That of the whole run, else those of the modules."""
    return [metric] if metric in history else [name for name in history.columns if _module(name, metric)]


def _module(column: str, metric: str) -> str:
    """The module whose ``metric`` a column is; "" for any other column."""
    module, _, rest = column.partition("/")
    return module if rest == metric else ""


def _values(history: pd.DataFrame, column: str) -> list[tuple[float, float]]:
    rows = history[["step", column]].dropna()
    return [(float(step), float(value)) for step, value in rows.itertuples(index=False) if math.isfinite(value)]


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    values = pd.Series([value for _, value in points], dtype=float)
    smooth = values.rolling(max(1, len(values) // 15), min_periods=1, center=True).mean()
    return [(step, float(value)) for (step, _), value in zip(points, smooth, strict=True)]
