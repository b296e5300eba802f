"""The secret by which the processes know each other: from the environment, or made where all are on one machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.hosts.launch import SECRET, Launch

_SHORTEST = 16
"""Characters: nobody guesses so many."""
_FILE = "visual-grpo-secret"


def given_secret(launch: Launch, environment: MutableMapping[str, str]) -> bytes | None:
    """What the user has set, which is taken out of ``environment``, so that no program started later sees it.

    None = none is needed: all processes are on this machine.

    Raises:
        UserError: it is needed, or too short.
    """
    found = environment.pop(SECRET, "").strip()
    if not found and launch.on_one_host:
        return None
    make = f"Make one, the same for all hosts: export {SECRET}=$(openssl rand -hex 32)"
    if not found:
        raise UserError(
            f"{SECRET} is not set, but the processes are on several hosts: whoever reaches rank 0 could join. {make}"
        )
    if len(found) < _SHORTEST:
        raise UserError(
            f"{SECRET} has {len(found)} characters; expected {_SHORTEST} or more, so that nobody guesses it. {make}"
        )
    return found.encode()


def made_secret(launch: Launch) -> bytes:
    """Of rank 0: a new one, left for the others in a file that nobody else may read."""
    made = secrets.token_hex()
    file = _file(launch)
    draft = file.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(made)
    draft.replace(file)
    return made.encode()


def found_secret(launch: Launch) -> bytes:
    """What rank 0 has made; raises OSError where it has not yet."""
    text = _file(launch).read_text(encoding="ascii")
    return text.encode()


def _file(launch: Launch) -> Path:
    """Raises UserError where others could read, or replace, what lies there."""
    folder = launch.folder
    # torchrun makes the folder above with tempfile.mkdtemp, and one for each attempt in it.
    facts = folder.parent.stat() if folder is not None else None
    if folder is None or facts is None or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise UserError(
            f"torchrun's folder of logs is no place for a secret: {folder}. Set one yourself: export"
            f" {SECRET}=$(openssl rand -hex 32)"
        )
    return folder / _FILE
