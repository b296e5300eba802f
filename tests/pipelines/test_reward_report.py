"""The reward_report pipeline with a painter in the place of a model."""

from __future__ import annotations

import pandas as pd
import pytest
from PIL import Image

from tests.pipelines.painted import SMALL, Project
from visual_grpo.errors import UserError
from visual_grpo.pipeline_registry import create_pipeline

REPORT = {"prompts": 2, "samples": 3}

PIPELINE = create_pipeline("reward_report")


def test_the_base_models_groups_are_drawn_and_the_rewards_described(
    painted: Project, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_one_training_prompt_is_too_few(painted: Project) -> None:
    with pytest.raises(UserError, match="at least two training prompts"):
        painted.run(PIPELINE, reward_report=REPORT)
