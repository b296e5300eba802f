"""The verdict in numbers and words."""

from __future__ import annotations

from typing import Any

import pytest

from visual_grpo.evaluation.headline import headline, lines, main_view, result

Entry = dict[str, Any]


def entry(name: str = "total", **changes: Any) -> Entry:
    return {
        "name": name, "split": "held_out", "sampler": "stock", "optimised": True, "prompts": 34, "units": 34,
        "images": 204, "samples": 204, "unscored": 0, "unscored_baseline": 0, "unscored_trained": 0,
        "unscored_differs": False, "baseline_mean": 1.0, "trained_mean": 1.4, "difference": 0.4, "ci_low": 0.3,
        "ci_high": 0.5, "win_rate": 0.9,
    } | changes  # fmt: skip


def test_the_headline_is_of_held_out_prompts_at_the_stock_sampler() -> None:
    entries = [
        entry(sampler="rollout", difference=9.0), entry(split="eval", difference=8.0), entry("shapes"), entry(),
    ]  # fmt: skip
    found = headline(entries)
    assert (found["score"], found["split"], found["sampler"], found["difference"]) == (
        "total", "held_out", "stock", 0.4,
    )  # fmt: skip
    assert (found["verdict"], found["confidence"], found["task"], found["control"]) == ("better", 0.95, None, None)
    assert found["sentence"] == (
        "On 34 held-out prompts (204 pairs) the trained model is better: mean total 1.400 against 1.000 of the"
        " base model, +0.400 [+0.300, +0.500] (95% interval)."
    )
    assert lines(found) == [found["sentence"]]


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"ci_low": 0.001}, "better", "the trained model is better: mean total 1.400 against 1.000"),
        ({"ci_low": 0.0}, "not shown", "no difference is shown"),
        ({"ci_low": -0.1}, "not shown", "+0.400 [-0.100, +0.500]"),
        ({"difference": -0.4, "ci_low": -0.5, "ci_high": -0.3}, "worse", "the trained model is worse"),
        ({"ci_low": None, "ci_high": None, "prompts": 1, "units": 1}, "not shown", "+0.400 (no interval)"),
        ({"difference": None, "ci_low": None, "ci_high": None}, "not shown", "No pair of samples could be scored"),
        ({"units": 20}, "better", "On 34 held-out prompts in 20 groups (204 pairs)"),
    ],
)
def test_a_difference_is_shown_only_where_the_interval_excludes_zero(changes: Entry, verdict: str, said: str) -> None:
    found = headline([entry(**changes)])
    assert found["verdict"] == verdict
    assert said in found["sentence"]


def test_a_gain_is_not_shown_where_more_of_the_trained_models_samples_could_not_be_scored() -> None:
    hacked = headline([entry(images=170, unscored_trained=34, unscored_differs=True)])
    assert hacked["verdict"] == "not shown"
    assert "34 of its 204 samples could not be scored (base: 0)" in hacked["sentence"]
    assert lines(hacked)[-1] == "Could not be scored: base 0, trained 34 of 204 each; the shares differ."
    by_chance = headline([entry(images=203, unscored_trained=1)])
    assert by_chance["verdict"] == "better"
    assert lines(by_chance)[-1] == "Could not be scored: base 0, trained 1 of 204 each."
    # Fewer unscored samples than before are no reason for doubt, nor do they make a loss a gain.
    assert headline([entry(unscored_baseline=34, unscored_differs=True)])["verdict"] == "better"
    loss = entry(ci_low=-0.5, ci_high=-0.3, difference=-0.4, unscored_trained=34, unscored_differs=True)
    assert headline([loss])["verdict"] == "worse"


def test_the_control_is_the_bases_best_one() -> None:
    controls = [
        entry(sampler="stock guidance_scale=1", baseline_mean=0.8, difference=0.6, ci_low=0.5, ci_high=0.7),
        entry(sampler="stock guidance_scale=3", baseline_mean=1.1, difference=0.3, ci_low=0.2, ci_high=0.4),
        entry("shapes", sampler="stock guidance_scale=1", baseline_mean=5.0),
    ]
    found = headline([entry()], controls)
    assert found["control"] == {
        "sampler": "stock guidance_scale=3", "of": 2, "baseline": 1.1, "trained": 1.4, "difference": 0.3,
        "ci_low": 0.2, "ci_high": 0.4,
    }  # fmt: skip
    assert lines(found)[1] == (
        "Control: without training, guidance_scale=3 gives the base model 1.100 (the best of 2); the trained model"
        " against that: +0.300 [+0.200, +0.400]."
    )


@pytest.mark.parametrize(
    ("score", "name"),
    [("shapes/all", "all right"), ("ocr/accuracy", "read without a mistake"), ("negative_points/gIoU", "gIoU")],
)
def test_the_task_has_its_own_measure(score: str, name: str) -> None:
    found = headline([entry(), entry(score, baseline_mean=0.3, trained_mean=0.9, difference=0.6, ci_low=-0.1)])
    assert (found["task"]["name"], found["task"]["baseline"], found["task"]["verdict"]) == (name, 0.3, "not shown")
    assert lines(found)[1] == f"{name}: 0.300 of the base model, 0.900 of the trained model, +0.600 [-0.100, +0.500]."
    assert result(found)["task"] == {
        "baseline": 0.3, "trained": 0.9, "difference": 0.6, "ci_low": -0.1, "ci_high": 0.5,
    }  # fmt: skip


def test_the_result_has_only_numbers() -> None:
    numbers = result(headline([entry(ci_low=None, ci_high=None, unscored_trained=2)]))
    assert numbers == {
        "total": {"baseline": 1.0, "trained": 1.4, "difference": 0.4},
        "unscored": {"baseline": 0, "trained": 2},
        "prompts": 34,
        "images": 204,
    }


def test_without_held_out_prompts_the_headline_says_what_eval_prompts_are() -> None:
    found = headline([entry(split="eval")])
    assert "On 34 eval prompts (204 pairs)" in found["sentence"]
    assert lines(found)[-1] == "Eval prompts also occur in training, and they choose the best adapter."


def test_the_main_view_is_held_out_with_the_stock_sampler() -> None:
    views = [{"split": s, "sampler": k} for s in ("eval", "held_out") for k in ("rollout", "stock")]
    assert main_view(views) == ("held_out", "stock")
    assert main_view(views[:2]) == ("eval", "stock")
    assert main_view([views[2]]) == ("held_out", "rollout")
