"""The data report: accepted and rejected records, reasons for rejections, split sizes, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from visual_grpo.errors import UserError, counted, visible
from visual_grpo.records.on_disk import DiskCounter
from visual_grpo.records.raw import Rejected
from visual_grpo.records.split import FEW_PROMPTS, SEALED, SPLITS, prompt_key

LISTED = 1000
"""Maximum number of rejected records that are listed individually; all are counted."""
LONG_PROMPT = 1000
"""Characters; a step costs memory and time for its longest prompt."""
_SHOWN = 5


class Report:
    """Collects counts while records are processed, in bounded memory.

    Args:
        strict: stop at the first rejected record.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._rejections: list[Rejected] = []
        self._reasons: Counter[str] = Counter()
        self._records: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()
        self._seen_prompts = DiskCounter()
        self._targets = self._enlarged = self._long = self._longest = 0
        self._warnings: list[str] = []

    def reject(self, rejection: Rejected) -> None:
        """Counts a rejected record; raises a UserError if ``strict`` is on."""
        if self._strict:
            raise UserError(f"{rejection} (data.strict stops at the first rejected record)")
        self._reasons[rejection.reason] += 1
        if len(self._rejections) < LISTED:
            self._rejections.append(rejection)

    def accept(self, *, split: str, prompt: str, has_target: bool, enlarged: int) -> None:
        """Counts a prepared record, of which ``enlarged`` images were smaller than the prepared size."""
        self._records[split] += 1
        self._prompts[split] += self._seen_prompts.add(f"{split}\0{prompt_key(prompt)}") == 1
        self._targets += has_target
        self._enlarged += enlarged
        self._long += len(prompt) > LONG_PROMPT
        self._longest = max(self._longest, len(prompt))

    def warn(self, text: str) -> None:
        self._warnings.append(visible(text))

    def finish(self, shares: dict[str, float]) -> None:
        """Completes the report after the last record; ``shares`` are the configured ones of the splits.

        Raises:
            UserError: no usable record, or none to train on.
        """
        accepted = self._records.total()
        if not accepted:
            raise UserError(nothing_left(self._rejections, self._reasons.total()))
        if not self._records["train"]:
            others = [split for split in SPLITS if split in shares and (split != SEALED or shares[split] > 0)]
            are_all = "The only usable record is" if accepted == 1 else f"All {accepted} usable records are"
            raise UserError(
                f"{are_all} in the splits {_listed(others, 'or')}, none is left to train on."
                f" Add records or lower {_listed([f'data.{split}_share' for split in others], 'and')}."
                f"{also_rejected(self._rejections, self._reasons.total())}"
            )
        for split, share in shares.items():
            if share > 0 and not self._records[split]:
                few = are_too_few(accepted, "record")
                self.warn(f"the split {split} is empty although its share is {share:.0%}: {few}")
        if 0 < self._prompts["held_out"] < FEW_PROMPTS:
            self.warn(
                f"{counted(self._prompts['held_out'], 'prompt')} in held_out: fewer than {FEW_PROMPTS} are too few to"
                " rely on what an evaluation finds. Add records or raise data.held_out_share"
            )
        if self._long:
            self.warn(
                f"{counted(self._long, 'prompt')} of more than {LONG_PROMPT} characters (the longest {self._longest}):"
                " a model that reads them whole needs many times the memory and time for a step with one of them."
                " Shorten them"
            )
        if self._enlarged:
            self.warn(f"{counted(self._enlarged, 'image')} smaller than the prepared size: enlarged")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        accepted, rejected = self._records.total(), self._reasons.total()
        return {
            "records": accepted + rejected,
            "accepted": accepted,
            "with_target": self._targets,
            "splits": {split: {"records": self._records[split], "prompts": self._prompts[split]} for split in SPLITS},
            "rejected": {
                "total": rejected,
                "by_reason": dict(self._reasons.most_common()),
                "listed": [rejection.as_dict() for rejection in self._rejections],
            },
            "warnings": self._warnings,
        }


def nothing_left(rejections: Sequence[Rejected], count: int) -> str:
    """Says why no record can be used; ``count`` are rejected, of which the first are given."""
    if not rejections:
        return "There are no records in the data. Add at least one."
    all_of_them = "The only record was" if count == 1 else f"All {count} records were"
    return f"{all_of_them} rejected:{_first_of(rejections, count)}"


def also_rejected(rejections: Sequence[Rejected], count: int) -> str:
    """To add to a message about too few usable records: which others there would be; "" where none was rejected."""
    if not rejections:
        return ""
    were = "was" if count == 1 else "were"
    return f" {counted(count, 'other record')} {were} rejected:{_first_of(rejections, count)}"


def are_too_few(number: int, what: str) -> str:
    """``1 record is too few``, ``2 records are too few``."""
    return f"{counted(number, what)} {'is' if number == 1 else 'are'} too few"


def _first_of(rejections: Sequence[Rejected], count: int) -> str:
    shown = "".join(f"\n  {rejection}" for rejection in rejections[:_SHOWN])
    more = count - min(_SHOWN, len(rejections))
    return shown + (f"\n  and {more} more" if more else "")


def _listed(names: Sequence[str], word: str) -> str:
    """``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last
