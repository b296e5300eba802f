"""Checkpoints of safetensors and JSON that exist whole or not at all, with the sha256 of every file.

A checkpoint is written into a hidden sibling folder, flushed to disk and then renamed: a process killed at any moment
leaves the previous checkpoint in force. A run resumes from the newest one whose files are all unchanged.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from visual_grpo.common.digests import digest_once
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import flush, fresh_folder, replace_folder

STATE, METADATA, SUMS = "state.safetensors", "facts.json", "SHA256SUMS"
FILES = (METADATA, STATE)
"""All files of a checkpoint but `SUMS`, which has a line for each, as `sha256sum -c` reads it."""
PREFIX = "step-"
_NAME = re.compile(rf"{PREFIX}(\d+)")


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing or not what was written."""


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Writes the checkpoint of `path_of`, which it returns; keeps the ``keep`` newest."""
    written = path_of(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    flush(folder.parent)
    for unfinished in folder.glob(f".{PREFIX}*.draft-*"):  # Of a process that was killed.
        shutil.rmtree(unfinished)
    with fresh_folder(written) as fresh:
        # Clones, because safetensors refuses tensors that share memory.
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, fresh / STATE)
        # In the order of the columns of training.csv.
        (fresh / METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")
        (fresh / SUMS).write_text("".join(_line(fresh / name) for name in FILES), encoding="utf-8")
        for file in fresh.iterdir():
            flush(file)
        flush(fresh)
    flush(folder)
    remove_old(written, keep)
    return written


def remove_old(written: Path, keep: int) -> None:
    """Keeps the ``keep`` newest in the folder of ``written``, and that one."""
    for old in checkpoints(written.parent)[keep:]:
        if old != written:
            shutil.rmtree(old)


def path_of(folder: Path, step: int) -> Path:
    """``folder/step-XXXXXX``, the checkpoint after ``step`` completed steps."""
    return folder / f"{PREFIX}{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, whole or not, the newest first."""
    return sorted((path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def holds_any(folder: Path) -> bool:
    """Returns whether ``folder`` has a checkpoint, including one that `skip_newer` has renamed."""
    return any(not path.name.startswith(".") for path in folder.glob(f"*{PREFIX}*"))  # A dot: it was not finished.


def step_of(path: Path) -> int:
    """Returns the number of completed steps, from a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint")
    return int(match[1])


def damage(path: Path) -> str | None:
    """Says in a few words what is wrong with the files of a checkpoint; None if none has changed since it was written.

    Every file is read once in a process.
    """
    for name in (SUMS, *FILES):
        if not (path / name).is_file():
            return f"{name} is missing"
    written = (path / SUMS).read_bytes()
    lines = {name: _line(path / name).encode() for name in FILES}
    if written == b"".join(lines.values()):
        return None
    changed = [name for name, line in lines.items() if line not in written] or [SUMS]
    return f"changed since it was written: {', '.join(changed)}"


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a checkpoint folder. Raises DamagedCheckpointError if a file is not what was written."""
    metadata = load_metadata(path)
    return load_file(path / STATE), metadata


def load_metadata(path: Path) -> dict[str, Any]:
    """Facts of one checkpoint folder. Raises DamagedCheckpointError if any of its files is not what was written."""
    if fault := damage(path):
        raise DamagedCheckpointError(
            f"The checkpoint {path} is damaged: {fault}. resume={path.parent} takes the newest intact one."
        )
    metadata: dict[str, Any] = json.loads((path / METADATA).read_text(encoding="utf-8"))
    return metadata


def tensors_under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the ``tensors`` whose keys begin with ``name/``, without that prefix."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}


def random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of torch's, Python's and NumPy's own generators, as tensors and as JSON metadata.

    The trainer owns its generator; these are the ones that a reward or a library may use.
    """
    tensors = {"rng/torch": torch.get_rng_state()}
    for device in range(torch.cuda.device_count()):
        tensors[f"rng/cuda{device}"] = torch.cuda.get_rng_state(device)
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def restore_random_states(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Puts every generator back to what ``random_states`` saw."""
    torch.set_rng_state(tensors["rng/torch"])
    for device in range(torch.cuda.device_count()):
        if f"rng/cuda{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/cuda{device}"], device)
    version, internal, gauss = metadata["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(metadata["numpy"])


def newest_intact(folder: Path) -> Path | None:
    """The newest intact checkpoint in ``folder``; None if it has no checkpoint.

    Raises UserError: there are checkpoints, but none is intact.
    """
    paths = checkpoints(folder)
    newest = next((path for path in paths if damage(path) is None), None)
    if newest is None and paths:
        shown = "\n".join(f"  {path.name}: {damage(path)}" for path in paths)
        raise DamagedCheckpointError(
            f"No checkpoint in {folder} is intact:\n{shown}\nPut a copy of the folder back, name a different checkpoint"
            " with resume=FOLDER, or start at step 1 without resume=auto; the present content of the folder is then"
            " kept next to it."
        )
    return newest


def skip_newer(path: Path, note: Callable[[str], None], *, rename: bool) -> None:
    """Says which checkpoints in the folder of ``path`` are newer, and whether they are damaged.

    ``rename``: they become ``damaged-...`` or ``later-...``, since a run goes on in this folder.
    """
    for other in checkpoints(path.parent):
        if step_of(other) <= step_of(path):
            continue
        fault = damage(other)
        aside = other.with_name(("damaged-" if fault else "later-") + other.name)
        if rename:
            replace_folder(other, aside)
        fate = f"; it is now {aside.name}" if rename else ""
        note(f"{other} is {f'damaged ({fault})' if fault else 'newer'} and not used{fate}")


def _line(file: Path) -> str:
    return f"{digest_once(file)}  {file.name}\n"
