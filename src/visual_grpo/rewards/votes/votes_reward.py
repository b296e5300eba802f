"""The reward that predicts which picture people would choose, and its head, kept as JSON next to the choices."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import file_in, write_atomically
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import PromptRecord, RewardOutput
from visual_grpo.rewards.votes.choices import AB, TIE, Choice, read_choices
from visual_grpo.rewards.votes.head import FOLDS, PIXELS, Head, fit_head, load_features

log = logging.getLogger(__name__)

LEAST = 50
"""Decided pairs: with 61 features and fewer than this the predictions are hardly better than chance."""
FILE = "head.json"
FORMAT = 3
_VECTORS = ("weights", "mean", "scale")


@dataclass(kw_only=True, eq=False)
class VotesReward:
    """Probability, 0..1, that people would choose the picture over the average one that was voted on.

    By a linear head on features of the picture, fitted to choices (`head`): two utilities differ by the log odds of the
    one picture against the other. The utility itself grows without limit where a feature goes far beyond what anybody
    has seen, which a policy finds; the probability levels off there.

    The part ``far`` is 1 where a picture lies further from the average voted one than any that was voted on, in the
    features, else 0: its score, which may be near 0 or 1, is a guess. A warning says so once.

    Args:
        choices: the file that the pipeline ``vote`` writes. The head saved next to it is used if it was fitted to these
            choices; else one is fitted at the first call.
        head: instead of it, a head that was fitted before.
        features: ``pixels`` (null), which needs no weights, or ``package.module:function``; those that a head was
            fitted to.
        least: pairs with a decided choice, however many voters, without which nothing is fitted.
        least_accuracy: share of held-out choices below which the predictions are refused.
    """

    choices: str | None = None
    head: str | None = None
    features: str | None = None
    least: int = LEAST
    least_accuracy: float = 0.55

    def __post_init__(self) -> None:
        if (self.choices is None) == (self.head is None):
            raise UserError(
                "votes needs one of the options choices (a file of the pipeline vote, such as"
                " data/01_raw/votes/choices.jsonl) and head (a head fitted to one)"
            )
        self._has_warned = False

    def check_machine(self) -> None:
        """Raises UserError for a file that is not there, too few choices, or a head that predicts too badly."""
        load_features(self.features or PIXELS)
        if self.choices is None:
            self._checked(read_head(Path(str(self.head))))
            return
        file = Path(self.choices)
        if not file.is_file():
            raise UserError(f"votes: the file of choices {file} does not exist. Choose first.", remedy="vote")
        check_enough(read_choices(file).standing, self.least, file)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        fitted = self._fitted
        features, head = load_features(fitted.features)(prompts, samples).numpy(), fitted.head
        if features.shape[1] != len(head.weights):
            raise UserError(
                f"votes: the head has {len(head.weights)} features, but {fitted.features!r} gives"
                f" {features.shape[1]}: they have changed since the fit. Delete the head to fit it again"
            )
        # One by one: vectorised functions round the last places of a batch by a different formula.
        scores = [0.5 * (1 + math.tanh(u / 2)) for u in head.utility(features).tolist()]
        far = torch.from_numpy(head.distance(features) > head.reach)
        if not self._has_warned and far.float().mean() > 0.5:
            self._has_warned = True
            log.warning(
                "Reward votes: %d of %d pictures are unlike every picture that was voted on (further from their average"
                " than any of them): their scores are guesses. Vote on such pictures too (the pipeline vote). The part"
                " far is their share.",
                *(int(far.sum()), len(far)),
            )
        return RewardOutput(values=torch.tensor(scores, dtype=torch.float64), parts={"far": far.float()})

    @cached_property
    def _fitted(self) -> FittedHead:
        self.check_machine()
        if self.choices is None:
            return read_head(Path(str(self.head)))
        if damaged := read_choices(Path(self.choices)).damaged:
            log.warning("%s of %s cannot be read and are left out: %s", len(damaged), self.choices, damaged[0])
        fitted = self._checked(fitted_head(Path(self.choices), self.features or PIXELS))
        log.info("Reward votes: %s", fitted)
        return fitted

    def _checked(self, fitted: FittedHead) -> FittedHead:
        asked = self.features or PIXELS
        if fitted.features != asked:  # A head may be a stranger's, and its features are code.
            raise UserError(
                f"votes: the head {self.head} was fitted to the features {fitted.features}, not to {asked}. Name those,"
                " if you know the code, with the option features"
            )
        if fitted.pairs < self.least:
            pairs = counted(fitted.pairs, "decided pair")
            raise UserError(f"votes: the head was fitted to {pairs}; at least {self.least} are needed")
        if fitted.head.accuracy < self.least_accuracy:
            raise UserError(
                f"votes: of {counted(fitted.head.decided, 'choice')} that were held out only {fitted.head.accuracy:.0%}"
                f" are predicted, less than least_accuracy {self.least_accuracy:.0%} (guessing: 50%). Choose"
                " more, or give other features.",
                remedy="vote",
            )
        return fitted


@dataclass(frozen=True)
class FittedHead:
    """A head, and what it was fitted to."""

    head: Head
    features: str
    """Argument of `head.load_features`."""
    digest: str
    """Digest of the choices (`choices_digest`)."""
    pairs: int
    """Decided ones (`decided_pairs`)."""

    def __str__(self) -> str:
        head = self.head
        return (
            f"{head.accuracy:.0%} of {counted(head.decided, 'choice')} that were held out are predicted (95% interval"
            f" from {head.low:.0%}), ridge {head.ridge:.3g}"
        )


def usable(choices: Sequence[Choice]) -> list[Choice]:
    """Drops skipped choices, those between identical pictures, and those on held-out prompts, which evaluate the
    training."""
    there = (choice for choice in choices if choice.preference is not None)
    return [choice for choice in there if choice.of.source != AB and not choice.of.is_identical]


def decided_pairs(choices: Sequence[Choice]) -> int:
    """Counts the pairs with a usable choice that is not a tie: further voters show no further pictures."""
    return len({choice.of.pair for choice in usable(choices) if choice.choice != TIE})


def check_enough(choices: Sequence[Choice], least: int, file: Path) -> None:
    """Raises UserError for fewer than ``least`` `decided_pairs`."""
    if (number := decided_pairs(choices)) < least:
        there = f"{file} holds {counted(len(choices), 'choice')}" if choices else f"{file} holds no choices"
        raise UserError(
            f"votes: {there}, with {counted(number, 'decided pair')} for training; at least {least} are needed. Choose"
            " more.",
            remedy="vote",
        )


def choices_digest(choices: Sequence[Choice]) -> str:
    """Returns 12 hex digits of the usable choices, whatever their order."""
    lines = sorted(json.dumps(choice.line(), sort_keys=True) for choice in usable(choices))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def fitted_head(file: Path, features: str) -> FittedHead:
    """The head next to ``file`` if it was fitted to its choices, else a new one. Raises UserError if both fail."""
    choices = read_choices(file).standing
    check_enough(choices, 1, file)
    digest = choices_digest(choices)
    kept = file.with_name(FILE)
    with suppress(UserError):  # It is made again.
        stored = read_head(kept)
        if (stored.digest, stored.features) == (digest, features):
            return stored
    made = FittedHead(_fit(file.parent, usable(choices), features), features, digest, decided_pairs(choices))
    with suppress(OSError):  # Where choices lie that may only be read, it is fitted each time.
        # Numbers are written so that they are read back exactly.
        write_atomically(kept, json.dumps({"format": FORMAT, **asdict(made)}, indent=1, default=np.ndarray.tolist))
    return made


def _fit(folder: Path, choices: Sequence[Choice], features: str) -> Head:
    extract = load_features(features)

    @cache
    def features_of(record: str, prompt: str, family: str, picture: str) -> NDArray[np.float64]:
        prompt_record = PromptRecord(id=record, prompt=prompt, metadata={"family": family})
        return extract([prompt_record], [to_tensor(read_image(file_in(folder, picture)))])[0].numpy()

    def side(name: str) -> NDArray[np.float64]:
        pairs = [choice.of for choice in choices]
        return np.stack([features_of(of.record, of.prompt, of.family, getattr(of, name)) for of in pairs])

    # Held out together: all choices on what is held out together; with too few of those, the choices on a pair.
    groups = [choice.of.unit for choice in choices]
    if len(set(groups)) < FOLDS:
        groups = [choice.of.pair for choice in choices]
    preference = np.array([choice.preference for choice in choices])
    return fit_head(side("first"), side("second"), preference, groups)


def read_head(file: Path) -> FittedHead:
    """Reads what `fitted_head` wrote. Raises UserError if it is missing, damaged or of a different version."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise ValueError(f"format {tree['format']}")
        vectors: dict[str, Any] = {name: np.asarray(tree["head"].pop(name), dtype=np.float64) for name in _VECTORS}
        head = Head(**vectors, **tree["head"])
        if len({(vector.ndim, len(vector)) for vector in vectors.values()}) != 1:
            raise ValueError("its vectors differ in length")
    except FileNotFoundError:
        raise UserError(f"votes: the head {file} does not exist. Fit one.", remedy="vote") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"votes: the head {file} cannot be read ({error}). Delete it to fit it again") from error
    return FittedHead(head, tree["features"], tree["digest"], tree["pairs"])
