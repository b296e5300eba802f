"""VQAScore (arXiv 2404.01291): how sure a model is to answer "Yes" when asked whether the picture shows the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

QUESTION = 'Does this figure show "{text}"? Please answer yes or no.'
ANSWER = "Yes"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and"
    " polite answers to the user's questions."
)
"""CLIP-FlanT5 was tuned on conversations that begin so (LLaVA 1.5's form)."""


def around_the_picture(text: str) -> tuple[str, str]:
    """What is said before and after the picture. Each is tokenised by itself, with an end of its own."""
    return f"{SYSTEM} USER: ", f"\n{QUESTION.replace('{text}', text)} ASSISTANT: "


def probability(answer: Sequence[float]) -> float:
    """P("Yes"), of the log-probabilities of the answer's tokens, of which the last one is the end."""
    return math.exp(math.fsum(answer[:-1]))


def as_published(answer: Sequence[float]) -> float:
    """exp(mean log-probability) of all tokens, the end too: what t2v_metrics, the authors' package, reports.

    Where the end is certain, it is the square root of the `probability` of an answer of one token.
    """
    return math.exp(math.fsum(answer) / len(answer))
