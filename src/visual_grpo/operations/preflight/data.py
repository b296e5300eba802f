"""Looks at the user's own records before they are prepared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from visual_grpo.common.errors import counted
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import DataConfig, Task
from visual_grpo.config.command import Command
from visual_grpo.data.checks import checked
from visual_grpo.data.images import image_digest
from visual_grpo.data.preparation import also_rejected, no_records_left, with_ids
from visual_grpo.data.record import Note, Original, Record, Rejected
from visual_grpo.data.sources import EMBEDDING, RecordSource, find_records
from visual_grpo.data.table import OPEN, SPLITS, assign_split
from visual_grpo.operations.preflight.reward import Traits

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
    problems: list[str] = field(default_factory=list)

    def add(self, record: PromptRecord) -> None:
        self.traits.add(record)
        if len(self.sample) < _KEPT:
            self.sample.append(record)


def look_at_table(records: Iterable[PromptRecord], task: Task, *, every: bool) -> Findings:
    """Looks at prepared records: every one, where a reward has to be chosen, or the first."""
    findings = Findings(Traits(task))
    for record in records if every else islice(records, _KEPT):
        findings.add(record)
    return findings


def look_at_folder(data: DataConfig, tasks: Sequence[Task], command: Command) -> Findings:
    """Looks at the records at ``data.path``, as the data preparation will read them.

    Args:
        tasks: those of the model.
        command: of the run, to print with another task where the records are of that.

    Raises:
        UserError: there is nothing at the path, or no layout fits.
    """
    source, findings = find_records(data), Findings(Traits(data.task))
    first: list[Record] = []
    rejected: list[Rejected] = []
    rejections = 0
    for item in _survey(source, data.task):
        if isinstance(item, Record):
            findings.add(_prompt_record(item, data.task))
            first += [item] * (len(first) <= MOST)
        else:
            rejected += [item] * (len(rejected) < MOST)
            rejections += 1
    if data.strict and rejected:
        findings.problems.append(f"{rejected[0]} (data.strict stops at the first rejected record)")
    if not first:
        problem = _of_another_task(source, data, tasks, command) or no_records_left(rejected, rejections)
        findings.problems.append(problem)
    elif len(first) <= MOST and source.layout not in EMBEDDING and (empty := _split_feasibility(first, data)):
        findings.problems.append(empty + also_rejected(rejected, rejections))
    return findings


def _prompt_record(record: Record, task: Task) -> PromptRecord:
    """Returns a checked record as rewards will see it, with its original images."""
    prepared = dict.fromkeys(("box", "points")) if task == "segmentation" else {}
    return PromptRecord(
        id=record.id,
        prompt=record.prompt,
        target_image=None if record.target_image is None else _path(record.target_image),
        source_images=tuple(map(_path, record.source_images)),
        metadata=prepared | json.loads(record.metadata),
    )


def _path(image: Original) -> Path:
    return image if isinstance(image, Path) else Path(image.name)


def _survey(source: RecordSource, task: Task) -> Iterator[Record | Rejected]:
    """Yields the records that the preparation will accept, unless an image is damaged, and those it will reject."""
    items = (item for item in with_ids(source.read(task)) if not isinstance(item, Note))
    for item in islice(items, MOST if source.layout in EMBEDDING else None):
        try:
            yield checked(item, task, source.limits) if isinstance(item, Record) else item
        except Rejected as rejected:
            yield rejected.at(item.place, item.id)


def _of_another_task(source: RecordSource, data: DataConfig, tasks: Sequence[Task], command: Command) -> str:
    """Names the task that the first records are of, and the command for it; "" if they are of none."""
    kinds: dict[Task, str] = {
        "t2i": "have no source_image, so they are prompts",
        "i2i": "have a source_image, so they are edits",
        "segmentation": "are queries about an image with a mask",
    }
    for task, kind in kinds.items():
        if task != data.task and any(isinstance(item, Record) for item in islice(_survey(source, task), MOST)):
            said = f"The records in {data.path} {kind}, and data.task is {data.task}."
            if task == "segmentation":  # Another model, with other settings, answers queries.
                return f"{said} Run:\n{command.with_environment('negative_points')}"
            if task not in tasks:
                return f"{said} The model does {' and '.join(tasks)} only."
            return f"{said} Run:\n{command.with_parameters({'data.task': task})}"
    return ""


def _split_feasibility(records: Sequence[Record], data: DataConfig) -> str:
    """Says how few records the splits have; "" if there are some to train on and some to evaluate on."""
    counts = Counter(
        assign_split(record, [image_digest(image) for image in record.source_images], data)[0] for record in records
    )
    if counts["train"] and counts["eval"] + counts["held_out"]:
        return ""
    each = ", ".join(f"{counts[name]} {name}" for name in (SPLITS if data.sealed_share > 0 else OPEN))
    return (
        f"{counted(len(records), 'usable record')} in the splits: {each}. Training and evaluation need one each: add"
        " records with other prompts, or change data.eval_share and data.held_out_share."
    )
