"""The verdict in numbers and words."""

from __future__ import annotations

from typing import Any

import pytest

from visual_grpo.evaluation.verdict import lines, main_view, result, show, summarise

Entry = dict[str, Any]
LOSS: Entry = {"difference": -0.4, "ci_low": -0.5, "ci_high": -0.3}


def entry(name: str = "total", **changes: Any) -> Entry:
    return {
        "name": name, "split": "held_out", "sampler": "eval", "optimised": True, "prompts": 34, "units": 34,
        "all_prompts": 34, "images": 204, "samples": 204, "unscored": 0, "unscored_baseline": 0, "unscored_trained": 0,
        "unscored_differs": False, "baseline": 1.0, "trained": 1.4, "difference": 0.4, "ci_low": 0.3,
        "ci_high": 0.5, "win_rate": 0.9,
    } | changes  # fmt: skip


def guard(name: str = "edge_density", **changes: Any) -> Entry:
    before = {"baseline": 0.4, "trained": 0.1, "difference": -0.3, "ci_low": -0.4, "ci_high": -0.2}
    return entry(name, **({"optimised": False, "guard": "its pictures are emptier"} | before | changes))


STEADY = guard("exposure", trained=0.4, difference=0.0, ci_low=-0.01, ci_high=0.01)


def test_the_headline_is_of_held_out_prompts_at_the_eval_sampler() -> None:
    others = [entry(sampler="rollout", difference=9.0), entry(split="eval", difference=8.0), entry("shapes")]
    found = summarise([*others, entry()])
    assert (found["split"], found["sampler"], found["difference"]) == ("held_out", "eval", 0.4)
    assert (found["verdict"], found["confidence"], found["task"], found["control"]) == ("better", 0.95, None, None)
    assert found["sentence"] == (
        "On 34 held-out prompts (204 pairs) the trained model is better: mean total 1.400 against 1.000 for the"
        " base model, +0.400 [+0.300, +0.500] (95% interval)."
    )
    assert lines(summarise([entry(), STEADY], notes=["Judged otherwise."])) == [found["sentence"], "Judged otherwise."]


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"ci_low": 0.001}, "better", "the trained model is better: mean total 1.400 against 1.000"),
        ({"ci_low": 0.0}, "not shown", "no difference is shown"),
        ({"ci_low": -0.1}, "not shown", "+0.400 [-0.100, +0.500]"),
        (LOSS, "worse", "the trained model is worse"),
        ({"ci_low": None, "ci_high": None, "prompts": 1, "units": 1}, "not shown", "+0.400 (no interval)"),
        ({"difference": None, "ci_low": None, "ci_high": None}, "not shown", "No pair of samples could be scored"),
        ({"units": 20}, "better", "On 34 held-out prompts, 20 independent (204 pairs)"),
        ({"units": 10}, "better", "the trained model is better"),
        ({"units": 9}, "not shown", "the data do not show that the trained model is better: fewer than 10 independent"),
        (LOSS | {"units": 10}, "worse", "the trained model is worse"),
        (LOSS | {"units": 9}, "not shown", "the data do not show that the trained model is worse: fewer than 10 indep"),
        # A number that rounds to 0 has no minus, and a small one is not shown as 0.
        (
            {"trained": -1e-9, "difference": -1e-8, "ci_low": -4e-7, "ci_high": 0.2},
            "not shown",
            "mean total 0.000 against 1.000 for the base model, +0.000 [+0.000, +0.200]",
        ),
        ({"ci_low": -0.0003}, "not shown", "1.4000 against 1.0000 for the base model, +0.4000 [-0.0003, +0.5000]"),
        (
            {"baseline": 0.00293, "trained": 0.00008, "difference": -0.00285, "ci_low": -0.1},
            "not shown",
            "0.00008 against 0.00293 for the base model, -0.00285 [-0.10000, +0.50000]",
        ),
        ({"ci_low": -2e-6}, "not shown", "+0.400000 [-0.000002, +0.500000]"),
    ],
)
def test_a_difference_is_shown_only_where_the_interval_excludes_zero(changes: Entry, verdict: str, said: str) -> None:
    found = summarise([entry(**changes)])
    assert found["verdict"] == verdict
    assert said in found["sentence"]


