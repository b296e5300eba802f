import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import nct, t

from tests.evaluation.test_comparison import scores as table
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GateRule
from visual_grpo.evaluation.gate import Condition, GateDecision, decide, subgroups_of

NAN = float("nan")
STRICT = 0.05 / 52
REFERENCE = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0]
BETTER = [1.3, 1.5, 1.2, 1.4, 1.1, 1.4]
"""Differences 0.3, 0.3, 0.4, 0.3, 0.2, 0.4: mean 0.316667, standard deviation 0.0752773."""
GAINS = [0.3, 0.3, 0.4, 0.3, 0.2, 0.4]


def scores(total: Sequence[float] | np.ndarray, guard: Sequence[float] | float = 1.0, images: int = 1) -> pd.DataFrame:
    return table(total, guard, split="held_out", images=images)


def lower(differences: Sequence[float], alpha: float) -> float:
    """The bound, written down a second time."""
    n, mean = len(differences), math.fsum(differences) / len(differences)
    sd = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    return mean - t.isf(alpha, n - 1) * sd / math.sqrt(n)


def upper(differences: Sequence[float], alpha: float) -> float:
    return -lower([-d for d in differences], alpha)


def rule(**changes: Any) -> GateRule:
    return GateRule(**({"error": 0.05, "gates_per_year": 1} | changes))


def condition(decision: GateDecision, name: str, against: str = "base") -> Condition:
    (found,) = [c for c in decision.conditions if (c.name, c.against) == (name, against)]
    return found


def test_the_total_s_bound_by_hand() -> None:
    found = condition(decide(scores(BETTER), {"base": scores(REFERENCE)}, rule()), "total")
    # The 95% quantile of Student's t with 5 degrees of freedom is 2.015048.
    assert found.bound == pytest.approx(0.316667 - 2.015048 * 0.0752773 / math.sqrt(6), abs=1e-6)
    assert (found.measured.units, found.measured.baseline, found.measured.trained) == pytest.approx((6, 1.0, 1.316667))
    assert found.measured.difference == pytest.approx(0.316667, abs=1e-6)
    yearly = decide(scores(BETTER), {"base": scores(REFERENCE)}, rule(gates_per_year=52))
    assert yearly.alpha == STRICT
    assert condition(yearly, "total").bound == pytest.approx(lower(GAINS, STRICT))


def test_an_equal_is_not_promoted_and_a_constant_gain_by_few_prompts_neither() -> None:
    decision = decide(scores(REFERENCE), {"base": scores(REFERENCE)}, rule())
    assert (condition(decision, "total").bound, decision.promoted) == (0, False)
    for prompts, promoted in ((3, False), (10, False), (11, True)):
        before = np.arange(prompts)
        decision = decide(scores(before + 0.5), {"base": scores(before)}, rule(gates_per_year=52))
        assert decision.promoted is promoted, prompts
    assert decision.detectable_gain == {"base": 0}


def test_one_prompt_cannot_be_judged_and_no_prompt_either() -> None:
    for before, after, units in (([1.0, 1.0], [2.0, 3.0], 1), ([NAN, 1.0], [1.0, NAN], 0)):
        decision = decide(scores(after, images=2), {"base": scores(before, images=2)}, rule())
        assert (decision.promoted, decision.units) == (False, units)
        assert math.isnan(condition(decision, "total").bound)
        assert f"{units} independent prompt" in condition(decision, "total").sentence
        assert "too few to detect any gain" in decision.notes[0]
        json.dumps(decision.as_json(), allow_nan=False)


def test_images_of_a_prompt_and_prompts_held_out_together_are_one_unit() -> None:
    before, after = scores([0.0] * 8, images=2), scores([1, 3, 2, 2, 5, 5, 4, 0], images=2)
    apart = condition(decide(after, {"base": before}, rule()), "total")
    assert (apart.measured.units, apart.bound) == pytest.approx((4, lower([2, 2, 5, 2], 0.05)))
    units = {"p0": "x", "p1": "x", "p2": "y", "p3": "z"}
    tables = [table.assign(unit=table["id"].map(units)) for table in (after, before)]
    decision = decide(tables[0], {"base": tables[1]}, rule())
    assert (decision.prompts, decision.units) == (4, 3)
    assert condition(decision, "total").bound == pytest.approx(lower([2, 5, 2], 0.05))


