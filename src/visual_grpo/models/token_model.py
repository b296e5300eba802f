"""What a language model must offer so that the generic token policy can sample, replay and train it.

Shapes: N distinct records, B rows, T generated tokens, H hidden width, V token ids of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import SamplerConfig
from visual_grpo.models.prompt_cache import Prompts, hidden_shared, prefill
from visual_grpo.models.rows import distinct
from visual_grpo.models.token_steps import TokenCache, token_steps
from visual_grpo.models.tokens import TokenSampler, chosen_log_probs, deviation, draw, entropy, row_uniforms


class Encoded(Protocol):
    """N distinct records as a language model reads them; a model may remember more about them."""

    @property
    def prompts(self) -> Prompts: ...


E = TypeVar("E", bound=Encoded)
EOS_CHECK_INTERVAL = 8
"""Tokens between two checks of whether all rows have ended, each of which waits for the GPU."""


@dataclass(frozen=True, kw_only=True)
class TokenTrajectory(Generic[E]):
    """Everything the replay needs of B sampled rows."""

    encoded: E
    prompt_of_row: Tensor
    """[B] int64, row -> index among the N encoded records."""
    tokens: Tensor
    """[B, T] int64; after an end token it goes on with end tokens."""
    mask: Tensor
    """[B, T] bool on the CPU: up to and including the first end token."""
    reference_log_probs: Tensor | None = None
    """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens(Generic[E]):
    """A trajectory with what was measured while it was drawn."""

    trajectory: TokenTrajectory[E]
    log_probs: Tensor
    """[B, T] float32 at the sampler's temperature, before any truncation."""
    entropy: Tensor
    """[B, T] float32 of the same distributions, nats."""
    deviation: Tensor | None = None
    """[B, T] float32, of their logits; measured in half precision only, where rounding grows with it."""


class TokenModel(Protocol[E]):
    """A transformers model with ``model.language_model``, and how it is asked."""

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
        """N records; T is the length of ``prompts.token_positions``."""
        ...

    def sampler(self, settings: SamplerConfig) -> TokenSampler:
        """None falls back to the model's generation_config."""
        ...

    def samples(
        self, records: Sequence[PromptRecord], trajectory: TokenTrajectory[E], seeds: Sequence[int]
    ) -> Sequence[Sample]:
        """[B] what the tokens of B records mean; ``seeds`` decide anything else that is random in it."""
        ...


@torch.no_grad()
def sample_tokens(
    model: TokenModel[E],
    records: Sequence[PromptRecord],
    seeds: Sequence[int],
    sampler: TokenSampler,
    batch: int,
    cache: TokenCache = "growing",
) -> SampledTokens[E]:
    """T tokens for each of B records, ``batch`` rows at a time; row i is a function of its record, ``seeds[i]`` and
    the weights.

    Raises UserError where the records differ in their number of source images.
    """
    firsts, prompt_of_row = distinct(records)
    encoded = model.encode(firsts)
    uniforms = row_uniforms(seeds, encoded.prompts.token_positions.shape[-1])
    parts = [
        _sample_batch(model, encoded.prompts, prompt_of_row[rows], uniforms[rows], sampler, cache)
        for rows in torch.arange(len(records)).split(batch)
    ]
    tokens, log_probs, entropies, deviations = (torch.cat(column) for column in zip(*parts, strict=True))
    ended = is_end(model, tokens)
    mask = ((ended.cumsum(1) - ended.long()) == 0).cpu()
    trajectory = TokenTrajectory(encoded=encoded, prompt_of_row=prompt_of_row, tokens=tokens, mask=mask)
    return SampledTokens(
        trajectory=trajectory,
        log_probs=log_probs.cpu(),
        entropy=entropies.cpu(),
        deviation=deviations.cpu() if _is_half(model) else None,
    )


def token_log_probs(
    model: TokenModel[E],
    trajectory: TokenTrajectory[E],
    rows: Tensor,
    temperature: float,
    *,
    checkpointing: bool = False,
) -> Tensor:
    """[b, T] float32 of the stored tokens of ``rows`` ([b]), on the CPU, under the weights as they are now."""
    tokens, prompt_of_row = trajectory.tokens[rows], trajectory.prompt_of_row[rows]
    prompts = trajectory.encoded.prompts
    hidden = hidden_shared(model.network, prompts, prompt_of_row, tokens, checkpointing=checkpointing)
    return chosen_log_probs(hidden, model.head, tokens, temperature, model.bias).cpu()


def is_end(model: TokenModel[E], tokens: Tensor) -> Tensor:
    """Which tokens end a row, bool in the shape of ``tokens``."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for end in model.ends:  # A tensor of them would have to be sent to the GPU for every token.
        found |= tokens == end
    return found


def _sample_batch(
    model: TokenModel[E],
    prompts: Prompts,
    prompt_of_row: Tensor,
    uniforms: Tensor,
    sampler: TokenSampler,
    cache: TokenCache,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[b, T] tokens, log-probs, entropies and deviations, token by token after one prefill per prompt.

    T columns are returned whether or not every row ends before, so that batches can be joined.
    """
    prefix = prefill(model.network, prompts, prompt_of_row)
    hidden, steps = prefix.hidden, token_steps(model.network, prefix, uniforms.shape[1], cache)
    embed = model.network.model.get_input_embeddings()
    padding = model.ends[0] if model.ends else 0
    tokens = torch.full(uniforms.shape, padding, device=hidden.device)
    log_probs, entropies, deviations = torch.zeros(3, *uniforms.shape, device=hidden.device)
    # What every token needs is on the device before the first: each copy would make the GPU wait for the host.
    uniforms = uniforms.to(hidden.device)
    done = torch.zeros(len(tokens), dtype=torch.bool, device=hidden.device)
    for step in range(uniforms.shape[1]):
        logits = (hidden[:, -1] @ model.head.t()).float()
        if model.bias is not None:
            logits += model.bias
        plain = (logits / sampler.temperature).log_softmax(-1)
        probabilities = plain.exp()
        chosen = sampler.warp(logits).softmax(-1) if sampler.truncates else probabilities
        token = draw(chosen, uniforms[:, step])
        if model.ends:
            token = torch.where(done, padding, token)
        tokens[:, step] = token
        log_probs[:, step] = plain.gather(1, token[:, None])[:, 0]
        entropies[:, step] = entropy(plain, probabilities)
        if _is_half(model):
            deviations[:, step] = deviation(plain)
        if step + 1 == uniforms.shape[1]:
            break
        if model.ends:
            done |= is_end(model, token)
            if step % EOS_CHECK_INTERVAL == EOS_CHECK_INTERVAL - 1 and done.all():
                break
        hidden = steps.next(embed(token[:, None]))
    return tokens, log_probs, entropies, deviations


def _is_half(model: TokenModel[Any]) -> bool:
    return model.head.dtype != torch.float32
