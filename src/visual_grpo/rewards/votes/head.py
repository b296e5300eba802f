"""A linear utility of pictures that predicts choices: u(x) = w . (features(x) - mean) / scale.

Fitted as a Bradley-Terry model with linear scores: a is preferred to b with probability s(u(a) - u(b)). The ridge is
chosen by cross-validation, and what is said of its accuracy is of choices that were in no part of the fit, nor any
other choice of their group (such as the prompt).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from visual_grpo.rewards.votes.bradley_terry import Values, logistic_ridge

RIDGES = tuple(float(ridge) for ridge in np.geomspace(1000.0, 0.1, 9))
"""From the strongest, as the fit of one begins at that of the one before."""
FOLDS = 5


@dataclass(frozen=True)
class Head:
    """The utility, and how well it predicts."""

    weights: Values
    """[d], of standardised features."""
    mean: Values
    """[d], over the pictures that were compared; so the utility of an average one is 0."""
    scale: Values
    """[d], standard deviation over them; 1 where they do not differ."""
    ridge: float
    accuracy: float
    """Share of the decided held-out choices that it predicts; a prediction of neither counts one half."""
    low: float
    """Lower end of the 95% interval of ``accuracy`` (Wilson)."""
    decided: int
    """Choices that the accuracy is of: all but ties and skipped ones."""
    choices: int
    """All that it was fitted to, with ties."""
    reach: float
    """The largest `distance` of a picture that was compared."""

    def utility(self, features: Values) -> Values:
        """[B, d] -> [B], in log odds; row by row, so that it does not depend on the other rows."""
        standard = (features - self.mean) / self.scale
        return np.array([np.dot(row, self.weights) for row in standard])

    def distance(self, features: Values) -> Values:
        """[B, d] -> [B], from the average compared picture: root mean square, over the features, of standard
        deviations."""
        standard = (features - self.mean) / self.scale
        return np.array([np.sqrt(np.dot(row, row) / len(row)) for row in standard])


def fit_head(first: Values, second: Values, preference: Values, groups: Sequence[str]) -> Head:
    """Fits choices between pictures with features ``first`` and ``second``, both [n, d].

    Args:
        preference: [n], 1 = the first, 0 = the second, 0.5 = tie.
        groups: [n]; choices of one group (a prompt) are held out together.
    """
    pictures = np.concatenate([first, second])
    mean, spread = pictures.mean(0), pictures.std(0)
    # What hardly differs (rounding) would be blown up to noise.
    scale = np.where(spread > 1e-9 * (1 + np.abs(mean)), spread, 1.0)
    differences = (first - second) / scale
    folds = _folds(groups)
    ridge = _best_ridge(differences, preference, folds)
    right = _right(_held_out(differences, preference, folds), preference)
    accuracy = float(right.mean()) if len(right) else 0.5
    head = Head(
        weights=logistic_ridge(differences, preference, ridge),
        mean=mean,
        scale=scale,
        ridge=ridge,
        accuracy=accuracy,
        low=_low(right),
        decided=len(right),
        choices=len(preference),
        reach=0.0,
    )
    return replace(head, reach=float(head.distance(pictures).max()))


def _low(right: Values) -> float:
    """Lower end of Wilson's 95% interval of their mean; what is half right counts as wrong. 0 of none."""
    if not len(right):
        return 0.0
    from scipy.stats import binomtest  # Half a second, which `kedro --help` should not pay.

    found = binomtest(int((right == 1).sum()), len(right)).proportion_ci(0.95, method="wilson")
    return float(found.low)


def _folds(groups: Sequence[str]) -> Values:
    """[n], 0 <= fold < FOLDS: groups in the order of their hashes, dealt out in turn."""
    order = sorted(set(groups), key=lambda group: hashlib.sha256(group.encode()).digest())
    fold = {group: number % FOLDS for number, group in enumerate(order)}
    return np.array([fold[group] for group in groups], dtype=np.float64)


def _held_out(differences: Values, preference: Values, folds: Values) -> Values:
    """[n] predictions of each fold by a fit, and a ridge chosen, on the others alone (nested cross-validation)."""
    predicted = np.zeros(len(preference))
    for fold in np.unique(folds):
        inside = folds != fold
        if not inside.any():
            continue
        ridge = _best_ridge(differences[inside], preference[inside], folds[inside])
        predicted[~inside] = differences[~inside] @ logistic_ridge(differences[inside], preference[inside], ridge)
    return predicted


def _best_ridge(differences: Values, preference: Values, folds: Values) -> float:
    """That of the greatest cross-validated likelihood; of equal ones the strongest."""
    likelihood = np.zeros(len(RIDGES))
    for fold in np.unique(folds):
        inside = folds != fold
        weights = np.zeros(differences.shape[1])
        for number, ridge in enumerate(RIDGES):
            if inside.any():
                weights = logistic_ridge(differences[inside], preference[inside], ridge, weights)
            z = differences[~inside] @ weights
            likelihood[number] -= float((np.logaddexp(0.0, -z) + (1 - preference[~inside]) * z).sum())
    return RIDGES[int(likelihood.argmax())]


def _right(predicted: Values, preference: Values) -> Values:
    """[decided] 1 where the prediction is what was chosen, 0.5 where it is neither."""
    decided = preference != 0.5
    signs = np.sign(predicted[decided]) * np.sign(preference[decided] - 0.5)
    return np.asarray((signs + 1) / 2, dtype=np.float64)
