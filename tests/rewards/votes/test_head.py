"""A planted taste is found again, with noise and ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, make_scorer
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, cross_val_predict

from visual_grpo.rewards.votes.head import RIDGES, _folds, _logistic, _low, _two_rows, bradley_terry, fit_head

D = 8


def planted(count: int, seed: int, flip: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features of both sides, preferences (by u = w . x, a share of them turned round), and w."""
    generator = np.random.default_rng(seed)
    weights = generator.normal(size=D)
    first, second = generator.normal(size=(2, count, D)) * 3 + 5
    right = (first - second) @ weights > 0
    turned = generator.random(count) < flip
    return first, second, (right != turned).astype(float), weights


def groups(count: int) -> list[str]:
    """Of three prompts, the fewest that are held out twice: each further fold costs tens of fits."""
    return [f"prompt {number % 3}" for number in range(count)]


def test_a_linear_utility_is_recovered() -> None:
    first, second, preference, weights = planted(400, seed=1)
    head = fit_head(first, second, preference, groups(400))
    found = head.weights / head.scale
    assert found @ weights / np.linalg.norm(found) / np.linalg.norm(weights) > 0.98
    assert head.accuracy > 0.93
    assert head.utility(first)[0] - head.utility(second)[0] == pytest.approx((first - second)[0] @ found)


def test_ridge_and_accuracy_are_those_of_nested_cross_validation() -> None:
    """The accuracy differs here if a choice has a part in its own fit or ridge, or if folds of any size count alike."""
    first, second, preference, _ = planted(50, seed=24, flip=0.25)
    prompts = [f"prompt {number}" for number in np.minimum(np.arange(50) % 20, 7)]
    head, folds = fit_head(first, second, preference, prompts), np.tile(_folds(prompts), 2)
    rows, won = _two_rows((first - second) / head.scale, preference)
    ridges = {"C": [0.5 / ridge for ridge in RIDGES]}
    loss = make_scorer(log_loss, greater_is_better=False, response_method="predict_proba", normalize=False)
    search = GridSearchCV(_logistic(1.0), ridges, scoring=loss, cv=LeaveOneGroupOut())
    predicted = cross_val_predict(search, rows, won, groups=folds, cv=LeaveOneGroupOut(), params={"groups": folds})
    assert head.accuracy == (predicted == won)[:50].mean()
    assert head.ridge == pytest.approx(0.5 / search.fit(rows, won, groups=folds).best_params_["C"])


def test_prompts_are_held_out_whole() -> None:
    # The sides can be told apart within a prompt only, by a feature that is turned round from prompt to prompt.
    prompt = np.arange(200) // 20
    own, preference = np.eye(10)[prompt], np.random.default_rng(4).choice([0.0, 1.0], 10)[prompt]
    head = fit_head(own, np.zeros_like(own), preference, [f"prompt {number}" for number in prompt])
    assert head.accuracy == 0.5


def test_ties_weigh_on_both_sides_and_count_in_no_accuracy() -> None:
    first, second, preference, _ = planted(100, seed=5)
    with_ties = np.concatenate([preference, np.full(50, 0.5)])
    more = np.random.default_rng(6).normal(size=(2, 50, D)) + 5
    head = fit_head(np.vstack([first, more[0]]), np.vstack([second, more[1]]), with_ties, groups(150))
    assert (head.decided, head.choices) == (100, 150)
    only = fit_head(first, second, np.full(100, 0.5), groups(100))
    assert only.decided == 0
    assert only.weights == pytest.approx(0, abs=1e-12)


def test_swapped_sides_are_the_same_fit_and_a_fit_is_repeatable() -> None:
    first, second, preference, _ = planted(60, seed=7, flip=0.1)
    head = fit_head(first, second, preference, groups(60))
    again = fit_head(first, second, preference, groups(60))
    swapped = fit_head(second, first, 1 - preference, groups(60))
    assert (head.weights == again.weights).all()
    assert (head.accuracy, head.ridge) == (again.accuracy, again.ridge)
    assert swapped.weights == pytest.approx(head.weights, abs=1e-9)


@pytest.mark.parametrize(
    ("groups", "cases"),
    [(range(300), 300), ([n % 10 for n in range(300)], 10), ([0] * 100 + [1] * 100 + [2] * 50 + [3] * 50, 3)],
    ids=["apart", "of one size", "of several sizes"],
)
def test_the_cases_of_the_interval_are_what_is_held_out_together(groups: Sequence[int], cases: int) -> None:
    low = _low(np.repeat([1.0, 0.5, 0.0], [200, 40, 60]), np.array(groups))
    share = cases * 2 // 3 / cases
    # The lower of both solutions of |p - share| = z sqrt(p (1 - p) / n).
    assert low < share
    assert (low - share) ** 2 == pytest.approx(1.959964**2 * low * (1 - low) / cases, rel=1e-4)


@pytest.mark.parametrize("ridge", [1e-9, 0.5])
def test_wins_are_the_expected_wins_but_for_the_ridge(ridge: float) -> None:
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 6, 200), generator.integers(0, 6, 200)
    preference = generator.choice([0, 0.5, 1], 200)
    preference[(first == 5) & (ridge == 0.5)] = 1  # One that always wins stays finite.
    scores = bradley_terry(first, second, preference, 6, ridge)
    expected = expit(scores[first] - scores[second])
    for thing in range(6):
        own = (first == thing).astype(float) - (second == thing)
        assert (own * (preference - expected)).sum() == pytest.approx(ridge * scores[thing], abs=1e-6)
    assert scores.sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_choices_of_too_few_prompts_predict_nothing(count: int) -> None:
    first, second, preference, _ = planted(60, seed=11)
    head = fit_head(first, second, preference, [f"prompt {number % count}" for number in range(60)])
    assert (head.accuracy, head.low) == (0.5, 0)
