"""Scores a folder of pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline
from PIL.Image import Image

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import write_csv
from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.common.videos import read_sample
from visual_grpo.config import Parameters
from visual_grpo.config.presets import AUTO
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import ad_hoc_records
from visual_grpo.evaluation.pictures import beside, caption, grid, of_sample
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
    if parameters.data.task == "segmentation":
        raise UserError(
            "score judges pictures, and with data.task=segmentation the samples are answers in text. The pipelines"
            " evaluate and compare score these"
        )
    if parameters.reward == AUTO:
        raise UserError(
            f"score is given no reward: reward=auto chooses one for a training, by its records. {_choose(parameters)}"
        )
    scorer = build_reward_set(parameters.rewards, _weights(parameters))
    if comparing := [n for n, f in scorer.functions.items() if f.needs.target and f.judge_of is None]:
        raise UserError(
            "score judges pictures alone. The target images of records are what it judges, so"
            f" {', '.join(comparing)} has no target to compare them with. {_choose(parameters)}"
        )
    scorer.check_machine()
    scorer.check_samples(videos=parameters.data.frames is not None)
    with ad_hoc_records(parameters.score.path, parameters.data, "score.path") as records:
        without = [record.id for record in records if record.target_image is None]
        if without:
            raise UserError(
                f"score.path: {counted(len(without), 'record')} of {parameters.score.path} without a picture:"
                f" {', '.join(without[:3])}"
            )
        # The picture is what is judged, so it cannot be what it is compared with.
        judged = [replace(record, target_image=None) for record in records]
        try:
            scorer.check_records(judged)
        except UserError as error:
            raise UserError(f"{error}\n{_choose(parameters)}") from error
        table = _score(records, judged, scorer, parameters.data.fps)
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


def _choose(parameters: Parameters) -> str:
    frames = "" if parameters.data.frames is None else ",rewards.jpeg_size.frames=all"
    return (
        f"Choose rewards that fit, for example --params=reward=listed,rewards.jpeg_size.weight=1{frames}, and leave out"
        " others that the configuration names: rewards.NAME=null"
    )


def _score(records: RecordTable, judged: Sequence[PromptRecord], scorer: RewardSet, fps: float) -> pd.DataFrame:
    """Returns a row per picture or video: file, prompt, total, each reward and its parts."""
    frames = []
    with console.progress("Scoring samples", len(judged)) as bar:
        for batch in _batches(records, judged, scorer.needs_whole_groups):
            scores = scorer(list(batch.values()), [_sample(records, row, fps) for row in batch])
            chosen = [judged[row] for row in batch]
            columns = {
                "file": [record.target_file for record in chosen],
                "id": [record.id for record in chosen],
                "prompt": [record.prompt for record in chosen],
            }
            values = {"total": scores.total, **scores.rewards, **scores.parts}
            columns |= {name: tensor.tolist() for name, tensor in values.items()}
            frames.append(pd.DataFrame(columns, index=list(batch)))
            bar.advance(len(batch))
    table = pd.concat(frames).sort_index()
    unscored = [name for name in scorer.weights if table[name].isna().all()]
    if {*unscored} >= {name for name, weight in scorer.weights.items() if weight}:
        alone = [name for name in unscored if name in scorer.comparing]
        why = f". These compare pictures of one prompt, and need two or more: {', '.join(alone)}" if alone else ""
        raise UserError(f"score.path: no picture could be scored; unscored were: {', '.join(unscored)}{why}")
    return table


def _batches(
    records: RecordTable, judged: Sequence[PromptRecord], whole_groups: bool
) -> Iterator[dict[int, PromptRecord]]:
    """Yields rows with their records; ``whole_groups``: the pictures of a prompt and its sources share an id, the
    files of the sources and a batch."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, record in enumerate(records.rows()):
        groups[(record["prompt"], *(record["source_sha256"] or ())) if whole_groups else row].append(row)
    batch: dict[int, PromptRecord] = {}
    for rows in groups.values():
        first = judged[rows[0]]
        batch |= {row: replace(judged[row], id=first.id, source_images=first.source_images) for row in rows}
        if len(batch) >= _BATCH:
            yield batch
            batch = {}
    if batch:
        yield batch


def _sample(records: RecordTable, row: int, fps: float = 1.0) -> Sample:
    return read_sample(Path(str(records[row].target_image)), fps)


def _sheet(records: RecordTable, table: pd.DataFrame, scorer: RewardSet) -> Image:
    best = table.sort_values("total", ascending=False, na_position="last").head(_SHEET_MOST)
    shown = [(records[int(row)], _sample(records, int(row))) for row in best.index]
    pictures = [of_sample(record, sample, scorer) for record, sample in shown]
    captions = [
        f"{caption(row['prompt'], row['file'] or row['id'], TABLE)}\ntotal {row['total']:z.3f}"
        for row in best.to_dict("records")
    ]
    return grid(pictures, captions, min(_SHEET_COLUMNS, len(pictures)), [beside(*each) for each in shown])
