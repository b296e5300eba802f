"""Checkpoints of safetensors and JSON that exist whole or not at all, with the sha256 of every file.

A checkpoint is written into a hidden sibling folder, flushed to disk and then renamed: a process killed at any moment
leaves the previous checkpoint in force. A run resumes from the newest one whose files are all as they were written.
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
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.files import file_digest, flush, replace_folder

STATE, FACTS, SUMS = "state.safetensors", "facts.json", "SHA256SUMS"
FILES = (FACTS, STATE)
"""All files of a checkpoint but `SUMS`, which has a line for each, as `sha256sum -c` reads it."""
PREFIX = "step-"
_NAME = re.compile(rf"{PREFIX}(\d+)")


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing or not what was written."""


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Writes the checkpoint of `path_of`, which it returns; keeps the ``keep`` newest."""
    name = path_of(folder, step).name
    folder.mkdir(parents=True, exist_ok=True)
    flush(folder.parent)
    for partial in partials(folder):
        shutil.rmtree(partial)
    partial = folder / f".{name}.partial"
    try:
        _fill(partial, tensors, facts)
        replace_folder(partial, folder / name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(folder)
    remove_old(folder / name, keep)
    return folder / name


def remove_old(written: Path, keep: int) -> None:
    """Keeps the ``keep`` newest checkpoints, and the one just ``written``."""
    for old in checkpoints(written.parent)[keep:]:
        if old.name != written.name:
            shutil.rmtree(old)


def path_of(folder: Path, step: int) -> Path:
    """``folder/step-XXXXXX``, the checkpoint after ``step`` completed steps."""
    return folder / f"{PREFIX}{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, whole or not, the newest first."""
    return sorted((path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def partials(folder: Path) -> list[Path]:
    """What a process was writing when it was killed."""
    return sorted(folder.glob(f".{PREFIX}*.partial"))


def step_of(path: Path) -> int:
    """Returns the number of completed steps, from a checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint")
    return int(found[1])


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint, in a few words; None if all are as they were written."""
    odd = next((name for name in (SUMS, *FILES) if (path / name).exists() and not (path / name).is_file()), None)
    if odd is not None:  # Opening a FIFO would wait for ever.
        return f"{odd} is no file"
    try:
        written = (path / SUMS).read_bytes()
        lines = [_line(path / name) for name in FILES]
    except OSError as error:
        name = Path(error.filename or path).name
        return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    if "".join(lines).encode() == written:
        return None
    differing = [name for name, line in zip(FILES, lines, strict=True) if line.encode() not in written]
    return f"not what was written by its {SUMS}: {', '.join(differing)}" if differing else f"{SUMS} is changed"


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of one checkpoint folder.

    Raises:
        DamagedCheckpointError: a file is not what was written.
    """
    from safetensors.torch import load_file

    found = damage(path)
    if found is not None:
        raise DamagedCheckpointError(f"The checkpoint {path} is damaged: {found}.")
    return load_file(path / STATE), load_facts(path)


def load_facts(path: Path) -> dict[str, Any]:
    """Facts of one checkpoint folder, without its tensors.

    Raises:
        DamagedCheckpointError: they are not what was written.
    """
    try:
        intact = _line(path / FACTS).encode() in (path / SUMS).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"The checkpoint {path} is damaged: {error}.") from error
    if not intact:
        raise DamagedCheckpointError(f"The checkpoint {path} is damaged: {FACTS} is not what was written.")
    facts: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
    return facts


def random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of torch's, Python's and NumPy's own generators, as tensors and as JSON facts.

    The trainer owns its generator; these are the ones that a reward or a library may draw from.
    """
    tensors = {"rng/torch": torch.get_rng_state()}
    for device in range(torch.cuda.device_count()):
        tensors[f"rng/cuda{device}"] = torch.cuda.get_rng_state(device)
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def restore_random_states(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Puts every generator back to what ``random_states`` saw."""
    torch.set_rng_state(tensors["rng/torch"])
    for device in range(torch.cuda.device_count()):
        if f"rng/cuda{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/cuda{device}"], device)
    version, internal, gauss = facts["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(facts["numpy"])


def _fill(partial: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes all files of a checkpoint and flushes them, and the folder that lists them, to disk."""
    from safetensors.torch import save_file

    partial.mkdir()
    # Clones, because safetensors refuses tensors that share memory.
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, partial / STATE)
    # In their order, which is that of the columns of training.csv.
    (partial / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    (partial / SUMS).write_text("".join(_line(partial / name) for name in FILES), encoding="utf-8")
    for file in partial.iterdir():
        flush(file)
    flush(partial)


def _line(file: Path) -> str:
    return f"{file_digest(file)}  {file.name}\n"


DAMAGED, LATER = "damaged-", "later-"
"""Before the names of checkpoints that are not used, and of those after the one that a run went back to."""
Note = Callable[[str], None]


def newest_intact(folder: Path, note: Note) -> Path | None:
    """The newest intact checkpoint in ``folder``, None where there is none at all.

    Damaged ones that are newer are renamed, each with a line in ``note``.

    Raises:
        UserError: there are checkpoints, but none is intact; nothing is renamed then.
    """
    damaged: dict[Path, str] = {}
    for path in checkpoints(folder):
        found = damage(path)
        if found is None:
            _set_damaged_aside(folder, damaged, note)
            return path
        damaged[path] = found
    if damaged:
        raise UserError(_none_intact(folder, damaged))
    return None


def readable_facts(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose facts are intact, with them; changes nothing, and does not look at the tensors."""
    for path in checkpoints(folder):
        try:
            return path, load_facts(path)
        except DamagedCheckpointError:
            continue
    return None


def set_later_aside(path: Path, note: Note) -> None:
    """Renames the checkpoints in the folder of ``path`` that are newer, since a run goes on from ``path``."""
    later = [other for other in checkpoints(path.parent) if step_of(other) > step_of(path)]
    for other in later:
        note(f"{other} is not used; it is now {_renamed(other, LATER).name}")


def _set_damaged_aside(folder: Path, damaged: dict[Path, str], note: Note) -> None:
    for path, found in damaged.items():
        note(f"The checkpoint {path} is damaged ({found}): not used, and renamed to {_renamed(path, DAMAGED).name}")
    for partial in partials(folder):
        shutil.rmtree(partial)
        note(f"{partial} was the half of a checkpoint that a killed run was writing: removed")


def _renamed(path: Path, prefix: str) -> Path:
    number, new = 1, path.with_name(prefix + path.name)
    while new.exists():
        number += 1
        new = path.with_name(f"{prefix}{path.name}-{number}")
    return path.rename(new)


def _none_intact(folder: Path, damaged: dict[Path, str]) -> str:
    shown = "\n".join(f"  {path.name}: {found}" for path, found in damaged.items())
    return (
        f"No checkpoint in {folder} is intact:\n{shown}\nPut a copy of the folder back, name another checkpoint with"
        " resume=FOLDER, or start at step 1 without resume=auto; what is in the folder is then kept in"
        f" {folder.name}.previous."
    )
