"""Scores a folder of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline
from PIL.Image import Image

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import write_csv
from visual_grpo.common.types import Sample
from visual_grpo.common.videos import read_sample
from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import ad_hoc_records
from visual_grpo.evaluation.pictures import caption, grid, of_sample
from visual_grpo.models.family import find_family
from visual_grpo.models.run_spec import trained_modules
from visual_grpo.rewards.build import build_reward_set
from visual_grpo.rewards.combine import RewardSet


def create_pipeline() -> Pipeline:
    return Pipeline([Node(score_folder, ["parameters", "draft"], "scores", name="score_folder")], tags=["apart"])


TABLE = "scores.csv"
_SHEET_COLUMNS, _SHEET_MOST = 5, 100
_BATCH = 32


def score_folder(parameters: Parameters, draft: Path) -> Path:
    """Writes a table of every picture's scores and a sheet of the pictures, best first."""
    if parameters.score.path is None:
        raise UserError(
            "score needs a folder of pictures with prompts (a .txt file next to each, or a metadata.jsonl with"
            " file_name and text):\n  --params=score.path=FOLDER"
        )
    scorer = build_reward_set(parameters.rewards, _weights(parameters))
    scorer.check_machine()
    scorer.check_samples(videos=parameters.data.frames is not None)
    with ad_hoc_records(parameters.score.path, parameters.data, "score.path") as records:
        without = [record.id for record in records if record.target_image is None]
        if without:
            raise UserError(
                f"score.path: {counted(len(without), 'record')} of {parameters.score.path} without a picture:"
                f" {', '.join(without[:3])}"
            )
        table = _score(records, scorer, parameters.data.fps)
        write_csv(draft / TABLE, table)
        _sheet(records, table, scorer).save(draft / "sheet.png")
    console.table(
        f"{counted(len(table), 'picture')} of {parameters.score.path}",
        ["reward", "weight", "mean", "deviation", "lowest", "highest", "share of the total's variance", "unscored"],
        summary(table, scorer.weights),
    )
    return draft


def _weights(parameters: Parameters) -> dict[str, float]:
    """As in the training's evaluation. The model's family is looked up only where that says which modules there are."""
    asked = [parameters.policy.train] if isinstance(parameters.policy.train, str) else parameters.policy.train
    if not any(section.rewards for section in parameters.modules.values()):
        return parameters.weights([""])
    if asked and asked != ["all"]:
        return parameters.weights(asked)
    family = find_family(parameters.model.family, parameters.model.path, parameters.model.revision)
    return parameters.weights(trained_modules(family, parameters.policy))


def summary(table: pd.DataFrame, weights: Mapping[str, float]) -> list[list[Any]]:
    """Returns a row of cells for each reward, and one for the total.

    A reward's share of the total's variance is its weighted covariance with the total: a
    reward with a small one is drowned by the other rewards, whatever its weight.
    """
    covariances = table[[*weights, "total"]].cov()["total"].fillna(0.0)
    rows: list[list[Any]] = []
    for name, weight in [*weights.items(), ("total", None)]:
        variance = covariances["total"]
        share = f"{weight * covariances[name] / variance:z.0%}" if weight is not None and variance else None
        scores = table[name]
        cells = [f"{value:z.3g}" for value in (scores.mean(), scores.std(ddof=0), scores.min(), scores.max())]
        rows.append([name, weight, *cells, share, int(scores.isna().sum()) or None])
    return rows


def _score(records: RecordTable, scorer: RewardSet, fps: float) -> pd.DataFrame:
    """Returns a row per picture or video: file, prompt, total, each reward and its parts."""
    # The picture is what is judged, so it cannot be what it is compared with.
    judged = [replace(record, target_image=None) for record in records]
    try:
        scorer.check_records(judged)
    except UserError as error:
        raise UserError(
            f"{error}\nThe pictures are scored by the rewards of this configuration. Choose rewards that fit them, for"
            " example: --params=score.path=FOLDER,reward=null,rewards.jpeg_size.weight=1",
            error.remedy,
        ) from error
    frames = []
    with console.progress("Scoring samples", len(judged)) as bar:
        for start in range(0, len(judged), _BATCH):
            chosen = judged[start : start + _BATCH]
            scores = scorer(chosen, [_sample(records, start + i, fps) for i in range(len(chosen))])
            columns = {
                "file": [record.target_file for record in chosen],
                "id": [record.id for record in chosen],
                "prompt": [record.prompt for record in chosen],
            }
            values = {"total": scores.total, **scores.rewards, **scores.parts}
            frames.append(pd.DataFrame(columns | {name: tensor.tolist() for name, tensor in values.items()}))
            bar.advance(len(chosen))
    return pd.concat(frames, ignore_index=True)


def _sample(records: RecordTable, row: int, fps: float = 1.0) -> Sample:
    return read_sample(Path(str(records[row].target_image)), fps)


def _sheet(records: RecordTable, table: pd.DataFrame, scorer: RewardSet) -> Image:
    best = table.sort_values("total", ascending=False, na_position="last").head(_SHEET_MOST)
    pictures = [of_sample(records[int(row)], _sample(records, int(row)), scorer) for row in best.index]
    captions = [
        f"{caption(row['prompt'], row['file'] or row['id'], TABLE)}\ntotal {row['total']:z.3f}"
        for row in best.to_dict("records")
    ]
    return grid(pictures, captions, columns=min(_SHEET_COLUMNS, len(pictures)))