def test_every_reference_must_be_beaten() -> None:
    champion, base = scores([1.3, 1.4, 1.3, 1.4, 1.0, 1.5]), scores(REFERENCE)
    decision = decide(scores(BETTER), {"champion": champion, "base": base}, rule())
    assert condition(decision, "total").holds
    assert not condition(decision, "total", "champion").holds
    assert not decision.promoted
    assert decision.sentence.startswith("Not promoted: 1 of 6 conditions failed on 6 prompts, where each")
    assert "Total against champion: +0.0" in decision.sentence
    assert decide(scores(BETTER), {"base": base}, rule()).promoted


GUARD_BEFORE, GUARD_AFTER = [0.5, 0.4, 0.6, 0.5, 0.4, 0.6], [0.45, 0.38, 0.5, 0.47, 0.36, 0.52]
GUARD_CHANGES = [-0.05, -0.02, -0.1, -0.03, -0.04, -0.08]
HALVES = {"half": {"first": ["p0", "p1", "p2"], "second": {"p3", "p4", "p5"}}}
# p0 has one more unscored image of two, p1 one fewer, p3 two more.
SOME = [1.0, 1.1, NAN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.0, 1.0]
FEWER = [NAN, 2.1, 2.0, 2.0, 2.0, 2.0, NAN, NAN, 2.0, 2.2, 2.0, 2.0]
LIMITS: dict[str, tuple[str, pd.DataFrame, pd.DataFrame, float, Any]] = {
    "margin": ("total", scores(BETTER), scores(REFERENCE), lower(GAINS, STRICT), lambda x: {"margin": x}),
    "guard": (
        "guard/guard",
        scores(BETTER, GUARD_AFTER),
        scores(REFERENCE, GUARD_BEFORE),
        -lower(GUARD_CHANGES, STRICT) / 0.5,  # Their mean is 0.5.
        lambda x: {"max_guard_fall": x},
    ),
    "negative guard": (  # What rose is what fell.
        "guard/guard",
        scores(BETTER, [-value for value in GUARD_AFTER]),
        scores(REFERENCE, [-value for value in GUARD_BEFORE]),
        -lower([-change for change in GUARD_CHANGES], STRICT) / 0.5,
        lambda x: {"max_guard_fall": x},
    ),
    "unscored": (
        "unscored",
        scores(FEWER, images=2),
        scores(SOME, images=2),
        upper([0.5, -0.5, 0, 1, 0, 0], 0.05 / 2),
        lambda x: {"max_unscored_rise": x, "gates_per_year": 2},
    ),
    "subgroup": (
        "subgroup/half=second",
        scores([4.0, 4.2, 3.9, 1.0, 0.85, 0.8]),  # Changes of the second half: -0.1, -0.05, -0.2.
        scores(REFERENCE),
        -lower([-0.1, -0.05, -0.2], STRICT),
        lambda x: {"subgroups": {"half": x}},
    ),
}
"""Condition, candidate, reference, where its limit equals its bound, and the rule with a limit."""


@pytest.mark.parametrize("case", LIMITS)
def test_each_bound_may_reach_its_limit_and_not_pass_it(case: str) -> None:
    name, candidate, base, at_bound, limits = LIMITS[case]
    stricter = 1 if case == "margin" else -1
    for beyond, holds in ((-1e-9 * stricter, True), (1e-9 * stricter, False)):
        asked = rule(**{"gates_per_year": 52} | limits(at_bound + beyond))
        decision = decide(candidate, {"base": base}, asked, HALVES)
        assert condition(decision, name).holds is holds, condition(decision, name)
        assert name in {own.name for own in decision.failed} or holds


