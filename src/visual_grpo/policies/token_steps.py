"""Hidden states of generated token after token, with a cache that grows or one that is whole from the start.

Shapes: b rows, P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.policies.prompt_cache import Prefix, TokenMask, forward

if TYPE_CHECKING:
    from transformers import StaticCache

TokenCache = Literal["growing", "static"]


class TokenSteps(Protocol):
    """Asked for one token after the other, the first one after the prompt."""

    def next(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """[b, 1, H] after the token with these embeddings, [b, 1, H]; ``positions``: [3, b, 1] int64."""
        ...


def token_steps(model: Any, prefix: Prefix, length: int, cache: TokenCache) -> TokenSteps:
    """After the prompts of ``prefix``, whose cache it takes over; at most T = ``length`` tokens.

    Raises UserError for a model whose cache cannot be static.
    """
    return StaticSteps(model, prefix, length) if cache == "static" else GrowingSteps(model, prefix)


class GrowingSteps:
    """Every token makes the cache and the mask longer by one."""

    def __init__(self, model: Any, prefix: Prefix) -> None:
        self._model, self._cache = model, prefix.cache
        self._mask = TokenMask(model, prefix.mask)

    def next(self, embeds: Tensor, positions: Tensor) -> Tensor:
        return forward(self._model, embeds, self._mask.of_next(), positions, self._cache)


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
        self._mask = _Mask(model, prefix.mask, before + length - 1, prefix.hidden.dtype)
        self._embeds = prefix.hidden.new_empty(rows, 1, prefix.hidden.shape[-1])
        self._positions = prefix.token_positions.new_empty(len(prefix.token_positions), rows, 1)
        self._hidden = prefix.hidden
        self._captures = prefix.hidden.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def next(self, embeds: Tensor, positions: Tensor) -> Tensor:
        self._embeds.copy_(embeds)
        self._positions.copy_(positions)
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
        return forward(self._model, self._embeds, self._mask.values, self._positions, self._cache)

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


class _Mask:
    """[b, 1, 1, P + T - 1], as attention takes it without a look at its values: bool, or numbers that are added."""

    def __init__(self, model: Any, prompts: Tensor, places: int, dtype: torch.dtype) -> None:
        """``prompts``: [b, P] int64, 1 = a real token."""
        rows, before = prompts.shape
        shown = torch.zeros(rows, 1, 1, places, dtype=torch.bool, device=prompts.device)
        shown[..., :before] = prompts.bool()[:, None, None]
        if _attention(model) == "sdpa":
            self.values, self._of_shown = shown, True
        else:
            hidden = torch.full(shown.shape, torch.finfo(dtype).min, dtype=dtype, device=prompts.device)
            self.values, self._of_shown = hidden.masked_fill(shown, 0.0), False

    def show(self, place: int) -> None:
        self.values[..., place] = float(self._of_shown)


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
    if _attention(model) not in ("sdpa", "eager"):
        raise UserError(
            f"policy.kv_cache is static, but {name} attends by {_attention(model)}; expected sdpa or eager, or"
            " policy.kv_cache growing."
        )


def _attention(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)
