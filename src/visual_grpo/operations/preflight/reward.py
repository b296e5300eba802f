"""The preset of rewards that fits the user's own data, or a message where none does."""

from __future__ import annotations

from dataclasses import dataclass, field

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Task
from visual_grpo.config.command import Command
from visual_grpo.config.defaults import PresetName
from visual_grpo.rewards.ocr import asked_text

_SHOWN = 3
_MESSAGE = """\
No reward fits the {records} in {path}: without a target_image are {no_target}, without quoted text in
the prompt {no_text}. Choose one of these four, and paste its lines.

A function of your own; change what it returns:
cat >> my_rewards.py <<'END'
def my_reward(prompts, images):  # uint8 tensors [3, height, width]; returns one number for each, higher is better
    return [float(image[0].float().mean() - image[1:].float().mean()) / 255 for image in images]
END
{own}
(or, instead of its parameter, for all runs in {conf}:)
rewards:
  my_reward: {{function: "my_rewards:my_reward"}}

Similarity to target images, after adding a target_image to every record:
{target}

Text in images, after quoting it in the prompts (a sign that says "OPEN"):
{text}

Only to try the training, many colours, which needs nothing of the records:
{colours}"""


@dataclass
class Lacking:
    """Counts records that lack something, and names the first."""

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

    def require_preset(self, path: str, command: Command) -> PresetName:
        """Returns `preset`. Raises UserError with the rewards there are, what each needs, and the lines to paste."""
        preset = self.preset()
        if preset is not None:
            return preset
        text = _MESSAGE.format(
            records=counted(self.records, "record"),
            path=path,
            no_target=self.no_target,
            no_text=self.no_text,
            own=command.with_parameters({"rewards.my_reward.function": "my_rewards:my_reward"}),
            conf=f"conf/{command.environment or 'local'}/parameters.yml",
            target=command.with_parameters({"reward": "edit" if self.edits else "target"}),
            text=command.with_parameters({"reward": "text"}),
            colours=command.with_parameters({"rewards.colour_entropy.weight": 1}),
        )
        raise UserError(text)
