"""The data report: accepted and rejected records, reasons for rejections, split sizes, warnings."""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from visual_grpo.common.errors import UserError, counted, visible
from visual_grpo.data.raw import Rejected
from visual_grpo.data.split import FEW_PROMPTS, SPLITS, prompt_key

LISTED = 1000
"""Maximum number of rejected records that are listed individually; all are counted."""
_SHOWN = 5


class DiskCounter:
    """Counts strings by their digests in a temporary SQLite file: those of many records would not fit into memory."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA temp_store = FILE; BEGIN;"
            "CREATE TABLE keys (digest BLOB PRIMARY KEY, seen INTEGER) WITHOUT ROWID"
        )

    def add(self, key: str) -> int:
        """Returns the key's new count, 1 for the first time."""
        seen = self.count(key) + 1
        self._database.execute("REPLACE INTO keys VALUES (?, ?)", (_digest(key), seen))
        return seen

    def count(self, key: str) -> int:
        found = self._database.execute("SELECT seen FROM keys WHERE digest = ?", (_digest(key),)).fetchone()
        return 0 if found is None else int(found[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Report:
    """Collects counts while records are processed; ``strict`` stops at the first rejected record."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._rejections: list[Rejected] = []
        self._reasons: Counter[str] = Counter()
        self._records: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()
        self._seen_prompts = DiskCounter()
        self._targets = self._enlarged = 0
        self.warnings: list[str] = []

    def reject(self, rejection: Rejected) -> None:
        if self._strict:
            raise UserError(f"{rejection} (data.strict stops at the first rejected record)")
        self._reasons[rejection.reason] += 1
        if len(self._rejections) < LISTED:
            self._rejections.append(rejection)

    def accept(self, row: Mapping[str, Any], enlarged: int) -> None:
        """Counts a row of the manifest, of which ``enlarged`` images were smaller than the prepared size."""
        split = row["split"]
        self._records[split] += 1
        self._prompts[split] += self._seen_prompts.add(f"{split}\0{prompt_key(row['prompt'])}") == 1
        self._targets += "target_image" in row
        self._enlarged += enlarged

    def finish(self, shares: Mapping[str, float]) -> dict[str, Any]:
        """The report as JSON-compatible values; ``shares`` are the configured ones of the splits.

        Raises:
            UserError: no usable record, or none to train on.
        """
        accepted, rejected = self._records.total(), self._reasons.total()
        if not accepted:
            raise UserError(nothing_left(self._rejections, rejected))
        if not self._records["train"]:
            others = [split for split, share in shares.items() if share > 0]
            raise UserError(
                f"Of {counted(accepted, 'usable record')} none is left to train on: the splits {', '.join(others)} take"
                f" all. Add records or lower {', '.join(f'data.{split}_share' for split in others)}."
                f"{also_rejected(self._rejections, rejected)}"
            )
        self._warn(shares, accepted)
        listed = [
            {
                "id": one.id,
                "file": one.place.file,
                "line": one.place.line,
                "reason": one.reason,
                "message": one.message,
                "remedy": one.remedy,
            }
            for one in self._rejections
        ]
        return {
            "records": accepted + rejected,
            "accepted": accepted,
            "with_target": self._targets,
            "splits": {split: {"records": self._records[split], "prompts": self._prompts[split]} for split in SPLITS},
            "rejected": {"total": rejected, "by_reason": dict(self._reasons.most_common()), "listed": listed},
            "warnings": [*map(visible, self.warnings)],
        }

    def _warn(self, shares: Mapping[str, float], accepted: int) -> None:
        for split, share in shares.items():
            if share > 0 and not self._records[split]:
                few = f"{counted(accepted, 'record')} in all"
                self.warnings.append(f"the split {split} is empty although its share is {share:.0%}: {few}")
        if 0 < self._prompts["held_out"] < FEW_PROMPTS:
            self.warnings.append(
                f"{counted(self._prompts['held_out'], 'prompt')} in held_out: fewer than {FEW_PROMPTS} are too few to"
                " rely on what an evaluation finds. Add records or raise data.held_out_share"
            )
        if self._enlarged:
            self.warnings.append(f"{counted(self._enlarged, 'image')} smaller than the prepared size: enlarged")


def nothing_left(rejections: Sequence[Rejected], count: int) -> str:
    """Says why no record can be used; ``count`` are rejected, of which the first are given."""
    if not rejections:
        return "There are no records in the data. Add at least one."
    return f"No record can be used.{also_rejected(rejections, count)}"


def also_rejected(rejections: Sequence[Rejected], count: int) -> str:
    """Adds to a message about too few usable records which others there would be."""
    if not rejections:
        return ""
    shown = "".join(f"\n  {rejection}" for rejection in rejections[:_SHOWN])
    more = f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
    return f" {counted(count, 'record')} rejected:{shown}{more}"
