"""A multimodal model's language model run after prompts: each distinct prompt once, its cache repeated for its rows.

Shapes: N distinct prompts, B rows (b of them), P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """N distinct prompts as the language model reads them."""

    embeds: Tensor
    """[N, P, H], left-padded; what is not text (an image) is embedded already."""
    mask: Tensor
    """[N, P] int64, 1 = a real token."""
    positions: Tensor
    """[3, N, P] int64: temporal, height and width position of every prompt token (M-RoPE)."""
    token_positions: Tensor
    """[3, N, T] int64: the same of the generated tokens."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Where b rows stand after their prompts."""

    hidden: Tensor
    """[b, 1, H] of the last prompt token."""
    cache: DynamicCache
    mask: Tensor
    """[b, P] int64."""
    token_positions: Tensor
    """[3, b, T] int64."""


def prefill(model: Any, prompts: Prompts, prompt_of_row: Tensor) -> Prefix:
    """One forward per distinct prompt among those of the rows ([b] int64); gradient flows through the cache.

    ``model`` is a transformers model with ``model.language_model``, of which an injected adapter takes part.
    """
    from transformers import DynamicCache

    used, inverse = prompt_of_row.unique(return_inverse=True)
    cache = DynamicCache(config=model.config.get_text_config())
    hidden = forward(model, prompts.embeds[used], prompts.mask[used], prompts.positions[:, used], cache)
    cache.batch_select_indices(inverse.to(hidden.device))
    return Prefix(
        hidden=hidden[inverse, -1:],
        cache=cache,
        mask=prompts.mask[prompt_of_row],
        token_positions=prompts.token_positions[:, prompt_of_row],
    )


def hidden_shared(model: Any, prompts: Prompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
    """[b, T, H] that predict ``tokens`` ([b, T] int64), after one forward per distinct prompt."""
    prefix = prefill(model, prompts, prompt_of_row)
    if tokens.shape[1] == 1:
        return prefix.hidden
    mask = torch.cat([prefix.mask, torch.ones_like(tokens[:, :-1])], 1)
    embeds = model.model.get_input_embeddings()(tokens[:, :-1])
    rest = forward(model, embeds, mask, prefix.token_positions[..., : embeds.shape[1]], prefix.cache)
    return torch.cat([prefix.hidden, rest], 1)


def hidden_whole(model: Any, prompts: Prompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
    """As `hidden_shared`, by one forward of prompt and tokens: gradient checkpointing excludes a cache."""
    own, count = prompt_of_row, tokens.shape[1]
    embeds = torch.cat([prompts.embeds[own], model.model.get_input_embeddings()(tokens[:, :-1])], 1)
    mask = torch.cat([prompts.mask[own], torch.ones_like(tokens[:, :-1])], 1)
    positions = torch.cat([prompts.positions[:, own], prompts.token_positions[:, own, : count - 1]], 2)
    return forward(model, embeds, mask, positions, None)[:, -count:]


def forward(model: Any, embeds: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None) -> Tensor:
    """Hidden states [b, L, H] for embeddings [b, L, H] after what ``cache`` holds.

    ``mask``: [b, all tokens] int64, 1 = a real one.
    """
    output = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
