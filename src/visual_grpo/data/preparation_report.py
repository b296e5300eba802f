"""Counts accepted and rejected records, and words what a user should know of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from visual_grpo.common.errors import UserError, counted, sanitize
from visual_grpo.config import DataConfig, Task
from visual_grpo.data.found import CLOSED
from visual_grpo.data.manifest import FEW_PROMPTS, prompt_hash
from visual_grpo.data.record import Note, Place, Rejected
from visual_grpo.data.splits import HELD_OUT, SEALED, SPLITS, fewest

_MAX_LISTED = 1000
"""Rejected records that are listed individually; all are counted."""
_MAX_SHOWN = 5
"""Rejected records in a message."""
_UNITS: Mapping[Task, str] = {"segmentation": "image", "i2i": "edit"}
"""Task -> what the records of a group share, if it is not the prompt."""
_ADVISED = 0.25
"""Largest held-out share that is advised."""


class Report:
    """Counts accepted and rejected records, by split and reason."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
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
        """Groups that share a picture with a different group."""
        self.groups = 0
        """Groups of which a share is held out."""
        self._held_out: set[str] = set()
        """Groups of records that are held out together: an evaluation's independent units."""
        self._notes: dict[tuple[str, str], tuple[int, Place]] = {}
        """Kind and text -> their number and the first place."""
        self._example = ""
        """The first prompt."""
        self.warnings: list[str] = []

    def reject(self, rejection: Rejected) -> None:
        if self._config.strict:
            raise UserError(f"{rejection} (data.strict stops at the first rejected record)")
        self.reasons[rejection.reason] += 1
        if len(self.rejections) < _MAX_LISTED:
            self.rejections.append(rejection)

    def note(self, note: Note) -> None:
        count, first = self._notes.get((note.kind, note.text), (0, note.place))
        self._notes[note.kind, note.text] = (count + 1, first)

    def accept(self, row: Mapping[str, Any]) -> None:
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
            raise UserError(none_to_train_on(accepted, self._config) + also_rejected(self.rejections, rejected))
        self._warn(accepted)
        if not self._pictures and (unread := _unread(found["unread"], bool(found["columns"]), self._config)):
            self.warnings.append(unread)
        if closed := found["files"]["ignored"].get(CLOSED):
            first = found["unread"]["folders"][0]
            self.warnings.append(f"{counted(closed, 'folder')} (such as {first}) cannot be opened: check permissions")
        listed = [
            {"id": one.id, **asdict(one.place), "reason": one.reason, "message": one.message, "remedy": one.remedy}
            for one in self.rejections
        ]
        return {
            **found,
            "unread": {kind: names[:_MAX_LISTED] for kind, names in found["unread"].items()},
            "records": accepted + rejected,
            "accepted": accepted,
            "example": sanitize(self._example),
            "sources": {str(number): self._sources[number] for number in sorted(self._sources)},
            "splits": {name: {"records": self._records[name], "prompts": len(self._prompts[name])} for name in SPLITS},
            "eval_prompts_in_train": len(self._prompts["eval"] & self._prompts["train"]),
            "rejected": {"total": rejected, "by_reason": dict(self.reasons.most_common()), "listed": listed},
            "warnings": [*map(sanitize, self.warnings)],
        }

    def _warn(self, accepted: int) -> None:
        config = self._config
        few = few_held_out(self._records, len(self._held_out), self.groups, config)
        if few is not None and (config.held_out_split or config.held_out_share > 0):  # Who wants none need not be told.
            self.warnings.append(few)
        elif config.eval_share > 0 and not self._records["eval"]:
            self.warnings.append(f"the split eval is empty: {counted(accepted, 'record')} in all")
        if config.sealed_share > 0 and not self._records[SEALED]:
            self.warnings.append(f"the split sealed is empty: {counted(accepted, 'record')} in all")
        if self.joined:
            unit, shares = _unit(config), "shares" if self.joined == 1 else "share"
            shared = f"{counted(self.joined, unit)} {shares} a picture with a different {unit}"
            self.warnings.append(f"{shared}: they are held out together or not at all")
        for (kind, text), (count, place) in self._notes.items():
            self.warnings.append(f"{counted(count, kind)} (such as {place}) {text}")


