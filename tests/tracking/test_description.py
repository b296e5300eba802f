"""Names of runs: what tells them apart, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.tracking.description import in_words, other_name, resumed_name, training_name

BOTH = ("ar", "dit")


@pytest.mark.parametrize(
    ("changes", "modules", "environment", "given", "name"),
    [
        ({}, BOTH, None, {}, "ar+dit grpo lr7e-4+6e-4 80 steps seed 0"),
        ({"policy": {"stages": "joint"}}, BOTH, None, {}, "ar+dit joint grpo lr7e-4+6e-4 80 steps seed 0"),
        ({"policy": {"stages": "joint"}}, ("ar",), None, {}, "ar grpo lr7e-4 80 steps seed 0"),
        (
            {"grpo": {"loss": "dapo", "learning_rate": 1.25e-5}},
            ("dit",),
            "sd3",
            {},
            "sd3 dit dapo lr6e-4 80 steps seed 0",
        ),
        ({"data": {"path": "a/photos"}}, ("ar",), None, {}, "photos ar grpo lr7e-4 80 steps seed 0"),
        (
            {},
            ("ar",),
            None,
            {
                "seed": 0,
                "grpo.steps": 80,
                "evaluation.every": 3,
                "policy.signal_check.rollouts": 0,
                "grpo.kl_weight": 0.1,
            },
            "ar grpo lr7e-4 80 steps seed 0 grpo.kl_weight=0.1",
        ),
        ({}, ("ar",), None, dict.fromkeys("abcd", 1), "ar grpo lr7e-4 80 steps seed 0 a=1 b=1 c=1 ..."),
    ],
)
def test_a_training_is_named_by_what_differs(
    changes: dict[str, Any], modules: tuple[str, ...], environment: str | None, given: dict[str, Any], name: str
) -> None:
    assert training_name(parameters(**changes), modules, environment, given) == name


MINE = {"function": "my_rewards:mine"}


@pytest.mark.parametrize(
    ("changes", "modules", "environment", "given", "words"),
    [
        ({"rewards": {"palette": {"weight": 0.5}}}, ("ar",), None, {}, " rewards shapes, palette 0.5"),
        ({"rewards": {"mine": {**MINE, "weight": 1}}}, ("ar",), None, {}, " rewards mine"),
        ({"rewards": {"mine": {**MINE, "weight": 0}}}, ("ar",), None, {}, ""),
        ({"rewards": {"shapes": {"options": {"smoothing": 2}}}}, ("ar",), None, {}, " rewards shapes"),
        ({"modules": {"dit": {"rewards": {"palette": 0.25}}}}, ("dit",), None, {}, " rewards shapes, palette 0.25"),
        ({"modules": {"dit": {"rewards": {"palette": 0.25}}}}, ("ar",), None, {}, ""),
        ({"reward": "text"}, ("ar",), None, {"reward": "text", "grpo.clip_low": 0.1}, " rewards ocr grpo.clip_low=0.1"),
        ({"data": {"path": "photos"}, "reward": "target"}, ("ar",), None, {"reward": "target"}, " reward=target"),
        ({"data": {"path": "photos"}, "rewards": {"mine": MINE}}, ("ar",), None, {}, " rewards mine"),
        ({"rewards": {"mine": MINE}}, ("ar",), "sd3", {}, ""),
        ({"rewards": {"mine": MINE}}, ("ar",), "sd3", {"rewards.mine.weight": 1}, " rewards mine"),
        (
            {"data": {"path": "photos"}, "reward": None, "rewards": dict.fromkeys("abcd", MINE)},
            ("ar",),
            None,
            {},
            " rewards a, b, c, ...",
        ),
    ],
)
def test_rewards_that_are_not_the_usual_ones_are_in_the_name(
    changes: dict[str, Any], modules: tuple[str, ...], environment: str | None, given: dict[str, Any], words: str
) -> None:
    assert training_name(parameters(**changes), modules, environment, given).partition("seed 0")[2] == words


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("ar grpo lr7e-4 80 steps seed 0 grpo.kl_weight=0.1", "ar grpo lr7e-4 120 steps seed 0 grpo.kl_weight=0.1"),
        ("ar grpo 80 steps seed 0 (stopped before step 1)", "ar grpo 120 steps seed 0"),
        ("my best, 3 stepsisters", "my best, 3 stepsisters"),
    ],
)
def test_a_resumed_run_has_the_steps_that_it_goes_on_to_in_its_name(name: str, now: str) -> None:
    assert resumed_name(name, 120) == now


def test_other_runs_are_named_by_their_pipelines() -> None:
    assert (
        other_name(parameters(), ["data_preparation", "baseline"], "text", {})
        == "text data_preparation+baseline seed 0"
    )
    for names in itertools.permutations(["labels", "starter", "data_preparation", "score", "baseline"]):
        assert other_name(parameters(), names, None, {}) == "starter+data_preparation+baseline+labels+score seed 0", (
            "Kedro makes a set of the names that it is given"
        )
    assert other_name(parameters(reward="text"), ["baseline"], None, {}) == "baseline seed 0 rewards ocr"


def test_the_description_says_what_is_trained_on_what() -> None:
    text = in_words(parameters(data={"path": "photos"}), ("dit",), "kedro run")
    for part in (
        "dit of `data/06_models/base`",
        "`photos`",
        "80 steps of 8 prompts x 8 samples",
        "```\nkedro run\n```",
    ):
        assert part in text
