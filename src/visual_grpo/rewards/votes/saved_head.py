"""Fits a head to a file of choices and keeps it beside them, as JSON with the digest of what it was fitted to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visual_grpo.errors import UserError, counted
from visual_grpo.files import write_atomically
from visual_grpo.images import read_image, to_tensor
from visual_grpo.rewards.votes.choices import AB, TIE, Choice, read_choices
from visual_grpo.rewards.votes.features import load_features
from visual_grpo.rewards.votes.head import FOLDS, Head, fit_head
from visual_grpo.types import PromptRecord

FILE = "head.json"
FORMAT = 2
_VECTORS = ("weights", "mean", "scale")


@dataclass(frozen=True)
class FittedHead:
    """A head, and what it was fitted to."""

    head: Head
    features: str
    """As `features.load_features` takes it."""
    digest: str
    """Of the choices (`choices_digest`)."""

    def __str__(self) -> str:
        own = self.head
        return (
            f"{own.accuracy:.0%} of {counted(own.decided, 'choice')} that were held out are predicted (95% interval"
            f" from {own.low:.0%}), ridge {own.ridge:.3g}"
        )


def usable(choices: Sequence[Choice]) -> list[Choice]:
    """What a head is fitted to: no skipped ones, and none on held-out prompts, on which the training is judged."""
    return [choice for choice in choices if choice.preference is not None and choice.of.source != AB]


def decided(choices: Sequence[Choice]) -> int:
    """How many of the usable ones are no ties."""
    return sum(choice.choice != TIE for choice in usable(choices))


def check_enough(choices: Sequence[Choice], least: int, file: Path) -> None:
    """Raises UserError where fewer than ``least`` choices between two pictures were decided."""
    number = decided(choices)
    if number < least:
        there = f"{file} holds {counted(len(choices), 'choice')}" if choices else f"{file} holds no choices"
        raise UserError(
            f"votes: {there}, {number} of them decided and for training; at least {least} are needed."
            " Choose more with: kedro run --pipeline=vote"
        )


def choices_digest(choices: Sequence[Choice]) -> str:
    """12 hex digits of the usable choices; another order of the same ones is the same."""
    lines = sorted(json.dumps(choice.line(), sort_keys=True) for choice in usable(choices))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def fitted_head(file: Path, features: str) -> FittedHead:
    """The head for the choices in ``file``: the one that lies beside them if it is of these, else a new one.

    Raises:
        UserError: no choice can be used, or a picture cannot be read.
    """
    choices = read_choices(file).standing
    check_enough(choices, 1, file)
    digest = choices_digest(choices)
    kept = file.with_name(FILE)
    with suppress(UserError):  # It is made again.
        found = read_head(kept)
        if (found.digest, found.features) == (digest, features):
            return found
    made = FittedHead(_fit(file.parent, usable(choices), features), features, digest)
    with suppress(OSError):  # Where choices lie that may only be read, it is fitted each time.
        write_head(kept, made)
    return made


def _fit(folder: Path, choices: Sequence[Choice], features: str) -> Head:
    extract = load_features(features)
    found: dict[tuple[str, str], Any] = {}
    for choice in choices:
        for name in (choice.of.first, choice.of.second):
            if (choice.of.record, name) in found:
                continue
            record = PromptRecord(id=choice.of.record, prompt=choice.of.prompt, metadata={"family": choice.of.family})
            found[choice.of.record, name] = extract([record], [to_tensor(read_image(folder / name))])[0].numpy()
    return fit_head(
        np.stack([found[choice.of.record, choice.of.first] for choice in choices]),
        np.stack([found[choice.of.record, choice.of.second] for choice in choices]),
        np.array([choice.preference for choice in choices]),
        _groups(choices),
    )


def _groups(choices: Sequence[Choice]) -> list[str]:
    """What is held out together: all choices on a prompt; with too few prompts for that, those on a pair."""
    prompts = [choice.of.prompt for choice in choices]
    return prompts if len(set(prompts)) >= FOLDS else [choice.of.pair for choice in choices]


def write_head(file: Path, fitted: FittedHead) -> None:
    """Replaces the file; numbers are written so that they are read back exactly."""
    head = {name: value.tolist() if name in _VECTORS else value for name, value in vars(fitted.head).items()}
    text = json.dumps({"format": FORMAT, **asdict(fitted), "head": head}, indent=1)
    write_atomically(file, text)


def read_head(file: Path) -> FittedHead:
    """What `write_head` wrote.

    Raises:
        UserError: there is none, or it is damaged or of another version.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise ValueError(f"format {tree['format']}")
        vectors: dict[str, Any] = {name: np.asarray(tree["head"].pop(name), dtype=np.float64) for name in _VECTORS}
        head = Head(**vectors, **tree["head"])
        if len({(vector.ndim, len(vector)) for vector in vectors.values()}) != 1:
            raise ValueError("its vectors differ in length")
    except FileNotFoundError:
        raise UserError(f"votes: there is no head {file}. Fit one with: kedro run --pipeline=vote") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"votes: the head {file} cannot be read ({error}). Delete it; it is fitted again") from error
    return FittedHead(head, tree["features"], tree["digest"])