def _unread(unread: Mapping[str, Sequence[str]], is_table: bool, config: DataConfig) -> str | None:
    """Says what pictures and videos there are where no record has any; None if there are none."""
    kinds = [kind for kind in ("picture", "video") if unread[f"{kind}s"]]
    counts = [f"{counted(len(names := unread[f'{kind}s']), kind)} (such as {names[0]})" for kind in kinds]
    if columns := unread["columns"]:
        names = f"{' and '.join(columns)} {'names' if len(columns) == 1 else 'name'} some that cannot be read"
        remedy = f"{names}: paths are relative to the table, and URLs are not fetched"
    elif kinds == ["video"] and config.frames is None:
        remedy = "videos are read where data.frames says how many frames they have"
    elif is_table:
        remedy = "if a column names them, their paths must be relative to the table (data.columns.target=NAME names it)"
    else:
        remedy = "if each has a text of its name, data.layout=captions reads those"
    if not columns and (not counts or config.path.endswith(".txt")):  # A list of prompts that is named is all the data.
        return None
    found = f", and the data have {' and '.join(counts)}" if counts else ""
    return f"no record has a picture{found}: {remedy}"


def few_held_out(records: Mapping[str, int], held_out: int, groups: int, config: DataConfig) -> str | None:
    """Says what the splits are where too few groups are held out to judge a gain; None if there are enough.

    ``records`` are counted by split; ``held_out`` groups are held out of ``groups``.
    """
    if held_out >= FEW_PROMPTS:
        return None
    share, unit = 0.0 if config.held_out_split else config.held_out_share, _unit(config)
    advice = f"Add records with other {unit}s"
    if held_out:
        why = f"Fewer than {FEW_PROMPTS} independent {unit}s are held out: too few to judge a gain"
        if share > 0 and _ADVISED * groups >= FEW_PROMPTS:
            advice += ", or raise data.held_out_share"
    elif share > 0:
        needed = f" (at least {fewest(share)} are needed)" * (groups < fewest(share))
        found = f"{counted(groups, f'independent {unit}')} {'is' if groups == 1 else 'are'}"
        why = f"{found} too few to hold any out{needed}, so nothing can judge a gain"
    elif config.held_out_split:
        why = f"No record of the split {config.held_out_split} is usable, so nothing can judge a gain"
    else:
        why, advice = "data.held_out_share is 0, so nothing can judge a gain", ""
    counts = {split: records[split] for split in SPLITS if split != SEALED or records[split]}
    listed = ", ".join(f"{count} {split.replace('_', ' ')}" for split, count in counts.items())
    return ". ".join(filter(None, (f"{counted(sum(counts.values()), 'record')}: {listed}", why, advice)))


def none_to_train_on(accepted: int, config: DataConfig) -> str:
    """Returns why no record is left to train on: shares leave at least one."""
    return (
        f"Of {counted(accepted, 'usable record')} none is left to train on: all are in data.held_out_split"
        f" ({config.held_out_split}), or share a prompt or a picture with it. Add records to a different split, or name"
        " one that has some with data.split."
    )


def _unit(config: DataConfig) -> str:
    return _UNITS.get(config.task, "prompt")


def no_records_left(rejections: Sequence[Rejected], count: int) -> str:
    """Returns why no record can be used; ``count`` are rejected, of which the first are given."""
    no_records = "The data have no records. Add at least one."
    return f"No record can be used.{also_rejected(rejections, count)}" if rejections else no_records


def also_rejected(rejections: Sequence[Rejected], count: int) -> str:
    """Returns an addition to a message about too few usable records, with the rejected ones."""
    if not rejections:
        return ""
    shown = "".join(f"\n  {rejection}" for rejection in rejections[:_MAX_SHOWN])
    more = f"\n  and {count - _MAX_SHOWN} more" if count > _MAX_SHOWN else ""
    return f" {counted(count, 'record')} rejected:{shown}{more}"
