"""Looks at the user's records before they are prepared, and chooses the preset of rewards that fits them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from visual_grpo.common.errors import Remedy, UserError, counted
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.config import DataConfig, Task
from visual_grpo.config.presets import PresetName
from visual_grpo.data.checks import checked
from visual_grpo.data.found import Found
from visual_grpo.data.image_store import image_digest
from visual_grpo.data.preparation import with_ids
from visual_grpo.data.preparation_report import also_rejected, few_held_out, no_records_left, none_to_train_on
from visual_grpo.data.record import Note, Original, Record, Rejected
from visual_grpo.data.sources import EMBEDDING, RecordSource, find_records
from visual_grpo.data.splits import HELD_OUT, Groups, assign_splits, is_split, split_group
from visual_grpo.operations.command import Command
from visual_grpo.rewards.ocr import asked_text

_SHOWN = 3
_MESSAGE = """\
No reward fits the {records} in {path}: without a target_image are {no_target}, without quoted text in
the prompt {no_text}. Choose one of these, and paste its lines.

A function of your own; change what it returns:
cat >> my_rewards.py <<'END'
def my_reward(prompts, images):  # uint8 tensors [3, height, width]; returns one number for each, higher is better
    return [float(image[0].float().mean() - image[1:].float().mean()) / 255 for image in images]
END
{function}
(or, instead of its parameter, for all runs in {conf}:)
rewards:
  my_reward: {{function: "my_rewards:my_reward"}}

Similarity to target images, after adding a target_image to every record:
{target}

Text in images, after quoting it in the prompts (a sign that says "OPEN"):
{text}
{judged}
To try the training without any requirement on the records, reward many colours:
{colours}"""

_JUDGED = """
Whether an edit does what its prompt says, by a vision-language model at an OpenAI endpoint, and what it keeps:
{command}
"""


OF_A_RECORD: tuple[Task, ...] = ("t2i", "i2i", "segmentation")
"""The tasks that a single record can be of."""
_KEPT = 10_000
"""Records that rewards look at before the run; the nodes look at all."""
MOST = 200
"""Records up to which the splits are looked at, which reads all images to edit. Also the most records that are read of
a layout whose images are decoded as they are read."""


@dataclass
class Findings:
    """The contents of the records, which decide the rewards that they allow, and problems."""

    task: Task
    records: int = 0
    edits: int = 0
    """Records with source images."""
    sources: dict[int, str] = field(default_factory=dict)
    """Number of source images -> id of the first record with so many."""
    no_target: list[str] = field(default_factory=list)
    """Ids of records without a target image."""
    no_text: list[str] = field(default_factory=list)
    """Ids of records that ask for no text in the image."""
    images: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Number of records with (or without) a target and with (or without) a source image."""
    are_first: bool = False
    """Only the first records were read."""
    sample: list[PromptRecord] = field(default_factory=list)
    note: str | None = None
    """Note that is printed before any work."""
    problems: list[UserError] = field(default_factory=list)

    def add(self, record: PromptRecord) -> None:
        self.records += 1
        self.edits += bool(record.source_images)
        self.images[record.target_image is not None, bool(record.source_images)] += 1
        self.sources.setdefault(len(record.source_images), record.id)
        if record.target_image is None:
            self.no_target.append(record.id)
        if not asked_text(record):
            self.no_text.append(record.id)
        if len(self.sample) < _KEPT:
            self.sample.append(record)

    def having(self, needs: Needs) -> int:
        """Returns how many records have the images that a reward compares with."""
        return sum(
            n for (target, source), n in self.images.items() if target >= needs.target and source >= needs.source
        )

    def all_records(self) -> str:
        """Returns ``34 records``, or ``the first 200 records``."""
        return f"{'the first ' * self.are_first}{counted(self.records, 'record')}"

    def preset(self) -> PresetName | None:
        """Returns the preset that can judge every record; None if none can."""
        if not self.records:
            return None
        if self.task == "segmentation":
            return "negative_points"
        if not self.no_target:
            return "edit" if self.edits else "target"
        return None if self.no_text else "text"

    def require_preset(self, path: str) -> PresetName:
        """Returns `preset`. Raises UserError with the possible rewards, what each needs, and the lines to paste."""
        preset = self.preset()
        if preset is not None:
            return preset
        command = Command.current()
        text = _MESSAGE.format(
            records=counted(self.records, "record"),
            path=path,
            no_target=_first(self.no_target),
            no_text=_first(self.no_text),
            function=command.with_parameters({"rewards.my_reward.function": "my_rewards:my_reward"}),
            conf=f"conf/{command.environment or 'local'}/parameters.yml",
            target=command.with_parameters({"reward": "edit" if self.edits else "target"}),
            text=command.with_parameters({"reward": "text"}),
            judged=_JUDGED.format(command=command.with_parameters({"reward": "instruction"})) if self.edits else "",
            colours=command.with_parameters({"rewards.colour_entropy.weight": 1}),
        )
        raise UserError(text)


def _first(ids: Sequence[str]) -> str:
    """Returns how many there are, and the first of them."""
    return f"{len(ids)} ({', '.join(map(repr, ids[:_SHOWN]))}{', ...' * (len(ids) > _SHOWN)})"


