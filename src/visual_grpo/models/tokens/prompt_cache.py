"""A multimodal model's language model run after prompts: each distinct prompt once, its cache repeated for its rows.

Shapes: N distinct prompts, B rows (b of them), P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
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


class LayerCache:
    """Keys and values of one layer, [b, heads, tokens, width], as its attention asks transformers' caches for them.

    Those hold all layers, which a compiled layer would be compiled for one by one: it asks by its number.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values = keys, values
        return keys, values

    def select(self, rows: Tensor) -> None:
        assert self.keys is not None, "a layer has run"
        assert self.values is not None, "a layer has run"
        # In memory as `update` gives them, so that a compiled layer takes both.
        self.keys, self.values = self.keys.contiguous()[rows], self.values.contiguous()[rows]


class PlacedLayerCache(LayerCache):
    """The same with places for all tokens from the start, all of which `update` returns.

    ``place``, [1] int64 on the device, is the place of the next token: its owner moves it on.
    """

    def __init__(self, before: LayerCache, places: int, place: Tensor) -> None:
        """Takes over the keys and values of ``before``, and leaves it empty."""
        self._place = place
        self.keys, self.values = _widened(before.keys, places), _widened(before.values, places)
        before.keys = before.values = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        assert self.keys is not None, "set at the start"
        assert self.values is not None, "set at the start"
        return self.keys.index_copy_(2, self._place, keys), self.values.index_copy_(2, self._place, values)


def _widened(grown: Tensor | None, places: int) -> Tensor:
    assert grown is not None, "a layer has run"
    return pad(grown, (0, 0, 0, places - grown.shape[2]))  # Zeros: what is hidden must be finite.


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """State of b rows after their prompts."""

    hidden: Tensor
    """[b, 1, H] of the last prompt token."""
    cache: Sequence[LayerCache]
    """One for each layer."""
    mask: Tensor
    """[b, P] int64."""
    token_positions: Tensor
    """[3, b, T] int64."""


def prefill(model: Any, prompts: Prompts, prompt_of_row: Tensor) -> Prefix:
    """Runs one forward per distinct prompt among the rows ([b] int64); gradient flows through the cache.

    ``model`` is a transformers model with ``model.language_model``; its LoRA adapter is active.
    """
    network, config = model.model.language_model, model.config.get_text_config()
    used, inverse = prompt_of_row.unique(return_inverse=True)
    hidden = prompts.embeds[used]
    masks = create_masks_for_generate(config, hidden, prompts.mask[used], DynamicCache())
    rotary = network.rotary_emb(hidden, prompts.positions[:, used])
    inverse, cache = inverse.to(hidden.device), [LayerCache() for _ in network.layers]
    for number, (layer, own) in enumerate(zip(network.layers, cache, strict=True)):
        hidden = run_layer(layer, hidden, masks, rotary, own)
        if prompts.added is not None and number < len(prompts.added):
            hidden = hidden + prompts.added[number, used]
        own.select(inverse)
    return Prefix(
        hidden=network.norm(hidden[:, -1:])[inverse],
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
        cache = LayerCache()
        before = run_layer(layer, before, masks[0], rotary[0], cache)
        cache.select(of_row)
        return before, run_layer(layer, after, masks[1], rotary[1], cache)

    for number, layer in enumerate(network.layers):
        if checkpointing:
            before, after = checkpoint(run, layer, before, after, use_reentrant=False, preserve_rng_state=False)
        else:
            before, after = run(layer, before, after)
        if number < len(added):
            before = before + added[number]
    hidden: Tensor = network.norm(torch.cat([before[of_row, -1:], after], 1))
    return hidden


def run_layer(layer: Any, hidden: Tensor, mask: Any, rotary: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
    """[b, L, H] after a layer of the language model, for L tokens after those in ``cache``.

    ``mask``: what its attention takes, or one by each kind of layer.
    """
    if isinstance(mask, dict):
        mask = mask[getattr(layer, "attention_type", "full_attention")]
    after: Tensor = layer(hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
    return after
