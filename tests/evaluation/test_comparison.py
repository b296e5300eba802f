from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.evaluation.comparison import compare, compare_controls, join
from visual_grpo.evaluation.verdict import summarise

SETTINGS = {"bootstrap_samples": 200, "seed": 0}
COLUMNS = ["sampler", "split", "id", "prompt", "index", "seed", "file"]


def scores(
    total: Sequence[float] | np.ndarray,
    guard: Sequence[float] | float = 1.0,
    sampler: str = "eval",
    split: str = "eval",
    images: int = 2,
) -> pd.DataFrame:
    """``images`` of each prompt p0, p1, ...; the reward is the total, its part ten times that."""
    rows = [
        (sampler, split, f"p{i // images}", f"prompt {i // images}", i % images, 100 + i, f"{sampler}/{i}.png")
        for i in range(len(total))
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame["total"] = frame["reward/a"] = np.asarray(total, dtype=float)
    frame["reward/guard"] = guard
    frame["part/a/fine"] = np.asarray(total, dtype=float) * 10
    frame.attrs = {"weights": {"a": 1.0, "guard": 0.0}}
    return frame


def measured(before: pd.DataFrame, after: pd.DataFrame) -> list[dict[str, Any]]:
    return compare(before, after, **SETTINGS)


def test_entries_by_hand() -> None:
    after = scores([1, 1, 3, 2])
    shuffled = after.iloc[[2, 0, 3, 1]].reset_index(drop=True)  # Rows are paired by key, not by position.
    shuffled.attrs = after.attrs
    entries = measured(scores([0, 1, 2, 3]), shuffled)
    assert [entry["name"] for entry in entries] == ["total", "a", "a/fine", "guard"]
    assert [entry["optimised"] for entry in entries] == [True, True, False, False]
    total, _, fine, guard = entries
    assert (total["split"], total["sampler"]) == ("eval", "eval")
    assert (total["prompts"], total["images"], total["unscored"]) == (2, 4, 0)
    assert (total["baseline"], total["trained"], total["difference"]) == (1.5, 1.75, 0.25)
    assert total["win_rate"] == (1 + 0.5 + 1 + 0) / 4
    assert fine["difference"] == 2.5
    assert fine["ci_high"] == pytest.approx(10 * total["ci_high"])
    assert (guard["difference"], guard["win_rate"]) == (0, 0.5)


def test_a_reward_that_ranks_the_samples_of_a_prompt_is_marked_and_not_in_the_total() -> None:
    before, after = scores([0, 1, 2, 3]), scores([1, 1, 3, 2])
    for frame, ranks in ((before, [0, 1, 1, 0]), (after, [1, 0, 1, 0])):
        frame["reward/rank"] = np.asarray(ranks, dtype=float)
        frame["total"] += 5 * frame["reward/rank"]
        frame.attrs["weights"]["rank"] = 5.0
        frame.attrs["comparing"] = ["a", "rank"]
    entries = {entry["name"]: entry for entry in measured(before, after)}
    assert [name for name, entry in entries.items() if "ranking" in entry] == ["rank"]
    total, own = entries["total"], entries["a"]
    assert (total["baseline"], total["difference"], total["win_rate"]) == (1.5, 0.25, own["win_rate"])


def test_one_right_sample_of_every_prompt_is_no_ranking() -> None:
    before, after = scores([0, 0, 0, 0]), scores([1, 0, 0, 1])
    for frame in (before, after):
        frame["total"] += frame["reward/guard"]
        frame.attrs["weights"]["guard"] = 1.0
    total, *others = measured(before, after)
    assert not any("ranking" in entry for entry in others)
    assert total["difference"] == 0.5


def test_records_held_out_together_are_one_unit() -> None:
    before, after = scores([0, 1, 2, 3, 4, 5]), scores([1, 2, 2, 5, 4, 4])
    apart = measured(before, after)[0]
    assert apart == measured(*(f.assign(unit=f["prompt"]) for f in (before, after)))[0]
    # p1 and p2 are queries about the same image, whichever of its names sorts first.
    units = {"p0": "z", "p1": "y", "p2": "y"}
    together = measured(*(frame.assign(unit=frame["id"].map(units)) for frame in (before, after)))[0]
    assert [(entry["prompts"], entry["units"]) for entry in (apart, together)] == [(3, 3), (3, 2)]
    # Means of the three prompts: 1, 1, -0.5; together the last two are one unit, of mean 0.25.
    assert (apart["difference"], together["difference"]) == (0.5, 0.625)
    # Half of the interval for two units d and e is t |d - e| / 2, where t is 12.7062.
    assert together["ci_high"] == pytest.approx(0.625 + 12.7062 * (1 - 0.25) / 2, rel=1e-5)


def test_totals_of_both_sides_have_the_weights_of_the_trained_module() -> None:
    before, after = scores([0, 1, 2, 3]), scores([1, 1, 3, 2])
    before["reward/guard"], after["reward/guard"] = 0.25, [0.5, np.nan, 0.5, 0.5]
    after.attrs = {"weights": {"a": 2.0, "guard": 4.0}, "measures": {"guard": "guarded"}}
    after["total"] = 2 * after["reward/a"] + 4 * after["reward/guard"]
    entries = measured(before, after)
    assert [entry.get("measure") for entry in entries] == [None, None, None, "guarded"]
    total = entries[0]
    # Without the pair whose guard is unscored: (1), (5, 7) before, (4), (8, 6) after.
    assert (total["images"], total["unscored"]) == (3, 1)
    assert total["difference"] == pytest.approx((3 + (3 - 1) / 2) / 2)


def test_splits_and_samplers_are_measured_separately() -> None:
    def both(low: list[float], high: list[float]) -> pd.DataFrame:
        frame = pd.concat([scores(low), scores(high, sampler="rollout", split="held_out")], ignore_index=True)
        frame.attrs = scores(low).attrs
        return frame

    entries = measured(both([0, 0], [0, 0]), both([1, 1], [5, 5]))
    totals = {(e["split"], e["sampler"]): e["difference"] for e in entries if e["name"] == "total"}
    assert totals == {("eval", "eval"): 1, ("held_out", "rollout"): 5}


def test_undefined_values_are_null_in_json() -> None:
    nan = float("nan")
    unscored = measured(scores([nan, nan]), scores([1, 1]))[0]
    assert (unscored["difference"], unscored["win_rate"], unscored["unscored"]) == (None, None, 2)
    assert unscored["prompts"] == 0
    one_prompt = measured(scores([0, 0]), scores([1, 1]))[0]
    assert (one_prompt["difference"], one_prompt["ci_low"]) == (1, None)


def test_unscored_samples_are_counted_on_each_side_and_a_difference_is_found() -> None:
    total = np.ones(40)
    blank, one = total.copy(), total.copy()
    blank[::4] = np.nan  # One image of every second prompt.
    one[3] = np.nan
    for before, after, counts in (
        (total, blank, (0, 10, True)),
        (blank, total, (10, 0, True)),
        (blank, blank, (10, 10, False)),
        (total, one, (0, 1, False)),
    ):
        found = measured(scores(before), scores(after))[0]
        assert (found["unscored_baseline"], found["unscored_trained"], found["unscored_differs"]) == counts
        assert (found["samples"], found["unscored"]) == (40, max(counts[:2]))


def with_controls(**controls: list[float]) -> pd.DataFrame:
    """The base's samples of four held-out images, and those of each control."""
    drawn = {"eval": [0.0, 1.0, 2.0, 3.0]} | controls
    frames = [scores(total, sampler=name, split="held_out") for name, total in drawn.items()]
    frame = pd.concat(frames, ignore_index=True)
    frame.attrs = {"weights": {"a": 1.0, "guard": 0.0}}
    return frame


def test_controls_are_the_bases_alone_and_compared_with_the_trained_samples() -> None:
    low, high = "eval steps=2", "eval steps=9"
    base = with_controls(**{low: [0.0, 0.0, 0.0, 0.0], high: [2.0, 2.0, 3.0, 3.0]})
    after = scores([1, 2, 4, 4], split="held_out")
    assert {entry["sampler"] for entry in measured(base, after)} == {"eval"}
    entries = compare_controls(base, after, **SETTINGS)
    totals = {e["sampler"]: (e["split"], e["baseline"], e["difference"]) for e in entries if e["name"] == "total"}
    assert totals == {low: ("held_out", 0, 2.75), high: ("held_out", 2.5, 0.25)}
    assert compare_controls(after, after, **SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: f.assign(seed=f["seed"] + 1), "values of seed: .*100"),
        (lambda f: f.assign(sampler="rollout"), "values of sampler: 1 only in .*'rollout'"),
        (lambda f: pd.concat([f, f.iloc[:1].assign(id="p9")]), "values of id: 1 only in the trained results .'p9'"),
        (lambda f: f.assign(seed=[101, 100, 102, 103]), r"images .*\('eval', 'eval', 'p0', 0, 100\)"),
        (lambda f: f.drop(columns="reward/guard"), "scores: 1 only in the baseline .'reward/guard'"),
    ],
)
def test_results_that_do_not_pair_are_refused(change, complaint: str) -> None:
    with pytest.raises(UserError, match=f"differ in their {complaint}.*") as caught:
        join(scores([0, 1, 2, 3]), change(scores([0, 1, 2, 3])))
    assert caught.value.remedy == Remedy("baseline")


