"""Writes the evaluation as a folder: one HTML page, its pictures, and its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, ImageOps

from visual_grpo.adapter_folder import AGAIN, HISTORY, STEP
from visual_grpo.common.errors import UserError
from visual_grpo.common.videos import SUFFIX
from visual_grpo.config import EvaluationConfig, flatten
from visual_grpo.evaluation import plots
from visual_grpo.evaluation.alarm import shown_alarms
from visual_grpo.evaluation.comparison import EVAL_SAMPLER, compare, compare_controls, join, retotalled
from visual_grpo.evaluation.page import given, render
from visual_grpo.evaluation.pictures import PAPER, caption, data_uri, encoded, grid, of_file, scaled, stacked, table
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.evaluation.verdict import NAMES, main_view, summarise

SHOWN = 6
"""Maximum number of pairs in a picture."""
FILM_STEPS, FILM_SIDE = 9, 1024
"""Maximum number of columns of the film, and their largest side in pixels."""


def evaluate(
    baseline: Path,
    trained: Path,
    settings: EvaluationConfig,
    training: Mapping[str, Any],
    *,
    names: tuple[str, str] = NAMES,
    notes: Sequence[str] = (),
    **about: Any,
) -> dict[str, Any]:
    """Returns the evaluation of two folders of samples, as `write_report` takes it: every score's paired differences
    (also from the controls that ``baseline`` has), the headline, and what it is ``about``."""
    before, after = read_scores(baseline), read_scores(trained)
    entries, controls = (
        measure(before, after, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed)
        for measure in (compare, compare_controls)
    )
    known = {"training": training, "rewards": entries, "controls": controls}
    is_video = after["file"].str.endswith(SUFFIX).any()
    samples = "answers" if "answer" in after else "videos" if is_video else "images"
    return {"headline": summarise(entries, controls, names=names, notes=notes, samples=samples), **about, **known}


def write_report(
    folder: Path,
    evaluation: Mapping[str, Any],
    baseline: Path,
    trained: Path,
    history: pd.DataFrame,
    adapters: Path | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes ``evaluation.html`` (self-contained), ``evaluation.json``, and PNGs of the reward's curve and of samples.

    ``evaluation`` is of `evaluate`; ``parameters`` in it replace the training's. ``history`` has one row per
    training step; ``adapters`` is the folder that the training left, with the pictures of its alarms; ``defaults`` are
    the parameters of conf/base by their dotted names.
    """
    curves = plots.training_curves(history, _base_value(evaluation, baseline, trained))
    curves[0].figure.savefig(folder / "training.png", dpi=150)
    pairs = all_pairs(baseline, trained)
    chosen = choose(pairs, *main_view(evaluation["rewards"]))
    if len(pairs):
        pair_sheet(chosen["samples"], baseline, trained).save(folder / "samples.png")
    text = json.dumps(evaluation, indent=2, ensure_ascii=False)
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    facts = evaluation.get("training", {})
    alarms = shown_alarms(facts, adapters)
    shown = _filmed(pairs, facts.get("film", ()))
    judged = facts.get(STEP.get(facts.get("adapter", "")))
    filmed = {"columns": film(adapters, shown, baseline, trained, judged), "prompts": list(shown["prompt"])}
    page = render(evaluation, baseline, trained, pairs, chosen, curves, alarms, filmed, defaults)
    (folder / "evaluation.html").write_text(page, encoding="utf-8")


def read_history(folder: Path) -> pd.DataFrame:
    """Returns ``training.csv``, a row of metrics per step. Raises UserError if the folder has none."""
    try:
        return pd.read_csv(folder / HISTORY)
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {HISTORY}, the curves of its training. {AGAIN}") from error


def film(
    adapters: Path | None, shown: pd.DataFrame, baseline: Path, trained: Path, judged: int | None = None
) -> list[tuple[str, str]]:
    """Returns columns of pictures, each with its caption and as a data URI: of the pairs ``shown`` what is given and
    the base model's sample, then the samples after training steps, the ``judged`` one marked."""
    files = [] if adapters is None else sorted(adapters.glob("film-*.png"))
    spaced = np.unique(np.linspace(0, len(files) - 1, min(FILM_STEPS, len(files))).round().astype(int))
    steps = {int(files[i].stem.removeprefix("film-")): data_uri(files[i], FILM_SIDE) for i in spaced}
    rows = [
        {name: baseline / file for name, file in (given(row) | {"base": row["file_baseline"]}).items()}
        | {"chosen": trained / row["file_trained"]}
        for row in (shown.to_dict("records") if steps else ())
    ]
    sizes = [scaled(of_file(row["base"])).size for row in rows]
    columns = {
        name: [[ImageOps.pad(of_file(row[name]), size, color=PAPER)] for row, size in zip(rows, sizes, strict=True)]
        for name in (rows[0] if rows else ())
        if all(name in row for row in rows)
    }
    pictures = {name: encoded([table(cells)], FILM_SIDE) for name, cells in columns.items()}
    if (chosen := pictures.pop("chosen", None)) is not None and judged is not None:
        steps[judged] = chosen  # A step between those that left samples, or the same samples again.
    marked = {f"step {step}{' (chosen)' * (step == judged)}": steps[step] for step in sorted(steps)}
    return [*(pictures | marked).items()]


