"""Whether one command, at one commit, with one set of parameters, makes a training again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from visual_grpo.computed_with import MEANING, NUMERICS, SOURCES
from visual_grpo.errors import UserError
from visual_grpo.resuming import ROUNDING
from visual_grpo.trained_adapters import ADJUSTED, CHANGES

GPU = "cuda"
_CODE = {"git.commit": "commit", "git.state": "uncommitted changes", SOURCES: MEANING[SOURCES]}


def check_repeatable(folder: Path, facts: Mapping[str, Any]) -> None:
    """Looks at the facts only.

    Args:
        folder: of the adapters.

    Raises:
        UserError: they do not say by which code the adapters were made, or the training was resumed with something
            else than it began with, so that its parts are not those of one training.
    """
    if "git.commit" not in facts or "parameters" not in facts:
        raise UserError(
            f"The training of {folder} cannot be repeated: training.json names no commit, since it was started outside"
            " of a git repository, or by an older version."
        )
    mixed = next(_mixed(facts), None)
    if mixed is not None:
        raise UserError(
            f"The training of {folder} was resumed with other {mixed}, so no single training is the same. One that is"
            " resumed with what it began with can be repeated: train again from step 1 (resume=never)."
        )
    if facts.get("git.state") == "dirty" and not (folder / CHANGES).is_file():
        raise UserError(
            f"The training of {folder} was started with uncommitted changes, and the folder has no {CHANGES} any more."
        )


def processor_of(facts: Mapping[str, Any]) -> str:
    """Kind, instruction set and GPU; runs of older versions did not note it."""
    return str(facts[NUMERICS]).rpartition(", ")[2] if NUMERICS in facts else "not recorded"


def _mixed(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the parts of a resumed training did not share; what only rounds, just of one on a CPU: a GPU rounds
    otherwise each time."""
    for name, meaning in _CODE.items():
        if f"resumed.{name}" in facts:
            values = [str(facts.get(name)), *str(facts[f"resumed.{name}"]).splitlines()]
            yield f"code than it began with ({meaning}: {', '.join(value[:12] for value in values)})"
    on_cpu = not processor_of(facts).startswith(GPU)
    if on_cpu and f"resumed.{NUMERICS}" in facts:
        yield MEANING[NUMERICS]
    for line in str(facts.get(ADJUSTED, "")).splitlines():
        if on_cpu or not any(fnmatchcase(line.partition(":")[0], pattern) for pattern in ROUNDING):
            yield f"parameters than it began with ({line})"
