"""Faults of the machine, told in one line before the library's own words: memory, disk, permissions, limits."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping

from visual_grpo.config import Parameters
from visual_grpo.errors import chain

PHASE = "phase of the training step: "
"""Begins a note (PEP 678) on an error of a training step."""

_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "Unable to allocate", "bad allocation"),
    *("could not create a primitive\n", "could not create a memory object\n"),  # oneDNN, on the CPU.
)
_KINDS = {
    "The disk is full": ("No space left on device", "disk is full", "Disk quota exceeded"),
    "A limit of this process is reached (ulimit -a)": (
        *("File too large", "Too many open files", "can't start new thread"),
    ),
}
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_LOADED = re.compile(r"Failed while loading data from dataset .*?filepath=(?:\w+\()?'([^']+)'")
_NOT_A_TABLE = ("Parquet magic bytes not found", "Couldn't deserialize thrift", "Parquet file size is")


def machine_fault(error: BaseException) -> str | None:
    """What to tell the user if memory, disk, permissions, limits or a damaged file are behind ``error``; else None.

    Libraries wrap these errors in their own types, so their texts count too.
    """
    for cause in chain(error):
        if _says_no_memory(cause):
            advice = [note for note in _notes(error) if not note.startswith(PHASE)]
            return "\n".join([f"Out of memory: {_first_line(cause)}", *advice])
        if isinstance(cause, OSError) and cause.errno in _FORBIDDEN:
            return f"No permission: {cause}"
        for what, texts in _KINDS.items():
            if any(text in str(cause) for text in texts):
                return (
                    f"{what}: {_first_line(cause)}\nWhat was written completely is intact. Then give the same command,"
                    " a training with resume=auto: it goes on from its last checkpoint."
                )
    return _damaged_file(error)


def _damaged_file(error: BaseException) -> str | None:
    """Names a table, or whatever Kedro could not load, and who writes it."""
    what = why = None
    for cause in chain(error):
        if found := _NOT_LOADED.search(str(cause)):
            what, why = f"{found[1]} cannot be read", cause.__cause__ or cause
        elif what is None and any(said in str(cause) for said in _NOT_A_TABLE):
            what, why = "A table is damaged", cause
    if why is None:
        return None
    return (
        f"{what}: {_first_line(why)}\nMake it again with the pipeline that wrote it: starter for the base model,"
        " data_preparation for the records, baseline and evaluate for samples and their scores."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the CPU's or a GPU's memory ran out: ``error`` or one of its causes says so."""
    return any(_says_no_memory(cause) for cause in chain(error))


def _says_no_memory(error: BaseException) -> bool:
    # SafetensorError is a bare Exception.
    raised_by_libraries = isinstance(error, RuntimeError | OSError) or type(error).__name__ == "SafetensorError"
    said = f"{str(error).strip()}\n"
    return isinstance(error, MemoryError) or (raised_by_libraries and any(text in said for text in _NO_MEMORY))


def smaller(config: Parameters, phase: str | None) -> dict[str, object]:
    """Parameters that need less memory: name -> value to try.

    Args:
        phase: of the training step (rollout, reward, update); None where samples are drawn for an evaluation.
    """
    if phase == "update":
        rows = config.grpo.micro_batch_size or config.grpo.prompts_per_step * config.grpo.group_size
        found = {"grpo.micro_batch_size": rows // 2}
        found |= {
            f"modules.{name}.micro_batch_size": own.micro_batch_size // 2
            for name, own in config.modules.items()
            if own.micro_batch_size is not None
        }
        checkpointing = {} if config.policy.gradient_checkpointing else {"policy.gradient_checkpointing": True}
        return _at_least(1, found) | checkpointing
    if phase == "reward":
        return _at_least(2, {"grpo.group_size": config.grpo.group_size // 2})
    names = ("rollout_batch", "denoise_batch", "decode_batch")
    batches = {f"policy.{name}": getattr(config.policy, name) // 2 for name in names}
    if phase is None:
        batches["evaluation.batch_size"] = config.evaluation.batch_size // 2
    return _at_least(1, batches)


def phase_of(error: BaseException) -> str | None:
    """The training step's phase in which the error arose."""
    return next((note.removeprefix(PHASE) for note in _notes(error) if note.startswith(PHASE)), None)


def _at_least(least: int, values: Mapping[str, int]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value >= least}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _notes(error: BaseException) -> Iterator[str]:
    for cause in chain(error):
        yield from getattr(cause, "__notes__", ())
