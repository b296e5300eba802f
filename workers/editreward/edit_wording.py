"""What EditReward is asked, in the words that it was trained with.

They are read from a copy of the authors' repository, TIGER-AI-Lab/EditReward: texts that are assigned to names there,
of which nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

ASPECTS = {"following": "INSTRUCTION_EDIT_FOLLOWING", "quality": "INSTRUCTION_EDIT_QUALITY"}
"""The two aspects, one for each head in its order: how the instruction was followed, and how the edit looks."""
PROMPTS, COLLATOR = "dataset/prompts.py", "dataset/data_collator_qwen_edit.py"
ENDING = "prompt_with_special_token"
SCORE_TOKEN = "<|Reward|>"  # noqa: S105  # a token of the text, not a secret
"""The token at which the heads read."""
PLACE = "{text_prompt}"


def read_wording(copy: str | None) -> dict[str, str]:
    """The question about each of `ASPECTS`, with `PLACE` for the instruction and `SCORE_TOKEN` at its end.

    Args:
        copy: the folder of the repository, or of its package in it.

    Raises:
        ValueError: the folder or what is needed of it is not there.
    """
    if copy is None:
        raise ValueError(
            "EDITREWARD_CODE must name a copy of github.com/TIGER-AI-Lab/EditReward: the wording that the weights were"
            " trained with is read from it (nothing of it is run)"
        )
    package = next((own for own in (Path(copy) / "EditReward", Path(copy)) if (own / PROMPTS).is_file()), None)
    if package is None:
        raise ValueError(f"{copy} is no copy of TIGER-AI-Lab/EditReward: it has no EditReward/{PROMPTS}")
    prompts, collator = _texts(package / PROMPTS), _texts(package / COLLATOR)
    wording = {aspect: prompts.get(name, "") + collator.get(ENDING, "") for aspect, name in ASPECTS.items()}
    for aspect, text in wording.items():
        if text.count(PLACE) != 1 or text.count(SCORE_TOKEN) != 1:
            raise ValueError(
                f"{package}: {ASPECTS[aspect]} and {ENDING} must hold {PLACE} and {SCORE_TOKEN} once each: this is"
                " another version of the repository"
            )
    return wording


def _texts(file: Path) -> Mapping[str, str]:
    """Texts that a module assigns to plain names; the last one counts, as it does for Python."""
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return {
        target.id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name) and isinstance(statement.value.value, str)
    }


def asked(wording: str, instruction: str) -> str:
    """The question about one edit."""
    return wording.replace(PLACE, instruction)