def look_at_table(records: Iterable[PromptRecord], task: Task, *, every: bool) -> Findings:
    """Looks at prepared records: every one, where they decide the rewards, or the first."""
    findings = Findings(task)
    for record in records if every else islice(records, _KEPT):
        findings.add(record)
    findings.are_first = not every and findings.records == _KEPT
    return findings


def look_at_folder(data: DataConfig, tasks: Sequence[Task]) -> Findings:
    """Looks at the records at ``data.path``, as the data preparation will read them.

    Where the records fit a different task of the model's ``tasks``, the problem's remedy is the command with that task.

    Raises:
        UserError: there is nothing at the path, or no layout fits.
    """
    source, findings = find_records(data), Findings(data.task)
    first: list[Record] = []
    rejected: list[Rejected] = []
    rejections = 0
    for item in _survey(source):
        if isinstance(item, Record):
            findings.add(_prompt_record(item, data.task))
            first += [item] * (len(first) <= MOST)
        else:
            rejected += [item] * (len(rejected) < MOST)
            rejections += 1
    findings.are_first = source.layout in EMBEDDING and findings.records + rejections == MOST
    if data.strict and rejected:
        findings.problems.append(UserError(f"{rejected[0]} (data.strict stops at the first rejected record)"))
    if not first:
        found = no_records_left(rejected, rejections)
        guess, remedy = _of_another_task(source, data, tasks) if rejected else ("", None)
        findings.problems.append(UserError("\n".join(filter(None, (found, guess))), remedy=remedy))
    elif findings.records + rejections < MOST:  # All have been read.
        counts, groups = _count_splits(first, data)
        if not counts["train"]:
            findings.problems.append(
                UserError(none_to_train_on(len(first), data) + also_rejected(rejected, rejections))
            )
        elif not counts[HELD_OUT]:
            findings.note = few_held_out(counts, 0, groups, data)
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


def _survey(
    source: RecordSource, see: Callable[[Record | Rejected], object] = lambda item: None
) -> Iterator[Record | Rejected]:
    """Yields the records that the preparation will accept, unless an image is damaged, and those it will reject."""
    items = (item for item in with_ids(source.read(see)) if not isinstance(item, Note))
    for item in islice(items, MOST if source.layout in EMBEDDING else None):
        try:
            yield checked(item, source.data.task, source.limits) if isinstance(item, Record) else item
        except Rejected as rejected:
            yield rejected.at(item.place, item.id)


def _of_another_task(source: RecordSource, data: DataConfig, tasks: Sequence[Task]) -> tuple[str, Remedy | None]:
    """Names the task that every record is of, and how to choose it; "" where there is none."""
    kinds: dict[Task, str] = {
        "t2i": "have no source_image, so they are prompts",
        "i2i": "have a source_image, so they are edits",
        "segmentation": "are queries about an image with a mask",
    }
    for task, kind in kinds.items():
        if task == data.task or (having_targets := _read_as(source, task)) is None:
            continue
        text = f"The records in {data.path} {kind}, and data.task is {data.task}."
        if task == "t2i" and having_targets:
            return (
                f"The records in {data.path} have one picture each, and an edit (data.task=i2i) needs one to edit."
                " If it is that one, name its column with data.columns.source=NAME; if it is what the prompt should"
                " give, the task is t2i."
            ), None
        if task == "segmentation":  # A different model, with different settings, answers queries.
            return text, Remedy(environment="negative_points")
        if task not in tasks:
            return f"{text} The model does {' and '.join(tasks)} only.", None
        return text, Remedy(parameters={"data.task": task})
    return "", None


def _read_as(source: RecordSource, task: Task) -> int | None:
    """Returns the number of records with a target, read as a task; None where one does not fit it, or the task would
    leave out pictures."""
    source = replace(source, data=source.data.model_copy(update={"task": task}))
    found, having_targets = Found(source), 0
    with suppress(UserError):
        for item in _survey(source, found.add):
            if not isinstance(item, Record):
                return None
            having_targets += item.target_image is not None
        return None if task == "t2i" and found.leaves_out() else having_targets
    return None


def _count_splits(records: Sequence[Record], data: DataConfig) -> tuple[Counter[str], int]:
    """Returns the number of records in each split and of groups, before pictures of the same content join any."""
    groups, keys, counts = Groups(holds_out=bool(data.held_out_split)), list[tuple[str, str]](), Counter[str]()
    for record in records:
        digests, is_held_out = [*map(image_digest, record.source_images)], is_split(record.split, data.held_out_split)
        key, ungrouped = (split_group(one, digests, data.task) for one in (record, replace(record, group=None)))
        groups.add(key, (ungrouped, *digests), held_out=is_held_out)
        counts[HELD_OUT] += is_held_out
        keys += [] if is_held_out else [(key, record.id)]
    held_out = groups.held_out()
    free = [(key, name) for found, name in keys if (key := groups.of(found)) not in held_out]
    return counts + Counter(assign_splits(free, data)), len({key for key, _ in free})
