"""Declares what a parameter decides, next to its type; everything that compares two results asks it.

    class GRPOConfig(Strict, decides=Decides.TRAINING):           # All fields of the section ...
        non_finite: Annotated[str, Decides.STOPPING] = "stop"     # ... except those that declare something else.

A field without a declaration decides what its section does, and everything where no section around it declares
anything: then a forgotten declaration costs time, and no result is kept in spite of a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Flag, auto
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel


class Decides(Flag):
    """Kinds of results, and how a parameter changes them."""

    NOTHING = 0
    CONTENT = auto()
    """Files that are read: a provenance has a digest of the content, so names and places do not matter."""
    ASKED = auto()
    """Which samples are generated and judged: their number, their seed, the settings of the controls."""
    SAMPLES = auto()
    """The sample of a prompt and a seed by a given model."""
    SCORES = auto()
    """The score of a given sample."""
    TRAINING = auto()
    """The adapters of each step."""
    STOPPING = auto()
    """The step at which a training ends."""
    JUDGEMENT = auto()
    """Conclusions from given scores: totals, intervals, the verdict."""
    EVERYTHING = CONTENT | ASKED | SAMPLES | SCORES | TRAINING | STOPPING | JUDGEMENT
    ROUNDING = auto()
    """Combined with any other kind: only the last bits of that."""


DEPENDS_ON = {
    "baseline": Decides.ASKED | Decides.SAMPLES | Decides.SCORES,
    "train": Decides.SAMPLES | Decides.SCORES | Decides.TRAINING | Decides.STOPPING,
    "evaluate": Decides.ASKED | Decides.SAMPLES | Decides.SCORES | Decides.JUDGEMENT,
}
"""Kinds that the results of the pipelines depend on, besides the content that they read."""


@cache
def declared(name: str) -> Decides:
    """Returns what the parameter with a dotted name decides, such as ``rewards.ocr.options.top_k``."""
    known, parts = declarations(), name.split(".")
    for pattern, own in known.items():
        wanted = pattern.split(".")
        if len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted)):
            return own
    # A whole section that is null or empty decides what any of its parameters does.
    below = Decides.NOTHING
    for pattern, own in known.items():
        if all(map(fnmatchcase, parts, pattern.split("."))):
            below |= own
    return below & ~Decides.ROUNDING or Decides.EVERYTHING


def decides(name: str, about: Decides, *, rounding: bool = True) -> bool:
    """Returns whether results of the kinds ``about`` depend on a parameter; without ``rounding``, by more than that."""
    own = declared(name)
    return bool(own & about) and (rounding or Decides.ROUNDING not in own)


def is_of_the_command(name: str) -> bool:
    """Returns whether judging an adapter takes a parameter from the present command instead of the training."""
    own, learned = declared(name), Decides.CONTENT | Decides.SAMPLES | Decides.SCORES | Decides.TRAINING
    return bool(own & (Decides.ROUNDING | Decides.ASKED)) or not own & learned


@cache
def declarations() -> dict[str, Decides]:
    """Returns what each parameter decides by its dotted name, in which ``*`` stands for any key."""
    from visual_grpo.config.schema import Parameters  # It imports the sections, which import this.

    return dict(_leaves(Parameters, (), Decides.EVERYTHING))


def _leaves(section: type[BaseModel], path: Sequence[str], inherited: Decides) -> Iterator[tuple[str, Decides]]:
    own = inherited if getattr(section, "decides", None) is None else section.decides  # type: ignore[attr-defined]
    for name, field in section.model_fields.items():
        declared_here = next((part for part in field.metadata if isinstance(part, Decides)), own)
        inner, keys = _section(field.annotation)
        if inner is None:
            yield ".".join((*path, name)), declared_here
        else:
            yield from _leaves(inner, (*path, name, *keys), declared_here)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, tuple[str, ...]]:
    """Returns the section in an annotation, and ``*`` for the keys of a dictionary of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ()
    if get_origin(annotation) is list:  # A list is one value.
        return None, ()
    if get_origin(annotation) is dict:
        return _section(get_args(annotation)[1])[0], ("*",)
    return next((found for part in get_args(annotation) if (found := _section(part))[0]), (None, ()))
