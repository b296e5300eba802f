"""Against closed forms."""

import numpy as np
import pytest

from visual_grpo.rewards.votes.head import bradley_terry, logistic, logistic_ridge

WEAK = 1e-9


def test_two_things_differ_by_the_log_odds_of_their_wins() -> None:
    scores = bradley_terry([0] * 10, [1] * 10, [1] * 7 + [0] * 3, 2, WEAK)
    assert scores[0] - scores[1] == pytest.approx(np.log(7 / 3), abs=1e-6)
    assert scores.sum() == pytest.approx(0, abs=1e-9)


def test_a_tie_is_half_a_win_of_each() -> None:
    tied = bradley_terry([0] * 10, [1] * 10, [1] * 6 + [0] * 2 + [0.5] * 2, 2, WEAK)
    assert tied[0] - tied[1] == pytest.approx(np.log(7 / 3), abs=1e-6)


def test_the_sides_do_not_matter() -> None:
    one = bradley_terry([0, 0, 1, 2], [1, 1, 2, 0], [1, 0, 1, 0.5], 3, 0.1)
    other = bradley_terry([1, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 0.5], 3, 0.1)
    assert one == pytest.approx(other, abs=1e-12)


def test_in_a_chain_log_odds_add_up() -> None:
    first, second, preference = [0] * 4 + [1] * 5, [1] * 4 + [2] * 5, [1, 1, 1, 0, 1, 1, 1, 1, 0]
    scores = bradley_terry(first, second, preference, 3, WEAK)
    assert scores[0] - scores[2] == pytest.approx(np.log(3) + np.log(4), abs=1e-6)


def test_one_that_always_wins_stays_finite_and_solves_the_equation_of_the_ridge() -> None:
    scores = bradley_terry([0] * 5, [1] * 5, [1] * 5, 2, 0.5)
    # Of each thing: wins - expected wins = ridge * score.
    assert 5 - 5 * logistic(scores[:1] - scores[1:])[0] == pytest.approx(0.5 * scores[0], abs=1e-8)


def test_where_every_choice_is_kept_expected_wins_are_the_wins() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 6, 200), generator.integers(0, 6, 200)
    preference = generator.choice([0, 0.5, 1], 200)
    scores = bradley_terry(first, second, preference, 6, WEAK)
    expected = logistic(scores[first] - scores[second])
    for thing in range(6):
        own = (first == thing).astype(float) - (second == thing)
        assert (own * (preference - expected)).sum() == pytest.approx(0, abs=1e-6)


def test_far_from_the_solution_the_steps_are_halved() -> None:
    features = np.array([[50.0], [40.0], [-1.0]])
    preference = [1, 1, 1]
    near = logistic_ridge(features, preference, 1e-3)
    assert logistic_ridge(features, preference, 1e-3, np.array([30.0])) == pytest.approx(near, rel=1e-6)


def test_without_a_ridge_there_may_be_no_solution() -> None:
    with pytest.raises(ValueError, match="above 0"):
        bradley_terry([0], [1], [1], 2, 0.0)
