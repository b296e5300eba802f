"""The questions that a judge is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from string import Formatter

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.ocr import asked_text


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """A question about an image."""

    question: str
    """May contain ``{prompt}``, the record's prompt, and ``{text}``, the text that its image should show."""
    source: bool = False
    """Whether the source image is sent before the result."""

    @property
    def fields(self) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(self.question) if name is not None}

    def question_about(self, record: PromptRecord) -> str | None:
        """Returns the question about a record; None if it is about a text and the record has none."""
        text = asked_text(record) if "text" in self.fields else ""
        return None if text is None else self.question.format(prompt=record.prompt, text=text)


RUBRICS = {
    "alignment": Rubric(
        question="Does this image show everything that the following description asks for, and as it is described?\n"
        "Description: {prompt}"
    ),
    "instruction": Rubric(
        question="The second image was made from the first by this instruction: {prompt}\n"
        "Does the second image show what the instruction asks for?",
        source=True,
    ),
    "text": Rubric(
        question='Is the text "{text}" written in this image, completely legible and without a spelling mistake?'
    ),
    "identity": Rubric(
        question="The second image was made from the first by an edit. Is the person, animal or object that both are"
        " about still recognisably the same one?",
        source=True,
    ),
}


def find_rubric(name: str, source: bool | None) -> Rubric:
    """Returns the rubric of that name, or one with the user's question.

    ``source`` overrides whether the source image is sent; None keeps the rubric's value. Raises UserError for anything
    but a name or a question with known fields.
    """
    if name in RUBRICS:
        rubric = RUBRICS[name]
        return rubric if source is None else replace(rubric, source=source)
    if " " not in name.strip():
        raise UserError(
            f"rubric must be {', '.join(RUBRICS)} or a question, got {name!r}.{nearest_hint(name, RUBRICS)}"
        )
    try:
        custom = Rubric(question=name, source=bool(source))
        unknown = custom.fields - {"prompt", "text"}
    except ValueError as error:
        raise UserError(f"the rubric's braces do not match ({error}); write {{{{ for a brace itself") from error
    if unknown:
        raise UserError(f"a rubric may contain {{prompt}} and {{text}}, got {{{sorted(unknown)[0]}}}")
    return custom