def test_only_the_samples_that_were_asked_for_are_compared() -> None:
    baseline = scores([0, 1, 2, 3, 4, 5])
    baseline = pd.concat([baseline, baseline.assign(sampler="sde")])  # Of a loss with a stochastic sampler.
    after = scores([1, 9, 4, 9, 7, 9])
    first_of_two = after[(after["index"] == 0) & (after["id"] != "p1")]
    first_of_two.attrs = after.attrs
    pairs = join(baseline, first_of_two)
    assert list(zip(pairs["id"], pairs["total_baseline"], pairs["total_trained"], strict=True)) == [
        ("p0", 0, 1),
        ("p2", 4, 7),
    ]
    [total] = [e for e in compare(baseline, first_of_two, bootstrap_samples=200, seed=0) if e["name"] == "total"]
    assert (total["images"], total["difference"]) == (2, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_judges_have_intervals_that_hold_together(count: int) -> None:
    rng = np.random.default_rng(0)
    before, after = scores(rng.normal(size=24)), scores(rng.normal(size=24))
    judges = {f"judge{number}": "total" for number in range(count)}
    for frame in (before, after):
        for name in judges:
            frame[f"reward/{name}"] = frame["total"]
        frame.attrs["weights"] |= dict.fromkeys(judges, 0.0)
        frame.attrs["judges"] = judges
    total, *_, last = measured(before, after)
    assert (last["judge_of"], last["confidence"]) == ("total", 1 - 0.05 / count)
    assert "judge_of" not in total
    wider = stats.t.ppf(1 - 0.025 / count, 11) / stats.t.ppf(0.975, 11)
    half, of_total = (entry["ci_high"] - entry["difference"] for entry in (last, total))
    assert half == pytest.approx(wider * of_total)


@pytest.mark.slow  # The intervals themselves: above.
def test_a_judge_speaks_for_nothing_as_rarely_as_its_level_says() -> None:
    """200 runs whose reward really rises, with three judges who see nothing of it: any of them may err in 5%."""
    rng, judges = np.random.default_rng(1), {f"judge{number}": "total" for number in range(3)}
    erred = []
    for _ in range(200):
        tables = []
        for gain in (0.0, 1.0):
            table = scores(rng.normal(gain, 1, 40), split="held_out")
            for name in judges:
                table[f"reward/{name}"] = rng.normal(size=40) + np.repeat(rng.normal(size=20), 2)
            table.attrs = {"weights": {"a": 1.0, "guard": 0.0} | dict.fromkeys(judges, 0.0), "judges": judges}
            tables.append(table)
        found = summarise(measured(*tables))
        erred.append(any(judge["outcome"] != "not shown" for judge in found["judges"]))
    assert 1 <= sum(erred) <= stats.binom.ppf(0.99, 200, 0.05)
