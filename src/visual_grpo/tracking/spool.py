"""What a run logs, on disk before it is in MLflow: neither a kill nor an absent server loses any of it.

Each process that logs writes into a separate folder, its spool. The folder is removed when everything in it has been
delivered::

    OUTPUT/mlflow_spool/TIME-RUN/
      run.json       which run it is
      journal.jsonl  one event a line, only ever appended to; locked while its process lives
      delivered      how many bytes of the journal are in MLflow
      files/N/       images, adapters and reports of an event; removed once they are in MLflow

``outbox`` reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = "mlflow_spool"
HEAD, JOURNAL, DELIVERED, FILES = "run.json", "journal.jsonl", "delivered", "files"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Which MLflow run a spool belongs to, and how to make it where it is not there yet."""

    run: str
    """The run's id, or its key: a run that could not be made at once gets the key as a tag (`store.KEY`)."""
    name: str
    experiment: str
    artifacts: str | None
    """Where the experiment keeps its artifacts, if it must be made; None = the server's default."""
    server: str
    """As `store.shown_server` shows it: without a password, and independent of the project's place."""
    began: int
    """Milliseconds since 1970."""


class Spool:
    """The spool that this process writes to, from any thread. What does not fit on the disk is lost, never raised."""

    def __init__(self, root: Path, head: Head) -> None:
        """
        Raises:
            OSError: ``root`` cannot be written to.
        """
        self.folder = root / f"{time.time_ns()}-{head.run[:8]}"
        (self.folder / FILES).mkdir(parents=True)
        self._head = head
        self._write_head(head.run)
        self._file = os.open(self.folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._turn = threading.Lock()
        self._size = self._entries = 0
        self._failed = False

    def belongs_to(self, run: str) -> None:
        """Says by what id, instead of a key, the outputs of this process name its run."""
        with contextlib.suppress(OSError):  # The key is still a tag of the run.
            self._write_head(run)

    def append(self, op: str, **arguments: Any) -> None:
        """Writes one event. A kill cannot lose it any more; `flush` makes it survive a power cut too."""
        line = json.dumps({"op": op, "at": int(time.time() * 1000), **arguments}).encode() + b"\n"
        with self._turn:
            try:
                written = os.write(self._file, line)
                if written != len(line):
                    raise OSError(f"only {written} of {len(line)} bytes could be written")
                self._size += written
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)  # Half a line would spoil the next one.
                self._lost(error)

    def attach(self, source: Path) -> str | None:
        """Puts a folder's contents into the spool, as links where the disk has them; returns their place in it."""
        return self._attach(lambda place: shutil.copytree(source, place, copy_function=_link, dirs_exist_ok=True))

    def attach_bytes(self, content: bytes, name: str) -> str | None:
        """Writes ``content`` as the file ``name``, also with folders; returns its place in the spool."""
        return self._attach(lambda place: _write_file(place / name, content))

    def flush(self) -> None:
        """Makes the journal survive a power cut. Takes milliseconds: not for the training's thread."""
        os.fsync(self._file)

    def close(self) -> None:
        """Nothing can be written any more, and others may deliver what is left."""
        os.close(self._file)

    def _write_head(self, run: str) -> None:
        write_whole(self.folder / HEAD, json.dumps(asdict(replace(self._head, run=run)), indent=1))

    def _attach(self, put: Callable[[Path], Any]) -> str | None:
        with self._turn:
            self._entries += 1
            place = f"{FILES}/{self._entries}"
        try:
            (self.folder / place).mkdir()
            put(self.folder / place)
        except OSError as error:
            shutil.rmtree(self.folder / place, ignore_errors=True)
            self._lost(error)
            return None
        return place

    def _lost(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.warning("MLflow will lack what cannot be written to %s: %s. The run goes on.", self.folder, error)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is there whole or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _link(source: str, target: str) -> str:
    """A folder of results is replaced as a whole, never changed in place: a link keeps what was logged."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
