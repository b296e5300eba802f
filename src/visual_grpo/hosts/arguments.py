"""The command of rank 0: as it was given, with the number of processes that torchrun has started."""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.cli import parsed
from visual_grpo.errors import UserError
from visual_grpo.hosts.launch import MODULE

PROCESSES = "distributed.processes"
_OPTION = "--params"


def with_processes(arguments: Sequence[str], count: int) -> list[str]:
    """``arguments`` with ``distributed.processes`` among its parameters.

    Raises:
        UserError: it is no ``run``, or asks for another number of processes.
    """
    if not arguments or arguments[0] != "run":
        raise UserError(
            f"python -m {MODULE} takes the word run and the options of kedro run, got"
            f" {' '.join(arguments) or 'nothing'!r}"
        )
    words = list(arguments)
    places = [n for n, word in enumerate(words) if word == _OPTION or word.startswith(f"{_OPTION}=")]
    if not places:
        return [*words, f"{_OPTION}={PROCESSES}={count}"]
    last = places[-1]  # The one that counts for Kedro.
    if words[last] == _OPTION:
        if last + 1 == len(words):
            return words  # Kedro says what is missing.
        last += 1
    name, _, text = words[last].partition("=") if words[last].startswith(f"{_OPTION}=") else ("", "", words[last])
    asked = parsed(text).get("distributed", {}).get("processes", count)
    if asked != count:
        raise UserError(
            f"{PROCESSES} is {asked}, but torchrun has started {count}: leave it out, or start as many (--nnodes times"
            " --nproc-per-node)."
        )
    words[last] = f"{name}{'=' if name else ''}{text},{PROCESSES}={count}"
    return words
