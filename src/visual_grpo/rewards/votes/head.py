"""A linear utility of pictures that predicts choices between two of them: u(x) = w . (features(x) - mean) / scale.

Bradley & Terry, Rank Analysis of Incomplete Block Designs (Biometrika 39, 1952): i is preferred to j with probability
s(u_i - u_j), where s is the logistic function. A tie counts as half a win of each. A ridge, a normal prior, keeps the
scores finite and sets their free constant: their mean is 0. The ridge of a head is chosen by cross-validation; its
reported accuracy is measured on choices that had no part in the fit, nor any other choice of their group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import described, require_image
from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.guards import LUMA
from visual_grpo.rewards.votes.choices import Choice

PIXELS = "pixels"
GRID = 4
"""Cells a side of the small copy of a picture."""

Features = Callable[[Sequence[PromptRecord], Sequence[Tensor]], Tensor]
"""(B prompts, B uint8 pictures [3, height, width]) -> [B, d] finite numbers. A row depends on one prompt and picture,
whatever else is in the batch."""


def load_features(name: str) -> Features:
    """Returns the features `PIXELS`, or those of a ``package.module:function`` with the signature of `Features`."""
    if name == PIXELS:
        return pixel_features
    function = load_attribute(name, "the features of the reward votes")
    if not callable(function):
        raise UserError(f"features: {name!r} must be a function (prompts, pictures) -> [B, d], it is {function!r}")

    def features(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        output = function(prompts, samples)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(samples):
            raise UserError(f"features: {name!r} must return a tensor [{len(samples)}, d], got {described(output)}")
        output = output.detach().cpu().double()
        if not output.isfinite().all():
            raise UserError(f"features: {name!r} returned numbers that are not finite")
        return output

    return features


def pixel_features(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
    """[B, 61] float64: a small copy, and statistics of colours, luma, chroma and edges."""
    return torch.stack([_picture_features(sample) for sample in samples])


def _picture_features(sample: Tensor) -> Tensor:
    require_image(sample)
    rgb = sample.cpu().double() / 255
    luma = (rgb * torch.tensor(LUMA, dtype=torch.float64)[:, None, None]).sum(0)
    high, low = rgb.amax(0), rgb.amin(0)
    chroma = high - low
    # Not divided by the brightness: the hue of a nearly black pixel is noise.
    spread = [values.std(correction=0) for values in (*rgb, luma, chroma)]
    quantiles = [torch.quantile(values, q) for values in (luma, chroma) for q in (0.1, 0.9)]
    edges = [_mean_difference(luma), _mean_difference(chroma)]
    small = adaptive_avg_pool2d(rgb[None], GRID).flatten()
    return torch.cat([small, torch.stack([luma.mean(), chroma.mean(), *spread, *quantiles, *edges])])


def _mean_difference(values: Tensor) -> Tensor:
    """Mean difference of neighbouring pixels; 0 for a picture of one pixel."""
    down, right = values.diff(dim=0).abs(), values.diff(dim=1).abs()
    return (down.sum() + right.sum()) / max(1, down.numel() + right.numel())


Values = NDArray[np.float64]

ITERATIONS = 100
TOLERANCE = 1e-10
"""Largest component of the gradient at the optimum, in wins."""
RIDGES = tuple(float(ridge) for ridge in np.geomspace(1000.0, 0.1, 9))
"""From the strongest: each fit starts from the one before."""
FOLDS = 5
PICTURE_RIDGE = 0.1
"""Ridge of the pictures' own scores: a normal prior of variance 10, which hardly moves a picture with many choices."""


def bradley_terry(first: ArrayLike, second: ArrayLike, preference: ArrayLike, items: int, ridge: float) -> Values:
    """The scores [items], in log odds, with mean 0 over items that are connected by choices.

    ``first`` and ``second``: [n] int, the items of each choice, 0 <= item < items. ``preference``: [n] in 0..1, 1 = the
    first was preferred, 0.5 = tie. ``ridge``: > 0, of ridge / 2 * |u|^2.
    """
    one, other = np.asarray(first, dtype=np.intp), np.asarray(second, dtype=np.intp)
    return logistic_ridge(np.eye(items)[one] - np.eye(items)[other], preference, ridge)


def logistic_ridge(differences: Values, preference: ArrayLike, ridge: float, start: Values | None = None) -> Values:
    """The w [d] that maximises sum_n y_n log s(z_n) + (1 - y_n) log s(-z_n) - ridge / 2 |w|^2 with z = differences @ w.

    That is a Bradley-Terry model whose scores are linear in features, with no constant because swapping the sides must
    swap the probabilities. Newton's method; steps are halved until they do not make it worse, so that it converges from
    anywhere (the function is strictly concave: ``ridge`` > 0).
    """
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


@dataclass(frozen=True)
class Head:
    """A linear utility and its accuracy."""

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

    ``preference``: as of `bradley_terry`. ``groups``: [n]; choices of one group (a prompt) are held out together.
    """
    pictures = np.concatenate([first, second])
    mean, spread = pictures.mean(0), pictures.std(0)
    # What hardly differs (rounding) would be blown up to noise.
    scale = np.where(spread > 1e-9 * (1 + np.abs(mean)), spread, 1.0)
    differences = (first - second) / scale
    folds = _folds(groups)
    ridge = _best_ridge(differences, preference, folds)
    decided = preference != 0.5
    signs = np.sign(_held_out(differences, preference, folds)[decided]) * np.sign(preference[decided] - 0.5)
    right = (signs + 1) / 2  # 0.5 for a prediction of a tie
    head = Head(
        weights=logistic_ridge(differences, preference, ridge),
        mean=mean,
        scale=scale,
        ridge=ridge,
        accuracy=float(right.mean()) if len(right) else 0.5,
        low=_low(right),
        decided=len(right),
        choices=len(preference),
        reach=0.0,
    )
    return replace(head, reach=float(head.distance(pictures).max()))


def _low(right: Values) -> float:
    """Lower end of Wilson's 95% interval of the mean, counting 0.5 as wrong; 0 without values."""
    if not len(right):
        return 0.0
    interval = binomtest(int((right == 1).sum()), len(right)).proportion_ci(0.95, method="wilson")
    return float(interval.low)


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
    """Returns the ridge with the greatest cross-validated likelihood, the strongest of equal ones."""
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


def family_scores(choices: Sequence[Choice]) -> pd.DataFrame:
    """Columns family, picture, choices and score (log odds within the family), the best of each family first."""
    frames = [
        _of_family(family, [c for c in choices if c.of.family == family and c.preference is not None])
        for family in dict.fromkeys(choice.of.family for choice in choices)
    ]
    columns = ["family", "picture", "choices", "score"]
    return pd.concat([pd.DataFrame(columns=columns), *(frame for frame in frames if len(frame))], ignore_index=True)


def _of_family(family: str, choices: Sequence[Choice]) -> pd.DataFrame:
    pictures = sorted({name for choice in choices for name in (choice.of.first, choice.of.second)})
    place = {name: number for number, name in enumerate(pictures)}
    first = [place[choice.of.first] for choice in choices]
    second = [place[choice.of.second] for choice in choices]
    preference = np.array([choice.preference for choice in choices], dtype=np.float64)
    scores = bradley_terry(first, second, preference, len(pictures), PICTURE_RIDGE)
    table = pd.DataFrame(
        {
            "family": family,
            "picture": pictures,
            "choices": [first.count(number) + second.count(number) for number in range(len(pictures))],
            "score": scores,
        }
    )
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)
