"""Scores of things from choices between two of them.

Bradley & Terry, Rank Analysis of Incomplete Block Designs (Biometrika 39, 1952): i is preferred to j with probability
s(u_i - u_j), where s is the logistic function. A tie counts as half a win of each. A ridge, a normal prior on the
scores, keeps those finite that always win (or lose), and sets the scores' free constant: their mean is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

ITERATIONS = 100
TOLERANCE = 1e-10
"""Of the largest component of the gradient, in wins."""


def bradley_terry(first: ArrayLike, second: ArrayLike, preference: ArrayLike, things: int, ridge: float) -> Values:
    """The scores [things], in log odds, with mean 0 over things that are connected by choices.

    Args:
        first: [n] int, the thing on one side of each choice, 0 <= first < things.
        second: [n] int, that on the other side.
        preference: [n] in 0..1: 1 = the first was preferred, 0.5 = tie.
        ridge: > 0, of ridge / 2 * |u|^2.
    """
    one, other = np.asarray(first, dtype=np.intp), np.asarray(second, dtype=np.intp)
    differences = np.zeros((len(one), things))
    rows = np.arange(len(one))
    # Added, because a thing may be compared with itself.
    np.add.at(differences, (rows, one), 1.0)
    np.add.at(differences, (rows, other), -1.0)
    return logistic_ridge(differences, preference, ridge)


def logistic_ridge(differences: Values, preference: ArrayLike, ridge: float, start: Values | None = None) -> Values:
    """The w [d] that maximises sum_n y_n log s(z_n) + (1 - y_n) log s(-z_n) - ridge / 2 |w|^2 with z = differences @ w.

    That is a Bradley-Terry model whose scores are linear in features, with no constant because swapping the sides must
    swap the probabilities. Newton's method; steps are halved until they do not make it worse, so that it converges from
    anywhere (the function is strictly concave). Raises ValueError for a ridge that is not above 0.
    """
    if not ridge > 0:
        raise ValueError(f"a ridge must be above 0, got {ridge}")
    y = np.asarray(preference, dtype=np.float64)
    w = np.zeros(differences.shape[1]) if start is None else start.copy()
    value = _objective(differences, y, w, ridge)
    for _ in range(ITERATIONS):
        p = logistic(differences @ w)
        gradient = differences.T @ (y - p) - ridge * w
        if np.abs(gradient).max(initial=0.0) < TOLERANCE:
            break
        curvature = (differences * (p * (1 - p))[:, None]).T @ differences + ridge * np.eye(len(w))
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while (after := _objective(differences, y, w + size * step, ridge)) < value and size > 1e-8:
            size /= 2
        if after <= value:  # No further within rounding.
            break
        w, value = w + size * step, after
    return w


def logistic(z: Values) -> Values:
    """1 / (1 + exp(-z)), without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(z / 2)), dtype=np.float64)


def _objective(differences: Values, y: Values, w: Values, ridge: float) -> float:
    z = differences @ w
    # log s(z) = -log(1 + exp(-z)), and log s(-z) = log s(z) - z.
    return float((-np.logaddexp(0.0, -z) - (1 - y) * z).sum() - ridge / 2 * w @ w)
