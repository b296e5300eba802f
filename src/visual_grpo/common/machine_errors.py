"""Recognises errors of the machine: memory, disk, permissions, limits, damaged files."""

from __future__ import annotations

import errno
import re

from visual_grpo.common.errors import UserError, chain

LESS_MEMORY = (
    "Less memory: smaller policy.rollout_batch, policy.denoise_batch, policy.decode_batch (rollout),"
    " grpo.micro_batch_size (update), evaluation.batch_size, data.height and data.width;"
    " policy.gradient_checkpointing=true; model.dtype=bfloat16. The pipeline plan says which batches fit."
)

_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "Unable to allocate", "bad allocation"),
    *("could not create a primitive\n", "could not create a memory object\n"),  # oneDNN, on the CPU.
)
_KINDS = {
    "The disk is full": ("No space left on device", "disk is full", "Disk quota exceeded"),
    "A limit of this process is reached (ulimit -a)": (
        *("File too large", "Too many open files", "can't start new thread"),
    ),
    "A disk or a network folder has failed": ("Input/output error", "Stale file handle"),
}
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MACHINE = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)
_NOT_LOADED = re.compile(r"Failed while loading data from dataset .*?filepath=(?:\w+\()?'([^']+)'")
_NOT_A_TABLE = ("Parquet magic bytes not found", "Couldn't deserialize thrift", "Parquet file size is")


def machine_fault(error: BaseException) -> UserError | None:
    """Returns what to tell if memory, disk, permissions, limits or a damaged file caused ``error``; else None.

    Libraries wrap these errors in their own types, so their texts count too. Where the CPU's or a GPU's memory ran out,
    the remedy is a plan.
    """
    notes = [note for one in chain(error) for note in getattr(one, "__notes__", ())]
    for cause in chain(error):
        if _says_no_memory(cause):
            return UserError("\n".join([f"Out of memory: {_first_line(cause)}", *notes, LESS_MEMORY]), remedy="plan")
        if isinstance(cause, OSError) and cause.errno in _FORBIDDEN:
            return UserError(f"No permission: {cause}")
        for what, texts in _KINDS.items():
            if any(text in str(cause) for text in texts):
                intact = (
                    "Files that were written completely are intact. Then repeat the command, a training with"
                    " resume=auto: it continues from its last checkpoint."
                )
                return UserError("\n".join([f"{what}: {_first_line(cause)}", *notes, intact]))
    return _damaged_file(error)


def is_machine_error(error: BaseException) -> bool:
    """Returns True if the machine, not the file, is why reading failed: memory, open files, a disk."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE)


def _damaged_file(error: BaseException) -> UserError | None:
    """Names the table or data set that could not be loaded, and the pipelines that write it."""
    what = why = None
    for cause in chain(error):
        if match := _NOT_LOADED.search(str(cause)):
            what, why = f"{match[1]} cannot be read", cause.__cause__ or cause
        elif what is None and any(said in str(cause) for said in _NOT_A_TABLE):
            what, why = "A table is damaged", cause
    if why is None:
        return None
    return UserError(
        f"{what}: {_first_line(why)}\nMake it again with the pipeline that wrote it: starter for the base model,"
        " data_preparation for the records, baseline and evaluate for samples and their scores."
    )


def _says_no_memory(error: BaseException) -> bool:
    # SafetensorError is a bare Exception.
    raised_by_libraries = isinstance(error, RuntimeError | OSError) or type(error).__name__ == "SafetensorError"
    said = f"{str(error).strip()}\n"
    return isinstance(error, MemoryError) or (raised_by_libraries and any(text in said for text in _NO_MEMORY))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
