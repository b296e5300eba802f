"""What a vision-language model is asked about an image."""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.rewards.quoted import asked_text
from visual_grpo.types import PromptRecord

YES_OR_NO = "Answer with one word, Yes or No."


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """A question with what it needs of a record."""

    question: str
    """With ``{prompt}``, the record's prompt, and ``{text}``, the text that its image is to show."""
    source: bool = False
    """The model sees the image that was edited first."""

    @property
    def fields(self) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(self.question) if name is not None}

    def asked(self, record: PromptRecord) -> str | None:
        """The question about a record; None if the record asks for no text and the question is about it."""
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


def find_rubric(given: str, source: bool | None) -> Rubric:
    """The rubric of that name, or the user's question.

    Args:
        source: whether the edited image is sent too; None = as the rubric has it.

    Raises:
        UserError: neither a name nor a question with known fields.
    """
    if given in RUBRICS:
        found = RUBRICS[given]
        return found if source is None else Rubric(question=found.question, source=source)
    if " " not in given.strip():
        raise UserError(
            f"rubric must be {', '.join(RUBRICS)} or a question, got {given!r}.{nearest_hint(given, RUBRICS)}"
        )
    try:
        own = Rubric(question=given, source=bool(source))
        unknown = own.fields - {"prompt", "text"}
    except ValueError as error:
        raise UserError(f"the rubric's braces do not match ({error}); write {{{{ for a brace itself") from error
    if unknown:
        raise UserError(f"a rubric may contain {{prompt}} and {{text}}, got {{{sorted(unknown)[0]}}}")
    return own