@pytest.mark.parametrize(
    ("changes", "verdict", "last"),
    [
        ({"unscored_trained": 34, "unscored_differs": True}, "not shown", "base 0, trained 34 of 204 each; the shares"),
        ({"unscored_trained": 1}, "better", "Could not be scored: base 0, trained 1 of 204 each."),
        # Fewer unscored samples than before are no reason for doubt, nor do they make a loss a gain.
        ({"unscored_baseline": 34, "unscored_differs": True}, "better", "base 34, trained 0 of 204 each; the shares"),
        (LOSS | {"unscored_trained": 34, "unscored_differs": True}, "worse", "the shares differ."),
        ({"units": 9, "ci_low": -0.1}, "not shown", "Fewer than 10 independent prompts are too few to rely on the int"),
        (
            {"split": "eval"},
            "not judged",
            "Eval prompts choose the best adapter and may occur in training too: their sco",
        ),
    ],
)
def test_the_last_line_says_what_the_numbers_do_not(changes: Entry, verdict: str, last: str) -> None:
    found = summarise([entry(**changes)])
    assert found["verdict"] == verdict
    assert last in lines(found)[-1]


def test_a_gain_by_emptier_pictures_is_not_shown() -> None:
    hacked = summarise([entry(), guard()])
    assert hacked["verdict"] == "not shown"
    assert (
        "the data do not show that the trained model is better: its pictures are emptier (edge_density fell from 0.400"
        " to 0.100); mean total 1.400 against 1.000" in hacked["sentence"]
    )
    assert lines(hacked)[1] == (
        "Not optimised, and lower: edge_density: 0.400 for the base model, 0.100 for the trained model, -0.300"
        " [-0.400, -0.200]. Look at the pictures."
    )
    assert summarise([entry(), guard(ci_high=-0.001)])["verdict"] == "not shown", "a wide interval is no excuse"
    assert summarise([entry(**LOSS), guard()])["verdict"] == "worse", "a guard does not turn a loss"


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (guard(trained=0.31, difference=-0.09), True),  # Less than a quarter of .4.
        (guard(ci_high=0.01), False),
        (guard(optimised=True), False),
        (guard(ci_low=None, ci_high=None), False),
        ({name: value for name, value in guard("source_ssim").items() if name != "guard"}, False),
        # Of a score below 0 no share is left.
        (guard("flicker", baseline=-0.1, trained=-0.2, difference=-0.1), True),
    ],
)
def test_a_small_or_unsure_fall_is_told_at_most(beside: Entry, said: bool) -> None:
    found = summarise([entry(), beside, STEADY])
    assert found["verdict"] == "better"
    assert (len(lines(found)) == 2) == said
    fell = f" But its pictures are emptier ({beside['name']} fell from {beside['baseline']:.3f} to"
    assert found["sentence"].startswith(summarise([entry()])["sentence"] + fell * said)
    assert (fell in found["sentence"]) == said


@pytest.mark.parametrize(
    ("baseline", "low", "high", "told"),
    [(1.5, -0.4, -0.2, "more: 1.500"), (1.5, -0.1, 0.1, "as much: 1.500"), (0.00034, -0.1, 0.1, "as much: 0.0003")],
)
def test_a_gain_that_a_setting_gives_too_is_told_in_the_sentence(
    baseline: float, low: float, high: float, told: str
) -> None:
    control = entry(sampler="eval guidance_scale=3", baseline=baseline, ci_low=low, ci_high=high)
    found = summarise([entry()], [control])
    assert found["sentence"].endswith(
        f"(95% interval). But guidance_scale=3 alone gives the base model {told}, without any training."
    )
    assert f"guidance_scale=3 gives the base model {told.split()[-1]}; the trained" in " ".join(lines(found))


