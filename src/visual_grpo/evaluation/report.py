"""Writes the evaluation as one HTML page: numbers, intervals, and sample pictures with the best and worst changes."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo.evaluation import pictures, plots
from visual_grpo.evaluation.examples import SHOWN, all_pairs, choose, load
from visual_grpo.evaluation.headline import EVAL_NOTE, headline, lines, main_view

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
    rows = all_pairs(baseline, trained)
    for name, chosen in choose(rows, split, sampler).items():
        if len(chosen):
            pictures.pairs(load(chosen, baseline, trained), columns=SHOWN).save(folder / f"{name}.png")
    text = json.dumps(evaluation, indent=2, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    (folder / "evaluation.html").write_text(_page(evaluation, folder, split, sampler), encoding="utf-8")


def _page(evaluation: Mapping[str, Any], folder: Path, split: str, sampler: str) -> str:
    entries = evaluation["rewards"]
    found = evaluation.get("headline") or headline(entries, evaluation.get("controls", ()))
    facts = {key: value for key, value in evaluation.items() if key != "rewards"}
    view = f"{split.replace('_', '-')} prompts, {sampler} sampler"
    body = [
        "<h1>Baseline against trained</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in lines(found)),
        _figure(folder, "samples", f"Not chosen by result: evenly spaced over the prompts ({view})"),
        _figure(folder, "differences", "What changed, reward by reward"),
        _figure(folder, "gains", f"Greatest gains ({split.replace('_', '-')} prompts, all samplers)"),
        _figure(folder, "losses", f"Greatest losses ({split.replace('_', '-')} prompts, all samplers)"),
        _figure(folder, "unscored", "Could not be scored"),
        _figure(folder, "training", "Mean reward while training"),
        "<h2>All numbers</h2>",
        "<p>Pairs share prompt and seed. Intervals: 95%, Student's t on prompt means (ratios: percentile bootstrap over"
        f" prompts). Win rate: share of pairs in which the trained sample scores higher; ties count half."
        f" {EVAL_NOTE}</p>",
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
