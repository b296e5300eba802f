"""Which checkpoint of a folder a run goes on from: the newest one whose files are all as they were written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint import LATEST

DAMAGED, LATER = "damaged-", "later-"
"""Before the names of checkpoints that are not used, and of those after the one that a run went back to."""
Note = Callable[[str], None]


def newest_intact(folder: Path, note: Note) -> Path | None:
    """The newest intact checkpoint in ``folder``, None where there is none at all.

    Damaged ones that are newer are renamed, each with a line in ``note``; so is a damaged `LATEST`, which is then
    written again.

    Raises:
        UserError: there are checkpoints, but none is intact; nothing is renamed then.
    """
    damaged: dict[Path, str] = {}
    for path in checkpoint.checkpoints(folder):
        found = checkpoint.damage(path)
        if found is None:
            _set_damaged_aside(folder, damaged, note)
            _check_latest(path, set(damaged), note)
            return path
        damaged[path] = found
    if damaged or (folder / LATEST).exists():
        raise UserError(_none_intact(folder, damaged))
    return None


def readable_facts(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint whose facts are intact, with them; changes nothing, and does not look at the tensors."""
    for path in checkpoint.checkpoints(folder):
        try:
            return path, checkpoint.load_facts(path)
        except checkpoint.DamagedCheckpointError:
            continue
    return None


def set_later_aside(path: Path, note: Note) -> None:
    """Renames the checkpoints in the folder of ``path`` that are newer, since a run goes on from ``path``."""
    later = [
        other for other in checkpoint.checkpoints(path.parent) if checkpoint.step_of(other) > checkpoint.step_of(path)
    ]
    for other in later:
        note(f"{other} is not used; it is now {_renamed(other, LATER).name}")
    if later:
        checkpoint.write_latest(path)


def _set_damaged_aside(folder: Path, damaged: dict[Path, str], note: Note) -> None:
    for path, found in damaged.items():
        note(f"The checkpoint {path} is damaged ({found}): not used, and renamed to {_renamed(path, DAMAGED).name}")
    for partial in checkpoint.partials(folder):
        shutil.rmtree(partial)
        note(f"{partial} was the half of a checkpoint that a killed run was writing: removed")


def _check_latest(newest: Path, renamed: set[Path], note: Note) -> None:
    """Lets `LATEST` name the newest; says so unless a kill before it was written explains what it says."""
    pointer = newest.with_name(LATEST)
    text = pointer.read_bytes() if pointer.is_file() else None
    if text == checkpoint.latest_text(newest).encode():
        return
    named = _named(text)
    if text is None:
        note(f"{pointer} was missing and is written again")
    elif named is not None and named not in {path.name for path in renamed} and not (newest.parent / named).is_dir():
        note(f"{pointer} names the checkpoint {named}, which is not there: using {newest.name}")
    elif not _is_of_another(text, newest) and named not in {path.name for path in renamed}:
        note(f"{pointer} is damaged: renamed to {_renamed(pointer, DAMAGED).name}, and written again")
    checkpoint.write_latest(newest)


def _is_of_another(text: bytes, newest: Path) -> bool:
    """Whether `LATEST` is of an older checkpoint: a run was killed between writing ``newest`` and naming it."""
    older = [path for path in checkpoint.checkpoints(newest.parent) if path != newest and not checkpoint.damage(path)]
    return any(text == checkpoint.latest_text(path).encode() for path in older)


def _named(text: bytes | None) -> str | None:
    """The checkpoint that `LATEST` names; None where it names none."""
    try:
        name = json.loads(text or b"").get("checkpoint")
    except (ValueError, AttributeError):
        return None
    return name if isinstance(name, str) and name.startswith(checkpoint.PREFIX) else None


def _renamed(path: Path, prefix: str) -> Path:
    number, new = 1, path.with_name(prefix + path.name)
    while new.exists():
        number += 1
        new = path.with_name(f"{prefix}{path.name}-{number}")
    return path.rename(new)


def _none_intact(folder: Path, damaged: dict[Path, str]) -> str:
    if damaged:
        what = f"No checkpoint in {folder} is intact:\n" + "\n".join(
            f"  {p.name}: {found}" for p, found in damaged.items()
        )
    else:
        named = _named((folder / LATEST).read_bytes()) or "no checkpoint"
        what = f"{folder / LATEST} names {named}, which is not there, and there is no other checkpoint."
    return (
        f"{what}\nPut a copy of the folder back, name another checkpoint with resume=FOLDER, or start at step 1 without"
        f" resume=auto; what is in the folder is then kept in {folder.name}.previous."
    )