def test_the_control_is_the_bases_best_one() -> None:
    controls = [
        entry(sampler="eval guidance_scale=1", baseline=0.8, difference=0.6, ci_low=0.5, ci_high=0.7),
        entry(sampler="eval guidance_scale=3", baseline=1.1, difference=0.3, ci_low=0.2, ci_high=0.4),
        entry("shapes", sampler="eval guidance_scale=1", baseline=5.0),
    ]
    found = summarise([entry(), STEADY], controls)
    numbers = {"baseline": 1.1, "trained": 1.4, "difference": 0.3, "ci_low": 0.2, "ci_high": 0.4}
    assert found["control"] == controls[1] | {"of": 2} | numbers
    assert lines(found)[1] == (
        "Control: without training, guidance_scale=3 gives the base model 1.100 (the best of 2 by the total); the"
        " trained model against that: +0.300 [+0.200, +0.400]."
    )
    assert "best of" not in lines(summarise([entry(), STEADY], controls[1:]))[1]


def test_the_task_has_its_own_measure() -> None:
    measured = entry(
        "ocr/accuracy",
        measure="read without a mistake",
        baseline=0.3,
        trained=0.9,
        difference=0.6,
        ci_low=-0.1,
    )
    found = summarise([entry(), measured, STEADY])
    assert (found["task"]["score"], found["task"]["verdict"]) == ("ocr/accuracy", "not shown")
    assert lines(found)[1] == (
        "read without a mistake (ocr/accuracy): 0.300 for the base model, 0.900 for the trained model,"
        " +0.600 [-0.100, +0.500]."
    )
    assert (result(found)["task"], result(found)["task_base"]) == (0.9, 0.3)


def test_the_result_has_only_numbers() -> None:
    assert result(summarise([entry(ci_low=None, ci_high=None, unscored_trained=2)])) == {
        "gain": 0.4,
        "base": 1.0,
        "trained": 1.4,
        "unscored": 2,
        "unscored_base": 0,
        "prompts": 34,
    }


def test_the_main_view_is_held_out_with_the_eval_sampler() -> None:
    views = [{"split": s, "sampler": k} for s in ("eval", "held_out") for k in ("rollout", "eval")]
    assert main_view(views) == ("held_out", "eval")
    assert main_view(views[:2]) == ("eval", "eval")
    assert main_view([views[2]]) == ("held_out", "rollout")


def judge(name: str = "second", of: str = "total", confidence: float = 0.95, **changes: Any) -> Entry:
    return entry(name, judge_of=of, confidence=confidence, optimised=False, **changes)


OVER: Entry = {"sampler": "eval guidance_scale=3", "difference": 0.1, "ci_low": 0.05, "ci_high": 0.15}
NOTHING: Entry = {"difference": None, "ci_low": None, "ci_high": None}
UNSURE: Entry = {"difference": -0.1, "ci_low": -0.3, "ci_high": 0.1}


@pytest.mark.parametrize(
    ("total", "second", "control", "verdict", "outcome", "said"),
    [
        ({}, {}, OVER, "better", "carries over", "(95% interval). The gain carries over to second."),
        ({}, {}, None, "better", "carries over", "The gain carries over to second."),
        ({}, {}, OVER | {"ci_low": -0.05}, "better", "not shown", "not show whether the gain carries over to second."),
        ({}, UNSURE, OVER, "better", "not shown", "The data do not show whether the gain carries over to second."),
        (
            {},
            LOSS,
            OVER,
            "contradicted",
            "contradicted",
            "the gain of the trained model is contradicted: the judge second: 1.000 for the base model, 1.400 for the"
            " trained model, -0.400 [-0.500, -0.300]; mean total 1.400 against 1.000",
        ),
        (LOSS, LOSS, OVER, "worse", "contradicted", "the trained model is worse: mean total"),
        (UNSURE, LOSS, OVER, "not shown", "contradicted", "no difference is shown"),
        (UNSURE, {}, OVER, "not shown", "not shown", "no difference is shown"),  # There is no gain to carry over.
        # Too few prompts show nothing by a judge either, and what a judge cannot score may be what got worse.
        ({"units": 9}, LOSS | {"units": 9}, OVER, "not shown", "not shown", "fewer than 10 independent"),
        (
            {},
            {"unscored_trained": 34, "unscored_differs": True},
            OVER,
            "better",
            "not shown",
            "not show whether the gain",
        ),
        (
            {},
            {"difference": None, "ci_low": None, "ci_high": None},
            None,
            "better",
            "not shown",
            "not show whether the",
        ),
    ],
)
def test_a_gain_carries_over_to_a_judge_or_is_contradicted(
    total: Entry, second: Entry, control: Entry | None, verdict: str, outcome: str, said: str
) -> None:
    controls = [] if control is None else [judge(**control), entry(**OVER)]
    found = summarise([entry(**total), judge(**second)], controls)
    assert (found["verdict"], found["judges"][0]["outcome"]) == (verdict, outcome)
    assert said in found["sentence"]


