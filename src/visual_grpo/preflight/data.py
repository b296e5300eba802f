"""Looks at the user's own records before they are prepared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from visual_grpo.config import DataConfig, Task
from visual_grpo.errors import counted
from visual_grpo.preflight.reward import Traits
from visual_grpo.records.checks import as_prompt, group_key, survey
from visual_grpo.records.detect import EMBEDDING, Found, find_records
from visual_grpo.records.image_store import sha256_of
from visual_grpo.records.raw import RawRecord, Rejected
from visual_grpo.records.report import also_rejected, nothing_left
from visual_grpo.records.split import OPEN, SPLITS, Splitter
from visual_grpo.types import PromptRecord

OF_A_RECORD: tuple[Task, ...] = ("t2i", "i2i", "segmentation")
"""The tasks that a single record can be of."""
_KEPT = 10_000
"""Records that rewards look at before the run; the nodes look at all."""
MOST = 200
"""Records from which the default shares leave no split empty: 0.9 to the power of 200 is 1e-9. Also the most records
that are read of a layout whose images are decoded as they are read."""


@dataclass
class Findings:
    """Facts about the records, and problems."""

    traits: Traits
    sample: list[PromptRecord] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    """The first."""
    rejections: int = 0
    problems: list[str] = field(default_factory=list)
    added: dict[str, Any] = field(default_factory=dict)
    """Parameters that solve the problems, by their dotted names."""
    environment: str | None = None
    """Another environment, that solves them."""


def look_at_table(records: Iterable[PromptRecord], task: Task, *, every: bool) -> Findings:
    """Looks at prepared records: every one, where a reward has to be chosen, or the first."""
    findings = Findings(Traits(task))
    for record in records if every else islice(records, _KEPT):
        _note(findings, record)
    return findings


def look_at_folder(data: DataConfig, tasks: Callable[[], Sequence[Task]] = lambda: OF_A_RECORD) -> Findings:
    """Looks at the records at ``data.path``, as the data preparation will read them.

    Args:
        tasks: gives what the model does, where the records are not of ``data.task``; others are no records for it.

    Raises:
        UserError: there is nothing at the path, or no layout fits.
    """
    found = find_records(data)
    findings = _look(found, data)
    if findings.traits.records:
        return findings
    task = _fitting_task(found, data.task)
    rejected = nothing_left(findings.rejected, findings.rejections)
    if task is None:
        findings.problems.append(rejected)
        return findings
    # Queries have a model of their own in the project, whichever is named.
    if task not in (*tasks(), "segmentation"):
        does = " and ".join(tasks())
        findings.problems.append(f"{_are_of(data, task)} The model does {does} only. {rejected}")
        return findings
    return _of_another_task(found, data, task)


def _look(found: Found, data: DataConfig) -> Findings:
    findings = Findings(Traits(data.task))
    few: list[RawRecord] = []
    for item in _items(found, data.task):
        if isinstance(item, RawRecord):
            _note(findings, as_prompt(item, data.task))
            few += [item] * (len(few) <= MOST)
            continue
        findings.rejections += 1
        if len(findings.rejected) < MOST:
            findings.rejected.append(item)
    if data.strict and findings.rejected:
        findings.problems.append(f"{findings.rejected[0]} (data.strict stops at the first rejected record)")
    if 0 < len(few) <= MOST and found.layout not in EMBEDDING:
        _check_splits(findings, few, data)
    return findings


def _items(found: Found, task: Task) -> Iterator[RawRecord | Rejected]:
    items = survey(found, task)
    return islice(items, MOST) if found.layout in EMBEDDING else items


def _note(findings: Findings, record: PromptRecord) -> None:
    findings.traits.add(record)
    if len(findings.sample) < _KEPT:
        findings.sample.append(record)


def _fitting_task(found: Found, task: Task) -> Task | None:
    """The one that the first records are of, where they are of none for ``task``."""
    for other in OF_A_RECORD:
        if other != task and any(isinstance(item, RawRecord) for item in islice(_items(found, other), MOST)):
            return other
    return None


def _of_another_task(found: Found, data: DataConfig, task: Task) -> Findings:
    findings = _look(found, data.model_copy(update={"task": task}))
    findings.problems.insert(0, _are_of(data, task))
    if task == "segmentation":
        # Another model, with other settings, answers queries.
        findings.environment = "negative_points"
    else:
        findings.added["data.task"] = task
    return findings


def _are_of(data: DataConfig, task: Task) -> str:
    having = {
        "t2i": "have no source_image, so they are prompts",
        "i2i": "have a source_image, so they are edits",
        "segmentation": "are queries about an image with a mask",
    }
    return f"The records in {data.path} {having[task]}, and data.task is {data.task}."


def _check_splits(findings: Findings, records: list[RawRecord], data: DataConfig) -> None:
    splitter = Splitter(eval_share=data.eval_share, held_out_share=data.held_out_share, sealed_share=data.sealed_share)
    counts = Counter(
        splitter(record.id, group_key(record, [sha256_of(image) for image in record.source_images], data.task))
        for record in records
    )
    if counts["train"] and counts["eval"] + counts["held_out"]:
        return
    each = ", ".join(f"{counts[name]} {name}" for name in (SPLITS if data.sealed_share > 0 else OPEN))
    findings.problems.append(
        f"{counted(len(records), 'usable record')} in the splits: {each}. Training and evaluation need one each: add"
        " records with other prompts, or change data.eval_share and data.held_out_share."
        f"{also_rejected(findings.rejected, findings.rejections)}"
    )
