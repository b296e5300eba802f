"""Reports of a painter in the place of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from tests.evaluation.defaults import FILE
from tests.evaluation.painter import EVAL_SAMPLER, ROLLOUT, Painter, brightness, records
from tests.replacing import replaced
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import EvaluationConfig
from visual_grpo.evaluation import report
from visual_grpo.evaluation.comparison import compare, compare_controls
from visual_grpo.evaluation.samples import generate_and_score, plan_images
from visual_grpo.evaluation.verdict import summarise
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.starter.world_defaults import default_parameters

HISTORY = pd.DataFrame({"step": [1, 2], "reward/total": [0.4, 0.5]})
SPLITS = {"held_out": records("held_out", 4), "eval": records("eval", 2)}


def drawn(folder: Path, gain: float, splits: Mapping[str, Sequence[PromptRecord]] = SPLITS) -> pd.DataFrame:
    """Two samples of each prompt with two samplers, and of the base painter with a control."""
    scorer = RewardSet({"brightness": (brightness, 1.0)})
    samplers = {"rollout": ROLLOUT, "eval": EVAL_SAMPLER}
    controls = {} if gain else {"eval steps=20": EVAL_SAMPLER.model_copy(update={"steps": 20})}
    plan = plan_images(splits, EvaluationConfig(every=0, prompts=1, images_per_prompt=2), samplers, controls)
    return generate_and_score(Painter(gain), scorer, plan, folder, batch_size=8)


def reported(tmp_path: Path, gain: float, splits: Mapping[str, Sequence[PromptRecord]] = SPLITS, **facts: Any) -> Path:
    """The folder of a report; ``facts`` are further entries of the evaluation, and ``adapters`` the training's."""
    before, after = drawn(tmp_path / "baseline", 0.0, splits), drawn(tmp_path / "trained", gain, splits)
    return written(tmp_path, before, after, **facts)


def written(
    tmp_path: Path, before: pd.DataFrame, after: pd.DataFrame, adapters: Path | None = None, **facts: Any
) -> Path:
    """The folder of a report on ``baseline`` and ``trained`` in ``tmp_path``, whose scores are given."""
    entries = compare(before, after, bootstrap_samples=100, seed=0)
    controls = compare_controls(before, after, bootstrap_samples=100, seed=0)
    evaluation = {"headline": summarise(entries, controls), "rewards": entries, "controls": controls} | facts
    (tmp_path / "report").mkdir(parents=True)
    folder, drawn = tmp_path / "report", (tmp_path / "baseline", tmp_path / "trained")
    report.write_report(folder, evaluation, *drawn, HISTORY, adapters, default_parameters(FILE))
    return tmp_path / "report"


def numbers_only() -> AbstractContextManager[Any]:
    """Pipelines write the numbers of a report, and an empty page: the page takes most of an evaluation's time."""

    def write(folder: Path, evaluation: Mapping[str, Any], *_: Any, **__: Any) -> None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
        (folder / "evaluation.html").touch()

    return replaced(report, "write_report", lambda _: write)