def test_judges_stand_in_the_lines_and_in_the_numbers() -> None:
    of_ocr = judge("tesseract", of="ocr", confidence=0.975)
    best = judge("tesseract", of="ocr", **OVER | {"baseline": 1.2})
    other = judge("tesseract", of="ocr", **OVER | {"sampler": "eval guidance_scale=1", "baseline": 1.1})
    found = summarise([entry(), entry("ocr"), of_ocr, judge("second", **LOSS)], [other, best])
    assert found["verdict"] == "contradicted"
    assert lines(found)[1:3] == [
        "Judge tesseract (of ocr): 1.000 for the base model, 1.400 for the trained model, +0.400 [+0.300, +0.500]"
        " (97.5% interval); over the control that it rates best (guidance_scale=3):"
        " +0.100 [+0.050, +0.150]. The gain carries over.",
        "Judge second: 1.000 for the base model, 1.400 for the trained model, -0.400 [-0.500, -0.300]. It"
        " contradicts a gain.",
    ]
    assert result(found)["judge/second"] == -0.4
    lost = summarise([entry(), entry("ocr", **UNSURE), of_ocr])
    assert lost["judges"][0]["outcome"] == "not shown", "what it judges has no gain"
    both = summarise([entry(), guard(), judge(**LOSS)])
    assert "edge_density fell from 0.400 to 0.100); mean total" in both["sentence"], "doubts are told as well"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (34, "[+0.300, +0.500]. The gain carries over."),
        (20, "[+0.300, +0.500]; judged on 20 of 34 prompts. The gain carries over."),
        (0, "Judge second: no pair of samples could be scored; judged on 0 of 34 prompts."),
    ],
)
def test_a_judge_says_how_many_of_the_prompts_it_could_score(prompts: int, said: str) -> None:
    changes: Entry = dict.fromkeys(("unscored_baseline", "unscored_trained"), 6 * (34 - prompts))
    changes |= {} if prompts else NOTHING
    found = summarise([entry(), judge(prompts=prompts, units=prompts, **changes)])
    assert lines(found)[2 if not prompts else 1].endswith(said)
    assert found["verdict"] == "better", "what a judge cannot score is not unscored of the total"


@pytest.mark.parametrize(
    ("beside", "samples", "line"),
    [
        ([], "images", "edge_density: {weight: 0}"),
        ([entry("shapes"), entry("shapes/all")], "images", "edge_density: {weight: 0}"),  # Parts of what is optimised.
        ([entry("edge_density")], "images", "colour_entropy: {weight: 0}"),
        ([guard("source_ssim", **NOTHING), judge(**NOTHING)], "images", "edge_density: {weight: 0}"),
        ([], "videos", "edge_density: {weight: 0, frames: all}"),
        ([], "answers", 'my_guard: {function: "my_rewards:my_guard", weight: 0}'),
        ([guard("mine")], "images", None),
        ([judge()], "images", None),
        ([guard("source_ssim", **NOTHING), judge()], "images", None),
    ],
)
def test_a_result_that_nothing_but_the_reward_measures_is_warned_of(
    beside: list[Entry], samples: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = summarise([entry(), *beside], samples=samples)
    assert found["guard_to_add"] == line
    show(found)
    warned = [
        text for text in capsys.readouterr().out.splitlines() if text.startswith("Warning: the only score here is")
    ]
    assert [text.rpartition(" under rewards in the parameters: ")[2] for text in warned] == (
        [] if line is None else [line]
    )
