"""Faults of the machine, told as what happened and what to do: memory, disk, permissions, limits, damaged tables."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping

from visual_grpo.config import Parameters
from visual_grpo.errors import chain

PHASE = "phase of the training step: "
"""Begins a note (PEP 678) on an error of a training step."""

_NO_SPACE = ("No space left on device", "disk is full", "Disk quota exceeded")
_LIMITS = ("File too large", "Too many open files", "can't start new thread")
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "Unable to allocate",
    "bad allocation",
    "std::bad_alloc",
)
_NO_MEMORY_WHOLE = ("could not create a primitive", "could not create a memory object")
"""All that oneDNN says, which computes convolutions on the CPU; longer texts that begin so are other errors."""
_KEPT = "Every file that was written completely is intact; what was not saved by then has to be done again"
"""Such as the training steps since the latest checkpoint, where the next one could not be written."""
_GOES_ON = ": it goes on from the newest complete checkpoint, if there is one"
_NOT_A_TABLE = ("Parquet magic bytes not found", "Couldn't deserialize thrift", "Parquet file size is")
_NOT_LOADED = re.compile(r"Failed while loading data from dataset .*?filepath=(?:\w+\()?'([^']+)'")
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def machine_fault(error: BaseException) -> str | None:
    """What to tell the user if memory, disk, permissions, limits or a damaged table are behind ``error``; else None.

    Libraries wrap these errors in their own types, so their texts count too.
    """
    for cause in chain(error):
        if _says_no_memory(cause):
            return "\n".join([f"Out of memory: {_first_line(cause)}", *_advice(error)])
        if isinstance(cause, OSError) and cause.errno in _FORBIDDEN:
            return (
                f"No permission: {cause}. Give this user the right to it (`ls -ld` shows whose it is), or name another."
            )
        if any(said in str(cause) for said in _LIMITS):
            return (
                f"A limit of this process is reached: {_first_line(cause)}\n{_KEPT}. Raise the limit (`ulimit -a`"
                " shows all; -f is the size of a file, -n the number of open files, -u that of threads, -v memory),"
                f" then give the same command, a training with resume=auto{_GOES_ON}."
            )
        if any(said in str(cause) for said in _NO_SPACE):
            return (
                f"The disk is full: {_first_line(cause)}\n"
                f"{_KEPT}: checkpoints and results replace earlier ones only when they are whole. Free some space"
                " (`df -h`; MLflow's deleted runs: `mlflow gc`; folders in data/ that are no longer needed), then give"
                f" the same command, a training with resume=auto{_GOES_ON}."
            )
    return _damaged_file(error)


def _damaged_file(error: BaseException) -> str | None:
    """Of a table, or of whatever Kedro could not load; its own message names no remedy."""
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
    if isinstance(error, MemoryError):
        return True
    from safetensors import SafetensorError

    said = str(error).strip()
    raised_by_libraries = isinstance(error, RuntimeError | OSError | SafetensorError)
    return raised_by_libraries and (any(text in said for text in _NO_MEMORY) or said in _NO_MEMORY_WHOLE)


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
        return _at_least(1, found) | (
            {} if config.policy.gradient_checkpointing else {"policy.gradient_checkpointing": True}
        )
    if phase == "reward":
        return _at_least(2, {"grpo.group_size": config.grpo.group_size // 2})
    batches = dict(_drawing(config))
    if phase is None:
        batches["evaluation.batch_size"] = config.evaluation.batch_size // 2
    return _at_least(1, batches)


def phase_of(error: BaseException) -> str | None:
    """The training step's phase in which the error arose."""
    return next((note.removeprefix(PHASE) for note in _notes(error) if note.startswith(PHASE)), None)


def _drawing(config: Parameters) -> Iterator[tuple[str, int]]:
    for name in ("rollout_batch", "denoise_batch", "decode_batch"):
        yield f"policy.{name}", getattr(config.policy, name) // 2


def _at_least(least: int, values: Mapping[str, int]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value >= least}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _notes(error: BaseException) -> Iterator[str]:
    for cause in chain(error):
        yield from getattr(cause, "__notes__", ())


def _advice(error: BaseException) -> list[str]:
    return [note for note in _notes(error) if not note.startswith(PHASE)]