def _filmed(pairs: pd.DataFrame, ids: Sequence[str]) -> pd.DataFrame:
    """Selects the pairs that a training showed after its steps, by their records; none unless all are there."""
    is_first = (pairs["split"] == "held_out") & (pairs["sampler"] == EVAL_SAMPLER) & (pairs["index"] == 0)
    first = pairs[is_first].set_index("id")
    return first.loc[list(ids)] if first.index.isin(ids).sum() == len(ids) else first[:0]


def all_pairs(baseline: Path, trained: Path) -> pd.DataFrame:
    """Returns the rows of `compare.join` with the ``difference`` of totals; NaN where a side is unscored."""
    rows = join(read_scores(baseline), read_scores(trained))
    rows = rows.assign(difference=rows["total_trained"] - rows["total_baseline"])
    return rows.sort_values(["split", "sampler", "id", "index"], ignore_index=True)


def choose(rows: pd.DataFrame, split: str, sampler: str, shown: int = SHOWN) -> dict[str, pd.DataFrame]:
    """Chooses the pairs of one split to show, at most one per prompt.

    ``samples``: of ``sampler``, evenly spaced over the prompts, independent of the result. Of all samplers, so that
    none hides in a different group: ``gains`` and ``losses``, the largest increases and decreases of the total, and
    ``unscored``, where a side could not be scored, the trained side first.
    """
    rows = rows[rows["split"] == split]
    first = rows[rows["sampler"] == sampler].drop_duplicates("id")
    spaced = np.unique(np.linspace(0, len(first) - 1, min(shown, len(first))).round().astype(int))
    ranked = rows.sort_values("difference", kind="stable")
    unscored = rows[rows["difference"].isna()]
    unscored = unscored.loc[unscored["total_trained"].notna().sort_values(kind="stable").index]
    return {
        "samples": first.iloc[spaced],
        "gains": ranked[ranked["difference"] > 0][::-1].drop_duplicates("id")[:shown],
        "losses": ranked[ranked["difference"] < 0].drop_duplicates("id")[:shown],
        "unscored": unscored.drop_duplicates("id")[:shown],
    }


def pair_sheet(pairs: pd.DataFrame, baseline: Path, trained: Path) -> Image.Image:
    """Arranges each pair as a column: the base model's sample with prompt and reward, the trained model's below it, and
    above both what was edited."""
    rows = pairs.to_dict("records")
    before = [f"{caption(row['prompt'], row['id'])}\nbaseline, {_worth(row['total_baseline'])}" for row in rows]
    after = [f"trained, {_worth(row['total_trained'])}" for row in rows]
    files = [*(baseline / row["file_baseline"] for row in rows), *(trained / row["file_trained"] for row in rows)]
    pictures, captions = list(map(of_file, files)), [*before, *after]
    sources = [[] if row.get("source") is None else list(row["source"]) for row in rows]
    if any(sources):
        blank = Image.new("RGB", (1, 1), PAPER)
        edited = [stacked([of_file(baseline / path) for path in paths]) if paths else blank for paths in sources]
        pictures, captions = [*edited, *pictures], ["source" if paths else "" for paths in sources] + captions
    return grid(pictures, captions, columns=len(rows))


def _base_value(evaluation: Mapping[str, Any], baseline: Path, trained: Path) -> float | None:
    parameters = flatten(evaluation.get("parameters") or evaluation.get("training", {}).get("parameters") or {})
    scores = retotalled(read_scores(baseline), read_scores(trained).attrs["weights"])
    return plots.base_value(scores, parameters.get("evaluation.prompts"))


def _worth(reward: float) -> str:
    return "could not be scored" if math.isnan(reward) else f"reward {reward:z.2f}"
