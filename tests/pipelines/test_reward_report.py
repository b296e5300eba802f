"""The reward_report pipeline with a painter in the place of a model, and what a set of rewards is like, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from tests.evaluation.test_pictures import where
from tests.pipelines.painted import SMALL, Project
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Scores, weighted_total
from visual_grpo.config import GRPOConfig
from visual_grpo.evaluation.pictures import WIDTH
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.reward_report import (
    ScoredGroups,
    _sheet,
    correlations,
    findings,
    reward_table,
    score_twice,
    within_groups,
)
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.reward import FunctionReward

REPORT = {"prompts": 2, "samples": 3}

PIPELINE = register_pipelines()["reward_report"]


def test_groups_are_drawn_and_rewards_described(painted: Project, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {
        "brightness": {"function": "tests.evaluation.painter:brightness", "weight": 1.0},
    }
    painted.prepare(train=3)
    folder = painted.run(PIPELINE, reward_report=REPORT, rewards_used=rewards).load("reward_report")
    samples = pd.read_csv(folder / "samples.csv")
    assert samples.groupby("id").size().tolist() == [3, 3]
    assert samples["id"].str.startswith("train").all()
    assert samples["brightness"].nunique() == 6
    table = pd.read_csv(folder / "rewards.csv").set_index("reward")
    assert table.index.tolist() == ["brightness", "edge_density", "colour_entropy", "total"]
    assert table.loc["brightness", "mean"] == pytest.approx(samples["brightness"].mean())
    assert table.loc["brightness", "share of the advantages"] == pytest.approx(1.0)
    assert (table["repeat"] == 0).all()
    assert pd.read_csv(folder / "correlations.csv", index_col=0).shape == (3, 3)
    with Image.open(folder / "sheet.png") as sheet:
        assert sheet.width > sheet.height / 2
    shown = capsys.readouterr().out
    assert "6 samples of 2 training prompts, rollout sampler" in shown
    assert "Scoring takes about" in shown


def test_the_same_seed_gives_the_same_samples(painted: Project) -> None:
    painted.prepare(train=3)
    runs = [
        pd.read_csv(painted.run(PIPELINE, reward_report=REPORT, **more).load("reward_report") / "samples.csv")
        for more in ({}, {"seed": 4}, {"evaluation": SMALL | {"seed": 4}})
    ]
    assert runs[0].equals(runs[1])
    assert not runs[0]["total"].equals(runs[2]["total"])


def test_the_sheet_shows_what_was_edited(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "lime").save(tmp_path / "a.png")
    groups = scored(a=(1.0, [0.1, 0.2, 0.3] * 2), b=(1.0, [0.3, 0.2, 0.1] * 2))
    edits = [replace(record, source_images=(tmp_path / "a.png",)) for record in RECORDS]
    samples = [torch.zeros(3, 32, 32, dtype=torch.uint8)] * 6
    sheet = _sheet(
        replace(groups, records=edits, samples=samples), RewardSet({"a": (lambda prompts, samples: [], 1.0)})
    )
    assert where(sheet, "lime").sum() == len(within_groups(groups).columns) * WIDTH**2


def test_one_training_prompt_is_too_few(painted: Project) -> None:
    with pytest.raises(UserError, match="at least two training prompts"):
        painted.run(PIPELINE, reward_report=REPORT)


NAN = math.nan
RECORDS = [PromptRecord(id=i, prompt=f"prompt {i}") for i in ("a", "a", "a", "b", "b", "b")]
CONFIG = GRPOConfig(steps=1, prompts_per_step=4, group_size=8, learning_rate=0.1)


def scored(again: dict[str, list[float]] | None = None, **rewards: tuple[float, list[float]]) -> ScoredGroups:
    """Of two groups of three samples; each reward with its weight and scores."""
    weights = {name: weight for name, (weight, _) in rewards.items()}

    def scores(changed: dict[str, list[float]]) -> Scores:
        values = {name: torch.tensor(changed.get(name, own)) for name, (_, own) in rewards.items()}
        return Scores(total=weighted_total(values, weights), rewards=values, parts={}, weights=weights)

    return ScoredGroups(
        records=RECORDS,
        samples=[None] * 6,
        scores=scores({}),
        again=scores(again or {}),
        seconds={name: 3.0 * (i + 1) for i, name in enumerate(rewards)},
    )


def row(found: ScoredGroups, name: str) -> dict[Any, Any]:
    table = reward_table(found, CONFIG)
    return dict(next(own for own in table.to_dict("records") if own["reward"] == name))


def test_scale_and_noise_are_those_within_and_between_groups() -> None:
    found = row(scored(x=(2.0, [1.0, 2.0, 3.0, 7.0, 7.0, NAN])), "x")
    assert (found["weight"], found["mean"], found["lowest"], found["highest"]) == (2.0, 4.0, 1.0, 7.0)
    assert found["between seeds"] == pytest.approx((1 + 0) / 2), "the mean of the groups' deviations"
    assert found["between prompts"] == pytest.approx((7 - 2) / 2**0.5)
    assert found["equal groups"] == 0.5
    assert found["unscored"] == pytest.approx(1 / 6)
    assert found["s for 16"] == pytest.approx(3.0 * 16 / 6)
    assert found["repeat"] == 0


def test_a_reward_that_judges_otherwise_the_second_time_is_told() -> None:
    found = scored({"x": [1.0, 2.0, 3.5, 0.0, NAN, 0.0]}, x=(1.0, [1.0, 2.0, 3.0, 0.0, 1.0, 0.0]))
    assert row(found, "x")["repeat"] == 0.5
    assert "x: scored twice, the same sample differs by up to 0.5." in sentences(found)


def test_correlations_are_those_of_differences_within_groups() -> None:
    """Between the groups the two agree perfectly."""
    found = scored(x=(1.0, [0.0, 1.0, 2.0, 100.0, 101.0, 102.0]), y=(1.0, [2.0, 1.0, 0.0, 102.0, 101.0, 100.0]))
    assert correlations(found).loc["x", "y"] == pytest.approx(-1)
    assert within_groups(scored(x=(1.0, [0.0, 1.0, NAN, 5.0, 5.0, 8.0])))["x"].tolist()[:2] == [-0.5, 0.5]


def sentences(found: ScoredGroups) -> list[str]:
    return findings(reward_table(found, CONFIG), correlations(found), CONFIG)


def test_findings_name_what_teaches_nothing() -> None:
    found = scored(
        flat=(1.0, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
        loud=(1.0, [0.0, 50.0, 100.0, 0.0, 100.0, 50.0]),
        echo=(0.01, [0.0, 5.0, 10.0, 0.0, 10.0, 5.1]),
        guard=(0.0, [1.0, 1.0, 1.0, 1.0, NAN, 1.0]),
    )
    assert sentences(found) == [
        "flat: in 100% of the scored groups all samples score the same, which teaches nothing.",
        "echo: drowned by the other rewards (0% of the advantages); raise its weight, or set grpo.combine=gdpo.",
        "guard: 17% of the samples could not be scored.",
        "loud and echo say the same about the samples of a prompt: one of them is enough.",
        "Scoring takes about 1.6e+02 s of a training step with 32 samples on this machine.",
    ]


def test_rewards_that_work_against_each_other_are_told() -> None:
    found = scored(up=(1.0, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]), down=(0.5, [0.0, -1.0, -2.0, 0.0, -1.0, -2.0]))
    assert sentences(found)[:2] == [
        "down: the other rewards work against it (-100% of the advantages).",
        "up and down say the opposite about the samples of a prompt: one of them is enough.",
    ]


def test_what_is_unscored_is_not_called_the_same() -> None:
    found = scored(
        gone=(1.0, [NAN] * 6), half=(1.0, [NAN, NAN, NAN, 0.0, 1.0, 2.0]), loud=(1.0, [0.0, 50.0, 100.0] * 2)
    )
    assert [line for line in sentences(found) if "score the same" in line or "not be scored" in line] == [
        "gone: 100% of the samples could not be scored.",
        "half: 50% of the samples could not be scored.",
        "total: 100% of the samples could not be scored.",
    ]


def redness(prompts: list[PromptRecord], images: list[torch.Tensor]) -> list[float]:
    return [float(image[0].float().mean()) for image in images]


def test_a_training_step_does_not_wait_for_judges() -> None:
    judge = FunctionReward("judge", redness)
    judge.judge_of = "total"
    rewards = RewardSet({"red": (redness, 1.0), "judge": (judge, 0.0)})
    found = score_twice(rewards, RECORDS, [torch.full((3, 4, 4), level, dtype=torch.uint8) for level in range(6)])
    assert row(found, "judge")["s for 16"] > 0
    assert row(found, "total")["s for 16"] == row(found, "red")["s for 16"]
