"""Which preset of rewards fits the user's own data: what do all of its records have?"""

from __future__ import annotations

from dataclasses import dataclass, field

from visual_grpo.config import Task
from visual_grpo.config.presets import PresetName
from visual_grpo.rewards.quoted import asked_text
from visual_grpo.types import PromptRecord

_SHOWN = 3


@dataclass
class Lacking:
    """The records that lack something."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Ids."""

    def add(self, record: PromptRecord) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(record.id)

    def __str__(self) -> str:
        return f"{self.count} ({', '.join(map(repr, self.first))}{', ...' * (self.count > _SHOWN)})"


@dataclass
class Traits:
    """What the records of a dataset have that rewards compare with."""

    task: Task
    records: int = 0
    edits: int = 0
    """Records with source images."""
    no_target: Lacking = field(default_factory=Lacking)
    no_text: Lacking = field(default_factory=Lacking)
    """Records that ask for no text in the image."""

    def add(self, record: PromptRecord) -> None:
        self.records += 1
        self.edits += bool(record.source_images)
        if record.target_image is None:
            self.no_target.add(record)
        if not asked_text(record):
            self.no_text.add(record)

    def preset(self) -> PresetName | None:
        """The preset that can judge every record; None if no one can."""
        if not self.records:
            return None
        if self.task == "segmentation":
            return "negative_points"
        if not self.no_target.count:
            return "edit" if self.edits else "target"
        return None if self.no_text.count else "text"
