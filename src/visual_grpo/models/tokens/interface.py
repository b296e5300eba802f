"""Declares what a family of language models offers: its network, prompts, sampler and answers.

Shapes: N prompts, B rows, T tokens, H hidden width, V token ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import SamplerConfig
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts

E = TypeVar("E", bound=Prompts)


@dataclass(frozen=True, kw_only=True)
class TokenTrajectory(Generic[E]):
    """B sampled rows, as the replay needs them."""

    prompts: E
    prompt_of_row: Tensor
    """[B] int64, row -> index among the N prompts."""
    tokens: Tensor
    """[B, T] int64; after an end token it goes on with end tokens."""
    mask: Tensor
    """[B, T] bool on the CPU: up to and including the first end token."""
    reference_log_probs: Tensor | None = None
    """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""


class TokenModel(Protocol[E]):
    """A transformers model with ``model.language_model``, its prompts and its answers."""

    @property
    def network(self) -> Any:
        """The transformers model that the LoRA adapter is on.

        Its language model is a stack of ``layers`` between embeddings and ``norm``, which share one ``rotary_emb``.
        """
        ...

    @property
    def head(self) -> Tensor:
        """[V, H] output rows of the ids that may be sampled."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[V] float32 added to the logits: 0, or -inf for an id that may not be sampled. None = all may be."""
        ...

    @property
    def ends(self) -> Sequence[int]:
        """Ids that end a row, the one that pads finished rows first; empty where the length is fixed."""
        ...

    def encode(self, records: Sequence[PromptRecord]) -> E:
        """Encodes N records; T is the length of their ``token_positions``."""
        ...

    def sampler(self, settings: SamplerConfig) -> TokenSampler:
        """Returns the distribution; a setting of None is read from the model's generation_config."""
        ...

    def samples(
        self, records: Sequence[PromptRecord], trajectory: TokenTrajectory[E], seeds: Sequence[int]
    ) -> Sequence[Sample]:
        """Decodes the tokens of B records into B samples; ``seeds`` decide whatever else is random."""
        ...
