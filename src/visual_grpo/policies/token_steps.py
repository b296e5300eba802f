"""Hidden states of generated token after token, with a cache that grows or one that is whole from the start.

Shapes: b rows, P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.policies.prompt_cache import Prefix, forward

if TYPE_CHECKING:
    from transformers import DynamicCache, StaticCache

TokenCache = Literal["growing", "static"]
_KNOWN_ATTENTION = ("sdpa", "eager")


class TokenSteps(Protocol):
    """Asked for one token after the other, the first one after the prompt."""

    def next(self, embeds: Tensor) -> Tensor:
        """[b, 1, H] after the token with these embeddings, [b, 1, H]."""
        ...


def token_steps(model: Any, prefix: Prefix, length: int, cache: TokenCache) -> TokenSteps:
    """After the prompts of ``prefix``, whose cache it takes over; at most T = ``length`` tokens.

    Raises UserError for a model whose cache cannot be static.
    """
    if cache == "static":
        return StaticSteps(model, prefix, length)
    return GrowingSteps(model, prefix, length) if _is_known(model, prefix) else StockSteps(model, prefix)


class StockSteps:
    """Every token is a call of the language model, which makes its own mask: for an attention unknown here."""

    def __init__(self, model: Any, prefix: Prefix) -> None:
        self._model, self._cache, self._mask = model, prefix.cache, prefix.mask
        self._positions = iter(prefix.token_positions.split(1, -1))

    def next(self, embeds: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        return forward(self._model, embeds, self._mask, next(self._positions), self._cache)


class GrowingSteps:
    """Every token makes the cache longer by one."""

    def __init__(self, model: Any, prefix: Prefix, length: int) -> None:
        self._model, self._cache, self._seen = model, prefix.cache, prefix.mask.shape[1]
        self._rotary = _Rotary(model, prefix)
        self._mask = _padding_mask(model, prefix, length)

    def next(self, embeds: Tensor) -> Tensor:
        self._seen += 1
        mask = None if self._mask is None else self._mask[..., : self._seen]
        return layers(self._model, embeds, mask, self._rotary.next(), self._cache)


class StaticSteps:
    """Every token does the same to the same memory, of P + T places, of which a mask hides those still to come.

    On a GPU the kernels of one token are therefore captured once, as a CUDA graph, and launched together for each
    token after it. The graph holds as long as the weights stay where they are: it is of one batch.
    """

    def __init__(self, model: Any, prefix: Prefix, length: int) -> None:
        rows, before = prefix.mask.shape
        _require_plain_cache(model, prefix)
        self._model, self._place = model, before
        # The last token is drawn and not read again.
        self._cache = _static(model, prefix, before + length - 1)
        self._mask = _Mask(model, prefix, before + length - 1)
        self._embeds = prefix.hidden.new_empty(rows, 1, prefix.hidden.shape[-1])
        self._tables = _Rotary(model, prefix)
        cos, sin = self._tables.at(0)
        self._rotary = torch.empty_like(cos), torch.empty_like(sin)
        self._hidden = prefix.hidden
        self._captures = prefix.hidden.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def next(self, embeds: Tensor) -> Tensor:
        self._embeds.copy_(embeds)
        for own, table in zip(self._rotary, self._tables.next(), strict=True):
            own.copy_(table)
        self._mask.show(self._place)
        self._place += 1
        if self._captures and self._graph is None:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._hidden = self._step()
        return self._hidden

    def _step(self) -> Tensor:
        return layers(self._model, self._embeds, self._mask.values, self._rotary, self._cache)

    def _capture(self) -> None:
        """Runs a step before, as libraries choose their kernels then; what it changes in the cache is undone."""
        counters = [layer.cumulative_length for layer in self._cache.layers]
        before = counters[0].clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step()
        torch.cuda.current_stream().wait_stream(beside)
        for counter in counters:
            counter.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: a reward may be at work in another one.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._hidden = self._step()
        self._graph = graph


class _Rotary:
    """Cosines and sines of the generated tokens' positions, made for all of them at once."""

    def __init__(self, model: Any, prefix: Prefix) -> None:
        self._cos, self._sin = model.model.language_model.rotary_emb(prefix.hidden, prefix.token_positions)
        self._place = 0

    def at(self, place: int) -> tuple[Tensor, Tensor]:
        """[b, 1, width of a head] twice."""
        return self._cos[:, place : place + 1], self._sin[:, place : place + 1]

    def next(self) -> tuple[Tensor, Tensor]:
        self._place += 1
        return self.at(self._place - 1)


class _Mask:
    """[b, 1, 1, P + T - 1], as attention adds it to its scores without a look at its values."""

    def __init__(self, model: Any, prefix: Prefix, places: int) -> None:
        rows, before = prefix.mask.shape
        # What transformers takes for what is hidden: sdpa's own number is another one than that of its eager attention.
        hidden = -torch.inf if _attention(model) == "sdpa" else torch.finfo(prefix.hidden.dtype).min
        self.values = prefix.hidden.new_full((rows, 1, 1, places), hidden)
        self.values[..., :before].masked_fill_(prefix.mask.bool()[:, None, None], 0.0)

    def show(self, place: int | slice) -> None:
        self.values[..., place] = 0.0


def _padding_mask(model: Any, prefix: Prefix, length: int) -> Tensor | None:
    """`_Mask` that hides padding only; None where there is none, and sdpa looks at all that is in the cache."""
    if _attention(model) == "sdpa" and not bool((prefix.mask == 0).any()):
        return None
    before = prefix.mask.shape[1]
    mask = _Mask(model, prefix, before + length - 1)
    mask.show(slice(before, None))
    return mask.values


def layers(
    model: Any, embeds: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: DynamicCache | StaticCache
) -> Tensor:
    """Hidden states [b, 1, H] of one token more than ``cache`` holds, by the language model's layers themselves.

    Its own forward would make mask and ``rotary`` anew for each token, and look at the mask's values: each time the
    host waits for the GPU.
    """
    network, hidden = model.model.language_model, embeds
    for layer in network.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
    normed: Tensor = network.norm(hidden)
    return normed


def _static(model: Any, prefix: Prefix, places: int) -> StaticCache:
    """With what the cache of ``prefix`` holds, which is given up layer by layer."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=places)
    for own, grown in zip(cache.layers, prefix.cache.layers, strict=True):
        own.lazy_initialization(grown.keys, grown.values)
        own.update(grown.keys, grown.values)
        grown.keys = grown.values = None
    return cache


def _require_plain_cache(model: Any, prefix: Prefix) -> None:
    name = type(model).__name__
    if any(layer.is_sliding for layer in prefix.cache.layers):
        raise UserError(f"policy.kv_cache is static, but {name} has layers that attend to a window only; use growing.")
    if _attention(model) not in _KNOWN_ATTENTION:
        raise UserError(
            f"policy.kv_cache is static, but {name} attends by {_attention(model)}; expected sdpa or eager, or"
            " policy.kv_cache growing."
        )


def _is_known(model: Any, prefix: Prefix) -> bool:
    """Whether `layers` and `_Mask` are what the model's own forward does."""
    return _attention(model) in _KNOWN_ATTENTION and not any(layer.is_sliding for layer in prefix.cache.layers)


def _attention(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)
