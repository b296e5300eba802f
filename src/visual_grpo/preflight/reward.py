"""What to say where no preset of rewards fits the data."""

from __future__ import annotations

from visual_grpo.command import Command
from visual_grpo.rewards.choice import Traits

_MESSAGE = """\
No reward fits {all_records} in {path}: {no_target} {have[no_target]} no target_image, and
{no_text} {have[no_text]} no quoted text in the prompt. Choose one of these four, and paste its lines.

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


def no_preset_fits(traits: Traits, path: str, command: Command) -> str:
    """Which rewards there are, what each needs of the records, and the lines to paste."""
    return _MESSAGE.format(
        all_records="the only record" if traits.records == 1 else f"all {traits.records} records",
        have={
            "no_target": "has" if traits.no_target.count == 1 else "have",
            "no_text": "has" if traits.no_text.count == 1 else "have",
        },
        path=path,
        no_target=traits.no_target,
        no_text=traits.no_text,
        own=command.adding({"rewards.my_reward.function": "my_rewards:my_reward"}),
        conf=f"conf/{command.environment or 'local'}/parameters.yml",
        target=command.adding({"reward": "edit" if traits.edits else "target"}),
        text=command.adding({"reward": "text"}),
        colours=command.adding({"rewards.colour_entropy.weight": 1}),
    )
