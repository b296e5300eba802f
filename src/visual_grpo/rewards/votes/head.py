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
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, cross_val_predict
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import LUMA, described, require_image
from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.reward import PROMPTS, SAMPLES, CalledByName
from visual_grpo.rewards.votes.choices import Choice

PIXELS = "pixels"
GRID = 4
"""Cells a side of the small copy of a picture."""

Features = Callable[[Sequence[PromptRecord], Sequence[Tensor]], Tensor]
"""(B prompts, B uint8 pictures [3, height, width]) -> [B, d] finite numbers. A row depends on one prompt and picture,
whatever else is in the batch."""


def load_features(name: str) -> Features:
    """Returns the features `PIXELS`, or a ``package.module:function`` with the signature of `Features`."""
    if name == PIXELS:
        return pixel_features
    function = load_attribute(name, "the features of the reward votes")
    call = CalledByName(f"features: {name!r}", function, PROMPTS, SAMPLES)

    def features(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        output = call(prompts, samples)
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

RIDGES = tuple(float(ridge) for ridge in np.geomspace(1000.0, 0.1, 9))
"""Ridge penalties, the strongest first: of equally good ones, the first is taken."""
FOLDS = 5
PICTURE_RIDGE = 0.1
"""Ridge of the pictures' own scores: a normal prior of variance 10, which hardly moves a picture with many choices."""


def bradley_terry(first: ArrayLike, second: ArrayLike, preference: Values, items: int, ridge: float) -> Values:
    """The scores [items], in log odds, with mean 0 over items that are connected by choices.

    ``first`` and ``second``: [n] int, the items of each choice, 0 <= item < items. ``preference``: [n] of 1 (the first
    was preferred), 0 and 0.5 (tie). ``ridge``: > 0, of ridge / 2 * |u|^2.
    """
    one, other = np.asarray(first, dtype=np.intp), np.asarray(second, dtype=np.intp)
    rows, won = _two_rows(np.eye(items)[one] - np.eye(items)[other], preference)
    return np.asarray(_logistic(ridge).fit(rows, won).coef_[0], dtype=np.float64)


def _logistic(ridge: float) -> LogisticRegression:
    """Fits the rows of `_two_rows` without a constant: swapping the sides must swap the probabilities."""
    return LogisticRegression(C=0.5 / ridge, fit_intercept=False, solver="newton-cholesky", tol=1e-10)


def _log_likelihood(fit: LogisticRegression, rows: Values, won: NDArray[np.bool_]) -> float:
    odds = fit.decision_function(rows)
    return -float(np.logaddexp(0, np.where(won, -odds, odds)).sum())


def _two_rows(differences: Values, preference: Values) -> tuple[Values, NDArray[np.bool_]]:
    """[2n, d] and [2n]: both orders of each choice, or a win of each side of a tie, which have half its weight each."""
    swapped = np.where(preference[:, None] == 0.5, differences, -differences)
    return np.concatenate([differences, swapped]), np.concatenate([preference >= 0.5, preference < 0.5])


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
    """Lower end of the 95% interval of ``accuracy`` (Wilson), of groups that are held out together."""
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
    scaler = StandardScaler().fit(pictures)
    ridge, weights, predicted = _cross_validated((first - second) / scaler.scale_, preference, _folds(groups))
    decided = preference != 0.5
    signs = np.sign(predicted[decided]) * np.sign(preference[decided] - 0.5)
    right = (signs + 1) / 2  # 0.5 for a prediction of a tie
    head = Head(
        weights=weights,
        mean=scaler.mean_,
        scale=scaler.scale_,
        ridge=ridge,
        accuracy=float(right.mean()) if len(right) else 0.5,
        low=_low(right, np.array(groups)[decided]),
        decided=len(right),
        choices=len(preference),
        reach=0.0,
    )
    return replace(head, reach=float(head.distance(pictures).max()))


def _low(right: Values, groups: NDArray[np.str_]) -> float:
    """Lower end of Wilson's 95% interval of the mean, counting 0.5 as wrong; 0 without values.

    Choices of one group may agree for no reason that a picture shows. So the cases are groups: as many as Kish's
    effective number of them (Survey Sampling, 1965), which is their number where all are of one size.
    """
    if not len(right):
        return 0.0
    sizes = np.unique(groups, return_counts=True)[1]
    cases = len(right) ** 2 // int((sizes**2).sum())
    interval = binomtest(int((right == 1).sum()) * cases // len(right), cases).proportion_ci(0.95, method="wilson")
    return float(interval.low)


def _folds(groups: Sequence[str]) -> NDArray[np.intp]:
    """[n], 0 <= fold < FOLDS: groups in the order of their hashes, dealt out in turn."""
    order = sorted(set(groups), key=lambda group: hashlib.sha256(group.encode()).digest())
    fold = {group: number % FOLDS for number, group in enumerate(order)}
    return np.array([fold[group] for group in groups], dtype=np.intp)


def _cross_validated(differences: Values, preference: Values, folds: NDArray[np.intp]) -> tuple[float, Values, Values]:
    """The ridge of the greatest held-out likelihood, its weights [d], and held-out predictions [n] in log odds.

    A prediction is by a fit, and a ridge chosen, on the other folds alone (nested cross-validation); 0 with fewer than
    three folds, which cannot be held out twice.
    """
    rows, won = _two_rows(differences, preference)
    if len(set(folds)) < 3:
        return RIDGES[0], _logistic(RIDGES[0]).fit(rows, won).coef_[0], np.zeros(len(preference))
    groups, holding_out = np.tile(folds, 2), LeaveOneGroupOut()
    ridges = {"C": [_logistic(ridge).C for ridge in RIDGES]}
    search = GridSearchCV(_logistic(RIDGES[0]), ridges, scoring=_log_likelihood, cv=holding_out, error_score="raise")
    predicted = cross_val_predict(
        search, rows, won, groups=groups, cv=holding_out, params={"groups": groups}, method="decision_function"
    )
    search.fit(rows, won, groups=groups)
    return RIDGES[search.best_index_], search.best_estimator_.coef_[0], predicted[: len(preference)]


def family_scores(choices: Sequence[Choice]) -> pd.DataFrame:
    """Columns family, picture, choices and score (log odds within the family), the best of each family first."""
    compared = [choice for choice in choices if choice.preference is not None]
    families = dict.fromkeys(choice.of.family for choice in compared)
    frames = [_of_family(family, [choice for choice in compared if choice.of.family == family]) for family in families]
    columns = ["family", "picture", "choices", "score"]
    return pd.concat([pd.DataFrame(columns=columns), *frames], ignore_index=True)


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
