"""A multimodal model's language model run after prompts: each distinct prompt once, its cache repeated for its rows.

Shapes: N distinct prompts, B rows (b of them), P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.masking_utils import create_masks_for_generate


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
    added: Tensor | None = None
    """[K, N, P, H], added to the hidden states after each of the first K layers, 0 for text (DeepStack, arXiv
    2406.04334); None where the model has no such images."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """State of b rows after their prompts."""

    hidden: Tensor
    """[b, 1, H] of the last prompt token."""
    cache: DynamicCache
    mask: Tensor
    """[b, P] int64."""
    token_positions: Tensor
    """[3, b, T] int64."""


def prefill(model: Any, prompts: Prompts, prompt_of_row: Tensor) -> Prefix:
    """Runs one forward per distinct prompt among those of the rows ([b] int64); gradient flows through the cache.

    ``model`` is a transformers model with ``model.language_model``; its LoRA adapter is active.
    """
    used, inverse = prompt_of_row.unique(return_inverse=True)
    cache = DynamicCache(config=model.config.get_text_config())
    added = None if prompts.added is None else prompts.added[:, used]
    hidden = forward(model, prompts.embeds[used], prompts.mask[used], prompts.positions[:, used], cache, added)
    cache.batch_select_indices(inverse.to(hidden.device))
    return Prefix(
        hidden=hidden[inverse, -1:],
        cache=cache,
        mask=prompts.mask[prompt_of_row],
        token_positions=prompts.token_positions[:, prompt_of_row],
    )


def hidden_shared(
    model: Any, prompts: Prompts, prompt_of_row: Tensor, tokens: Tensor, *, checkpointing: bool = False
) -> Tensor:
    """[b, T, H] that predict ``tokens`` ([b, T] int64); each distinct prompt is computed once.

    Every layer runs on the prompts and then on the tokens that follow them. So with ``checkpointing`` it can be
    recomputed in the backward pass; transformers' own gradient checkpointing excludes a cache.
    """
    network, config = model.model.language_model, model.config.get_text_config()
    used, of_row = prompt_of_row.unique(return_inverse=True)
    before = prompts.embeds[used]
    after = model.model.get_input_embeddings()(tokens[:, :-1])
    if not after.shape[1]:
        return prefill(model, prompts, prompt_of_row).hidden
    of_row = of_row.to(before.device)
    masks, seen = [], DynamicCache()
    for embeds, mask in (
        (before, prompts.mask[used]),
        (after, torch.cat([prompts.mask[prompt_of_row], torch.ones_like(tokens[:, :-1])], 1)),
    ):
        masks.append(create_masks_for_generate(config, embeds, mask, seen))
        places = embeds.new_empty(1, 1, embeds.shape[1], 1)  # The masks need the number of tokens only.
        seen.update(places, places, 0)
    rotary = (
        network.rotary_emb(before, prompts.positions[:, used]),
        network.rotary_emb(after, prompts.token_positions[:, prompt_of_row, : after.shape[1]]),
    )

    added = () if prompts.added is None else prompts.added[:, used]

    def run(layer: Any, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        cache, kind = DynamicCache(), getattr(layer, "attention_type", "full_attention")
        masks_of_layer = [mask[kind] if isinstance(mask, dict) else mask for mask in masks]
        before = layer(before, attention_mask=masks_of_layer[0], position_embeddings=rotary[0], past_key_values=cache)
        cache.batch_select_indices(of_row)
        after = layer(after, attention_mask=masks_of_layer[1], position_embeddings=rotary[1], past_key_values=cache)
        return before, after

    for number, layer in enumerate(network.layers):
        if checkpointing:
            before, after = checkpoint(run, layer, before, after, use_reentrant=False, preserve_rng_state=False)
        else:
            before, after = run(layer, before, after)
        if number < len(added):
            before = before + added[number]
    hidden: Tensor = network.norm(torch.cat([before[of_row, -1:], after], 1))
    return hidden


def forward(
    model: Any,
    embeds: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: DynamicCache | None,
    added: Tensor | None = None,
) -> Tensor:
    """Hidden states [b, L, H] for embeddings [b, L, H] after what ``cache`` holds.

    ``mask``: [b, all tokens] int64, 1 = a real one. ``added``: [K, b, L, H], as `Prompts.added`.
    """
    deepstack = {}
    if added is not None:
        everywhere = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        deepstack = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": list(added.flatten(1, 2))}
    output = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
        **deepstack,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
