"""Writes the evaluation as a folder: one HTML page, its pictures, and its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo.evaluation import pictures, plots
from visual_grpo.evaluation.alarm import shown_alarms
from visual_grpo.evaluation.examples import SHOWN, all_pairs, choose, load
from visual_grpo.evaluation.headline import main_view
from visual_grpo.evaluation.page import render


def write_report(
    folder: Path,
    evaluation: Mapping[str, Any],
    baseline: Path,
    trained: Path,
    history: pd.DataFrame,
    adapters: Path | None = None,
) -> None:
    """Writes ``evaluation.html`` (self-contained), pictures as PNG, and ``evaluation.json``.

    ``evaluation`` has ``rewards`` (of `compare.compare`) and optionally ``headline``, ``controls``, ``training``,
    ``parameters``, ``conditions``, ``adapter`` and ``seed``. ``baseline`` and ``trained`` are folders written by
    ``generate.draw_and_score``; ``history`` has one row per training step; ``adapters`` is the folder that the training
    left, with the pictures of its alarms.
    """
    plots.differences(evaluation["rewards"]).savefig(folder / "differences.png", dpi=150)
    plots.reward_curve(history).savefig(folder / "training.png", dpi=150)
    split, sampler = main_view(evaluation["rewards"])
    pairs = all_pairs(baseline, trained)
    for name, chosen in choose(pairs, split, sampler).items():
        if len(chosen):
            pictures.pairs(load(chosen, baseline, trained), columns=SHOWN).save(folder / f"{name}.png")
    text = json.dumps(evaluation, indent=2, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    alarms = shown_alarms(evaluation.get("training", {}), adapters)
    page = render(evaluation, baseline, trained, pairs, history, alarms)
    (folder / "evaluation.html").write_text(page, encoding="utf-8")