def test_a_reward_with_a_weight_is_no_guard() -> None:
    candidate, base = scores(BETTER, 0.1), scores(REFERENCE, 1.0)
    assert not decide(candidate, {"base": base}, rule()).promoted
    candidate.attrs["weights"]["guard"] = 1e-6
    decision = decide(candidate, {"base": base}, rule())
    assert [c.name for c in decision.conditions] == ["total", "unscored"]


def test_an_unscored_share_that_fell_holds_as_does_none_at_all() -> None:
    fell = decide(scores([2.0, 2.1, 2.0, 2.2]), {"base": scores([NAN, 1.0, 1.1, 1.0])}, rule(max_unscored_rise=0.5))
    assert condition(fell, "unscored").measured.difference == -0.25
    assert condition(fell, "unscored").holds
    single = decide(scores([2.0]), {"base": scores([1.0])}, rule(max_unscored_rise=0.0))
    assert (condition(single, "unscored").bound, condition(single, "unscored").holds) == (0, True)
    assert not single.promoted


def test_a_guard_that_becomes_unscored_does_not_hold() -> None:
    guard = [1.0, 1.0, 1.0, NAN, NAN, NAN]
    decision = decide(scores(BETTER, guard), {"base": scores(REFERENCE)}, rule())
    assert condition(decision, "guard/guard").holds  # Of the samples that still have it.
    found = condition(decision, "unscored/guard")
    assert found.bound == pytest.approx(upper([0, 0, 0, 1, 1, 1], 0.05))
    assert not decision.promoted
    both = decide(scores(BETTER, guard), {"base": scores(REFERENCE, guard)}, rule())
    assert both.promoted


def test_a_subgroup_of_one_unit_cannot_be_judged_and_says_so() -> None:
    groups = {"half": {"whole": ["p0", "p1", "p2", "p3", "p4"], "single": ["p5"], "not drawn": ["p6", "p7"]}}
    decision = decide(scores(BETTER), {"base": scores(REFERENCE)}, rule(subgroups={"half": 5.0}), groups)
    assert [c.name for c in decision.failed] == ["subgroup/half=single", "subgroup/half=not drawn"]
    assert "Total where half is single against base: 1 independent prompt with scores" in decision.sentence
    assert not decision.promoted
    assert decide(scores(BETTER), {"base": scores(REFERENCE)}, rule(), groups).promoted, "the rule names none"


def test_subgroups_are_the_values_of_the_records_metadata() -> None:
    records = [
        PromptRecord(id="p0", prompt="a", metadata={"colour": "red", "size": 3}),
        PromptRecord(id="p1", prompt="b", metadata={"colour": "blue"}),
        PromptRecord(id="p2", prompt="c", metadata={"colour": "red"}),
    ]
    assert subgroups_of(records, ["colour", "size"]) == {
        "colour": {"red": {"p0", "p2"}, "blue": {"p1"}},
        "size": {"3": {"p0"}},
    }
    assert subgroups_of(records, []) == {}
    with pytest.raises(UserError, match=r"none of the judged records has 'color'.*colour, size.*Did you mean 'colour'"):
        subgroups_of(records, ["color"])
    with pytest.raises(UserError, match="their keys are: none"):
        subgroups_of([PromptRecord(id="p0", prompt="a")], ["colour"])


@pytest.mark.parametrize("units", [9, 10, 99, 100])
def test_few_prompts_are_told_with_the_gain_that_they_can_detect(units: int) -> None:
    before, gain = np.random.default_rng(units).normal(size=(2, units))
    decision = decide(scores(before + gain), {"base": scores(before)}, rule(gates_per_year=52, margin=0.25))
    detectable = decision.detectable_gain["base"]
    # The noncentral t distribution, at a gain beyond the margin.
    size = (detectable - 0.25) / (gain.std(ddof=1) / math.sqrt(units))
    assert nct.sf(t.isf(STRICT, units - 1), units - 1, size) == pytest.approx(0.9)
    few = (
        f"{units} independent prompts with scores, fewer than 100: a gain is detected with 90% probability only if it"
        f" is at least {detectable:.2g} over the base."
    )
    assert decision.notes[-1:] == ([] if units == 100 else [few])
    assert any("too few to rely on the interval" in note for note in decision.notes) == (units == 9)


