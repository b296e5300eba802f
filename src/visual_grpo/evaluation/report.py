"""Writes the evaluation as one HTML page: numbers, intervals, and sample pictures with the best and worst changes."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL.Image import Image

from visual_grpo.evaluation import pictures, plots
from visual_grpo.evaluation.compare import join
from visual_grpo.evaluation.generate import read_scores
from visual_grpo.images import read_image

SHOWN = 6
"""Maximum number of pairs in a picture."""
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem;color:#1f2328}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:.85rem}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #d1d9e0}"
    "td:nth-child(-n+4),th:nth-child(-n+4){text-align:left}"
)


def write_report(
    folder: Path, evaluation: Mapping[str, Any], baseline: Path, trained: Path, history: pd.DataFrame
) -> None:
    """Writes ``evaluation.html`` (self-contained), its pictures as PNG, and ``evaluation.json``.

    ``baseline`` and ``trained`` are folders written by ``generate.draw_and_score``; ``history`` has one row per
    training step.
    """
    plots.differences(evaluation["rewards"]).savefig(folder / "differences.png", dpi=150)
    plots.reward_curve(history).savefig(folder / "training.png", dpi=150)
    split, sampler = main_view(evaluation["rewards"])
    rows = scored_pairs(baseline, trained, split, sampler)
    for name, chosen in choose(rows).items():
        if len(chosen):
            pictures.pairs(_load(chosen, baseline, trained), columns=SHOWN).save(folder / f"{name}.png")
    text = json.dumps(evaluation, indent=2, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    (folder / "evaluation.html").write_text(_page(evaluation, folder, split, sampler), encoding="utf-8")


def main_view(entries: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The most important split and sampler: held-out prompts and the stock sampler if available."""
    views = dict.fromkeys((entry["split"], entry["sampler"]) for entry in entries)
    return min(views, key=lambda view: (view[0] != "held_out", view[1] != "stock"))


def scored_pairs(baseline: Path, trained: Path, split: str, sampler: str) -> pd.DataFrame:
    """Pairs of one split and sampler in which both samples have a total, with their ``difference``."""
    rows = join(read_scores(baseline), read_scores(trained))
    rows = rows[(rows["split"] == split) & (rows["sampler"] == sampler)]
    rows = rows.assign(difference=rows["total_trained"] - rows["total_baseline"])
    return rows.dropna(subset=["difference"]).sort_values(["id", "index"], ignore_index=True)


def choose(rows: pd.DataFrame, shown: int = SHOWN) -> dict[str, pd.DataFrame]:
    """Pairs to show, at most one per prompt.

    ``samples``: evenly spaced over the prompts, independent of the result; ``gains`` and ``losses``: the largest
    increases and decreases of the total.
    """
    first = rows.drop_duplicates("id")
    spaced = np.unique(np.linspace(0, len(first) - 1, min(shown, len(first))).round().astype(int))
    ranked = rows.sort_values("difference", kind="stable")
    falls = ranked[ranked["difference"] < 0].drop_duplicates("id")
    rises = ranked[ranked["difference"] > 0][::-1].drop_duplicates("id")
    return {"samples": first.iloc[spaced], "gains": rises[:shown], "losses": falls[:shown]}


def sentence(entry: Mapping[str, Any]) -> str:
    """Describes one evaluation entry in a sentence."""
    if entry["difference"] is None:
        return f"{entry['name']}: no pair of samples could be scored."
    interval = "" if entry["ci_low"] is None else f" [{entry['ci_low']:+.3f}, {entry['ci_high']:+.3f}]"
    return (
        f"{entry['name']}, {entry['split'].replace('_', '-')} prompts, {entry['sampler']} sampler:"
        f" {entry['baseline_mean']:.3f} before, {entry['trained_mean']:.3f} after training,"
        f" difference {entry['difference']:+.3f}{interval}; the trained sample wins {entry['win_rate']:.0%} of"
        f" {entry['images']} pairs ({extent(entry)})."
    )


def extent(entry: Mapping[str, Any]) -> str:
    """The number of prompts of an entry, and the number of independent groups if it is smaller."""
    prompts = f"{entry['prompts']} prompts"
    return prompts if entry["units"] == entry["prompts"] else f"{prompts} in {entry['units']} groups"


def _load(rows: pd.DataFrame, baseline: Path, trained: Path) -> list[pictures.Pair]:
    return [
        pictures.Pair(
            prompt=row["prompt"],
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


def _page(evaluation: Mapping[str, Any], folder: Path, split: str, sampler: str) -> str:
    entries = evaluation["rewards"]
    facts = {key: value for key, value in evaluation.items() if key != "rewards"}
    view = f"{split.replace('_', '-')} prompts, {sampler} sampler"
    body = [
        "<h1>Baseline against trained</h1>",
        *(f"<p>{html.escape(sentence(entry))}</p>" for entry in entries if entry["name"] == "total"),
        _figure(folder, "samples", f"Not chosen by result: evenly spaced over the prompts ({view})"),
        _figure(folder, "differences", "What changed, reward by reward"),
        _figure(folder, "gains", f"Greatest gains ({view})"),
        _figure(folder, "losses", f"Greatest losses ({view})"),
        _figure(folder, "training", "Mean reward while training"),
        "<h2>All numbers</h2>",
        "<p>Pairs share prompt and seed. Intervals: 95%, percentile bootstrap over prompts. "
        "Win rate: share of pairs in which the trained sample scores higher; ties count half.</p>",
        pd.DataFrame(entries).to_html(index=False, border=0, float_format="{:.4f}".format, na_rep=""),
        "<h2>Conditions</h2>",
        f"<pre>{html.escape(json.dumps(facts, indent=2, ensure_ascii=False))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>Baseline against trained</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _figure(folder: Path, name: str, title: str) -> str:
    """A heading and ``name``.png embedded in the page, so that the page works without other files."""
    path = folder / f"{name}.png"
    if not path.is_file():
        return f"<h2>{html.escape(title)}</h2><p>None.</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    alt = html.escape(title, quote=True)
    return f'<h2>{html.escape(title)}</h2><img alt="{alt}" src="data:image/png;base64,{data}">'
