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
    assert (
        "it is not shown that the trained model is better: 34 of its 204 samples could not be scored (base: 0), and the"
        " means are of the rest; mean total 1.400 against 1.000" in hacked["sentence"]
    )
    assert lines(hacked)[-1] == "Could not be scored: base 0, trained 34 of 204 each; the shares differ."
    by_chance = headline([entry(images=203, unscored_trained=1)])
    assert by_chance["verdict"] == "better"
    assert lines(by_chance)[-1] == "Could not be scored: base 0, trained 1 of 204 each."
    # Fewer unscored samples than before are no reason for doubt, nor do they make a loss a gain.
    assert headline([entry(unscored_baseline=34, unscored_differs=True)])["verdict"] == "better"
    loss = entry(ci_low=-0.5, ci_high=-0.3, difference=-0.4, unscored_trained=34, unscored_differs=True)
    assert headline([loss])["verdict"] == "worse"


@pytest.mark.parametrize(("units", "verdict"), [(9, "not shown"), (10, "better")])
@pytest.mark.parametrize(("sign", "word"), [(1, "better"), (-1, "worse")])
def test_nothing_is_shown_on_a_few_prompts(units: int, verdict: str, sign: int, word: str) -> None:
    low, high = sorted((0.3 * sign, 0.5 * sign))
    found = headline([entry(prompts=units, units=units, difference=0.4 * sign, ci_low=low, ci_high=high)])
    if units == 10:
        assert (found["verdict"], lines(found)) == (word, [found["sentence"]])
        return
    assert (found["verdict"], lines(found)) == ("not shown", [found["sentence"]])
    assert found["sentence"].startswith(
        f"On 9 held-out prompts (204 pairs) it is not shown that the trained model is {word}: fewer than 10 independent"
        " prompts are too few to rely on the interval; mean total"
    )


def test_a_few_prompts_without_a_difference_have_a_note_of_their_own() -> None:
    found = headline([entry(units=9, ci_low=-0.1)])
    assert lines(found)[-1] == "Fewer than 10 independent prompts are too few to rely on the interval."


def guard(name: str = "edge_density", **changes: Any) -> Entry:
    before = {"baseline_mean": 0.4, "trained_mean": 0.1, "difference": -0.3, "ci_low": -0.4, "ci_high": -0.2}
    return entry(name, **({"optimised": False} | before | changes))


def test_a_wide_interval_of_a_guard_that_fell_is_no_excuse() -> None:
    assert headline([entry(), guard(ci_high=-0.001)])["verdict"] == "not shown"


def test_a_gain_by_emptier_pictures_is_not_shown() -> None:
    hacked = headline([entry(), guard()])
    assert hacked["verdict"] == "not shown"
    assert (
        "it is not shown that the trained model is better: its pictures are emptier, edge_density fell from 0.4 to 0.1;"
        " mean total 1.400 against 1.000" in hacked["sentence"]
    )
    assert lines(hacked)[1] == (
        "Not optimised, and lower: edge_density: 0.400 of the base model, 0.100 of the trained model, -0.300 [-0.400,"
        " -0.200]. Look at the pictures."
    )


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (guard(trained_mean=0.31, difference=-0.09), True),  # Less than a quarter of .4.
        (guard(ci_high=0.01), False),
        (guard(optimised=True), False),
        (guard("source_ssim"), False),
        (guard(ci_low=None, ci_high=None), False),
    ],
)
def test_a_small_or_unsure_fall_is_told_at_most(beside: Entry, said: bool) -> None:
    found = headline([entry(), beside])
    assert found["verdict"] == "better"
    assert (len(lines(found)) == 2) == said
    assert found["sentence"] == headline([entry()])["sentence"]


def test_a_guard_does_not_turn_a_loss() -> None:
    assert headline([entry(difference=-0.4, ci_low=-0.5, ci_high=-0.3), guard()])["verdict"] == "worse"


@pytest.mark.parametrize(("low", "high", "reached"), [(-0.4, -0.2, "more"), (-0.1, 0.1, "as much")])
def test_a_gain_that_a_setting_gives_too_is_told_in_the_sentence(low: float, high: float, reached: str) -> None:
    control = entry(sampler="stock guidance_scale=3", baseline_mean=1.5, ci_low=low, ci_high=high)
    found = headline([entry()], [control])
    assert found["sentence"].endswith(
        f"(95% interval). But guidance_scale=3 alone gives the base model {reached}: 1.500, without any training."
    )


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
    assert lines(found)[-1] == (
        "Eval prompts choose the best adapter and may occur in training too: their scores are rather too good."
    )


def test_the_main_view_is_held_out_with_the_stock_sampler() -> None:
    views = [{"split": s, "sampler": k} for s in ("eval", "held_out") for k in ("rollout", "stock")]
    assert main_view(views) == ("held_out", "stock")
    assert main_view(views[:2]) == ("eval", "stock")
    assert main_view([views[2]]) == ("held_out", "rollout")


def test_a_note_is_read_with_the_sentence() -> None:
    found = headline([entry()], notes=["Judged otherwise."])
    assert lines(found) == [found["sentence"], "Judged otherwise."]


def test_a_number_that_rounds_to_zero_has_no_minus() -> None:
    found = headline([entry(trained_mean=-1e-9, difference=-1e-8, ci_low=-4e-7, ci_high=0.2)])
    assert "mean total 0.000 against 1.000 of the base model, +0.000 [+0.000, +0.200]" in found["sentence"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ci_low": -0.0003}, "1.4000 against 1.0000 of the base model, +0.4000 [-0.0003, +0.5000]"),
        (
            {"baseline_mean": 0.00293, "trained_mean": 0.00008, "difference": -0.00285, "ci_low": -0.1},
            "0.00008 against 0.00293 of the base model, -0.00285 [-0.10000, +0.50000]",
        ),
        ({"ci_low": -2e-6}, "+0.400000 [-0.000002, +0.500000]"),
    ],
)
def test_a_small_number_is_not_shown_as_zero(changes: Entry, said: str) -> None:
    assert said in headline([entry(**changes)])["sentence"]