def test_the_decision_as_json_says_everything() -> None:
    decision = decide(scores(BETTER), {"champion": scores(REFERENCE), "base": scores(REFERENCE)}, rule())
    found = json.loads(json.dumps(decision.as_json(), allow_nan=False))
    assert (found["promoted"], found["alpha"], found["prompts"], found["units"]) == (True, 0.05, 6, 6)
    assert found["sentence"] == decision.sentence
    assert found["sentence"].startswith("Promoted: all 6 conditions hold on 6 prompts, where each bound holds with 95%")
    assert found["detectable_gain"].keys() == {"champion", "base"}
    first = found["conditions"][0]
    assert (first["name"], first["against"], first["holds"]) == ("total", "champion", True)
    assert first["sentence"] == "total against champion: +0.317, lower bound +0.255, required above 0.000: holds"


def test_another_sampler_several_splits_and_lost_weights_are_refused() -> None:
    base = {"base": scores(REFERENCE)}
    for changes, said in (
        ({"sampler": "rollout"}, "got rollout/held_out"),
        ({"split": ["eval", *["held_out"] * 5]}, "got eval/eval, eval/held_out"),
    ):
        with pytest.raises(UserError, match=said):
            decide(scores(BETTER).assign(**changes), base, rule())
    bare = scores(BETTER)
    bare.attrs = {}
    with pytest.raises(UserError, match="lack the weights of their rewards"):
        decide(bare, base, rule())


@pytest.mark.parametrize(("shift", "promoted"), [(0.1, True), (-0.02, True), (-0.1, False)])
def test_what_a_judge_contradicts_is_not_promoted(shift: float, promoted: bool) -> None:
    changes = [shift + noise for noise in (0.05, -0.05, 0.03, -0.03, 0.04, -0.04)]
    after, before = scores(BETTER, [5 + change for change in changes]), scores(REFERENCE, 5.0)
    for frame in (after, before):
        frame.attrs["judges"] = {"guard": "total"}
    decision = decide(after, {"base": before}, rule(gates_per_year=10))
    found = condition(decision, "judge/guard")
    # The end of the verdict's interval, whatever the level of the gate.
    assert found.bound == pytest.approx(upper(changes, 0.025))
    assert (decision.promoted, found.holds) == (promoted, promoted)
    assert not any(one.name.startswith("guard/") for one in decision.conditions)
    if not promoted:
        said = "bounds of judges as in the verdict. Judge guard against base: -0.100, upper bound -0.053, required at"
        said += " least 0.000: does not hold."
        assert decision.sentence.endswith(said)


@pytest.mark.parametrize(
    ("before", "after", "promoted"),
    [
        ([NAN] * 6, [NAN] * 6, True),  # No prompt has a target image.
        ([*[NAN] * 5, 5.0], [*[NAN] * 5, 4.0], True),  # One has: a judge cannot contradict by one prompt.
        ([5.0] * 6, [NAN] * 6, False),
        ([NAN, NAN, 5.0, 5.1, 5.2, 5.3], [NAN, NAN, 4.0, 4.2, 4.1, 4.2], False),
        ([NAN, NAN, 5.0, 5.1, 5.2, 5.3], [NAN, NAN, 6.0, 6.2, 6.1, 6.2], True),
    ],
)
def test_a_judge_that_scores_neither_model_refuses_nothing(
    before: list[float], after: list[float], promoted: bool
) -> None:
    tables = scores(BETTER, after), scores(REFERENCE, before)
    for frame in tables:
        frame.attrs["judges"] = {"guard": "total"}
    assert decide(tables[0], {"base": tables[1]}, rule(gates_per_year=10)).promoted == promoted
