"""Counts accepted and rejected records, and words what a user should know of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from visual_grpo.common.errors import UserError, counted, sanitize
from visual_grpo.config import DataConfig
from visual_grpo.data.found import UNNAMED
from visual_grpo.data.manifest import FEW_PROMPTS, prompt_hash
from visual_grpo.data.record import Note, Place, Rejected
from visual_grpo.data.splits import HELD_OUT, SEALED, SPLITS

_MAX_LISTED = 1000
"""Rejected records that are listed individually; all are counted."""
_MAX_SHOWN = 5
"""Rejected records in a message."""


class Report:
    """Counts accepted and rejected records, by split and reason."""

    def __init__(self, config: DataConfig) -> None:
        self._strict = config.strict
        held_out = 0.0 if config.held_out_split else config.held_out_share
        self._shares = {"eval": config.eval_share, "held_out": held_out, SEALED: config.sealed_share}
        self.rejections: list[Rejected] = []
        self.reasons: Counter[str] = Counter()
        self._records: Counter[str] = Counter()
        self._prompts: dict[str, set[str]] = {split: set() for split in SPLITS}
        """Hashes of the prompts in each split."""
        self._sources: Counter[int] = Counter()
        """Number of source images -> records that have so many."""
        self._pictures = 0
        """Records with a picture."""
        self.joined = 0
        """Groups that share a picture with another."""
        self._held_out: set[str] = set()
        """Groups of records that are held out together: an evaluation's independent units."""
        self._unit = {"segmentation": "image", "i2i": "edit"}.get(config.task, "prompt")
        self._notes: dict[tuple[str, str], tuple[int, Place]] = {}
        """Kind and text -> their number and the first place."""
        self._example = ""
        """The first prompt."""
        self.warnings: list[str] = []

    def reject(self, rejection: Rejected) -> None:
        if self._strict:
            raise UserError(f"{rejection} (data.strict stops at the first rejected record)")
        self.reasons[rejection.reason] += 1
        if len(self.rejections) < _MAX_LISTED:
            self.rejections.append(rejection)

    def note(self, note: Note) -> None:
        count, first = self._notes.get((note.kind, note.text), (0, note.place))
        self._notes[note.kind, note.text] = (count + 1, first)

    def accept(self, row: Mapping[str, Any]) -> None:
        """Counts a row of the manifest."""
        self._records[row["split"]] += 1
        self._sources[len(row["source_images"] or ())] += 1
        self._pictures += row["target_image"] is not None or bool(row["source_images"])
        self._prompts[row["split"]].add(prompt_hash(row["prompt"]))
        self._example = self._example or row["prompt"]
        if row["split"] == HELD_OUT:
            self._held_out.add(row["split_group"])

    def finish(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the report with what was ``found`` (`Found.finish`) as JSON-compatible values. Raises UserError where
        no record is usable, or none is left to train on."""
        accepted, rejected = self._records.total(), self.reasons.total()
        if not accepted:
            raise UserError(no_records_left(self.rejections, rejected))
        if not self._records["train"]:
            others = [split for split, share in self._shares.items() if share > 0 and self._records[split]]
            shares = (
                f": the splits {', '.join(others)} take all. Add records or lower"
                f" {', '.join(f'data.{split}_share' for split in others)}"
            )
            raise UserError(
                f"Of {counted(accepted, 'usable record')} none is left to train on{shares * bool(others)}."
                f"{also_rejected(self.rejections, rejected)}"
            )
        self._warn(accepted)
        if not self._pictures and (unused := found["files"]["ignored"].get(UNNAMED)):
            remedy = (
                "if a column names them, their paths must be relative to the table (data.columns.target=NAME names the"
                " column)"
                if found["columns"]
                else "if each has a text of its name, data.layout=captions reads those"
            )
            self.warnings.append(f"no record has a picture, and there are {counted(unused, 'picture')}: {remedy}")
        listed = [
            {"id": one.id, **asdict(one.place), "reason": one.reason, "message": one.message, "remedy": one.remedy}
            for one in self.rejections
        ]
        return {
            **found,
            "records": accepted + rejected,
            "accepted": accepted,
            "example": sanitize(self._example),
            "sources": {str(number): self._sources[number] for number in sorted(self._sources)},
            "splits": {name: {"records": self._records[name], "prompts": len(self._prompts[name])} for name in SPLITS},
            "rejected": {"total": rejected, "by_reason": dict(self.reasons.most_common()), "listed": listed},
            "warnings": [*map(sanitize, self.warnings)],
        }

    def _warn(self, accepted: int) -> None:
        for split, share in self._shares.items():
            if share > 0 and not self._records[split]:
                warning = f"the split {split} is empty although its share is {share:.3g}"
                self.warnings.append(f"{warning}: {counted(accepted, 'record')} in all")
        raise_share = " or raise data.held_out_share" if self._shares[HELD_OUT] > 0 else ""
        if 0 < len(self._held_out) < FEW_PROMPTS:
            self.warnings.append(
                f"{counted(len(self._held_out), f'independent {self._unit}')} in held_out: fewer than {FEW_PROMPTS} are"
                f" too few to rely on what an evaluation finds. Add records{raise_share}"
            )
        if self.joined:
            shared = f"{counted(self.joined, self._unit)} with a picture of another one"
            self.warnings.append(f"{shared}: they are held out together or not at all")
        for (kind, text), (count, place) in self._notes.items():
            self.warnings.append(f"{counted(count, kind)} (such as {place}) {text}")


def no_records_left(rejections: Sequence[Rejected], count: int) -> str:
    """Returns why no record can be used; ``count`` are rejected, of which the first are given."""
    no_records = "There are no records in the data. Add at least one."
    return f"No record can be used.{also_rejected(rejections, count)}" if rejections else no_records


def also_rejected(rejections: Sequence[Rejected], count: int) -> str:
    """Returns an addition to a message about too few usable records, with the rejected ones."""
    if not rejections:
        return ""
    shown = "".join(f"\n  {rejection}" for rejection in rejections[:_MAX_SHOWN])
    more = f"\n  and {count - _MAX_SHOWN} more" if count > _MAX_SHOWN else ""
    return f" {counted(count, 'record')} rejected:{shown}{more}"
