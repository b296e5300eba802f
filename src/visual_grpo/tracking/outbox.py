"""The reader's side of a spool: what is still to be delivered."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from visual_grpo.errors import counted
from visual_grpo.tracking.spool import DELIVERED, FILES, HEAD, JOURNAL, Head, write_whole

Event = dict[str, Any]
"""``op``: what to do; ``at``: when it was logged, in milliseconds since 1970; the rest are its arguments."""

log = logging.getLogger(__name__)


class Outbox:
    """What of one spool is not in MLflow yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = read_head(folder)
        delivered = folder / DELIVERED
        self.offset = int(delivered.read_text()) if delivered.is_file() else 0
        """Bytes of the journal that are in MLflow."""

    def waiting(self) -> Iterator[tuple[int, Event]]:
        """The events not delivered yet, each with the journal's size after it."""
        return _events(self.folder, self.offset)

    def last_time(self) -> int:
        """When the last event was logged, in milliseconds since 1970."""
        return max((event["at"] for _, event in _events(self.folder, 0)), default=self.head.began)

    def delivered(self, offset: int) -> None:
        """Remembers that the journal is in MLflow up to ``offset``."""
        write_whole(self.folder / DELIVERED, str(offset))
        self.offset = offset

    def redirect(self, server: str, artifacts: str | None) -> None:
        """Lets it belong to another server, which has nothing of it.

        Args:
            artifacts: as `Head.artifacts`.
        """
        self.head = replace(self.head, server=server, artifacts=artifacts)
        write_whole(self.folder / HEAD, json.dumps(asdict(self.head)))

    def forget(self, event: Event) -> None:
        """Removes an event's files, which are in MLflow."""
        if "files" in event:
            shutil.rmtree(self.folder / event["files"], ignore_errors=True)

    def remove(self) -> None:
        """Removes the spool, and the folder of spools if it was the last."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def image_bytes(self) -> int:
        """Disk space of the images that wait."""
        return sum(file.stat().st_size for file in (self.folder / FILES).glob("*/images/*"))

    def __str__(self) -> str:
        """What waits, for example ``240 metric values, 3 artifacts``."""
        values = artifacts = others = 0
        for _, event in self.waiting():
            values += len(event.get("values", ()))
            artifacts += "files" in event
            others += not {"files", "values"} & event.keys()
        counts = ((values, "metric value"), (artifacts, "artifact"), (others, "note"))
        return ", ".join(counted(number, what) for number, what in counts if number) or "nothing"


def read_head(folder: Path) -> Head:
    return Head(**json.loads((folder / HEAD).read_text(encoding="utf-8")))


def outboxes(root: Path) -> list[Outbox]:
    """The spools in ``root``, oldest first."""
    found = []
    for folder in sorted(root.glob("*-*")):
        try:
            found.append(Outbox(folder))
        except FileNotFoundError:  # Of a process that is just making or removing it.
            continue
        except (OSError, TypeError, ValueError) as error:
            log.warning("%s is damaged and cannot be delivered to MLflow: %s. Delete it.", folder, error)
    return found


def lock(outbox: Outbox) -> BinaryIO | None:
    """Locks a spool whose process has ended, until the returned file is closed; None while another holds it."""
    try:
        journal = (outbox.folder / JOURNAL).open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        journal.close()
        return None
    return journal


def _events(folder: Path, offset: int) -> Iterator[tuple[int, Event]]:
    """Half a line at the end is of a process that was killed while it wrote; a damaged one is left out."""
    with (folder / JOURNAL).open("rb") as journal:
        journal.seek(offset)
        for line in journal:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                event: Event = json.loads(line)
            except ValueError:
                log.warning("A damaged line of %s is left out of MLflow.", folder / JOURNAL)
                continue
            yield offset, event
