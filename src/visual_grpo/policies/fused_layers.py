"""Replays tokens of a small model on a CPU, in fewer operations than the model's own layers take, with gradient.

In a small model on a CPU every pass through a tensor is felt. Here RMSNorm, the rotary embedding and attention have a
backward pass of their own, keys and values are not repeated for the queries that share them, and the mask is made once.
For layers of the form of Qwen2.5-VL's and GLM-Image's language models (RMSNorm before or on both sides of attention and
gated MLP, grouped queries, half-rotated rotary embedding); the projections stay modules, whatever adapter they have.

Shapes: N distinct prompts, b rows, P prompt tokens (left-padded), T generated tokens, H hidden width, L tokens at hand,
M tokens that these attend to, h and k heads of queries and of keys, d their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from visual_grpo.hardware import shards
from visual_grpo.policies.prompt_cache import Prefix, Prompts

_LAYERS = ("Qwen2_5_VLDecoderLayer", "GlmImageTextDecoderLayer")
_MOST_WEIGHTS = 2**24
"""Beyond them the products take the time, and a copy of the weights would be felt in memory."""
_MOST_SCORES = 2**24
"""Of one layer; beyond them they would be felt in memory."""
_BLOCK = 32
"""Queries whose attention is computed at a time."""


def known(model: Any, like: Tensor) -> bool:
    """Whether the layers of ``model`` are of a form that is computed here: known, small, in float32 on a CPU.

    ``like``: a tensor of the model's inputs.
    """
    layers, config = model.model.language_model.layers, model.config.get_text_config()
    return (
        is_cpu(like.device)
        and like.dtype == torch.float32
        and config.hidden_act == "silu"
        and all(_is_known(layer) for layer in layers)
        and not _slides(config)
        and len(layers) * sum(weight.numel() for weight in layers[0].parameters()) <= _MOST_WEIGHTS
    )


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _is_known(layer: Any) -> bool:
    return any(kind.__name__ in _LAYERS for kind in type(layer).__mro__)  # A sharded layer's own class is FSDP's.


def _slides(config: Any) -> bool:
    """Whether a layer attends to a window only."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is not None
    return any(kind != "full_attention" for kind in kinds)


def fits(model: Any, prompts: Prompts, rows: int, count: int) -> bool:
    """Whether `hidden_fused` can be asked for so many rows of ``count`` tokens, and `prefill_fused` for 0 tokens."""
    (distinct, before), heads = prompts.mask.shape, model.config.get_text_config().num_attention_heads
    scores = heads * max(distinct * before**2, rows * count * (before + count))
    return scores <= _MOST_SCORES and known(model, prompts.embeds)


def prefill_fused(model: Any, prompts: Prompts, prompt_of_row: Tensor) -> Prefix:
    """As `prefill`."""
    from transformers import DynamicCache

    network, own = model.model.language_model, _Distinct.of(model, prompts, prompt_of_row, 0)
    last, past = _through(network, own.embeds, own.before, own.mask, None, only_last=True)
    cache = DynamicCache(config=model.config.get_text_config())
    for place, (keys, values) in enumerate(past):
        cache.update(keys[own.of_row], values[own.of_row], place)
    return Prefix(
        hidden=normed(last, network.norm)[own.of_row],
        cache=cache,
        mask=prompts.mask[prompt_of_row],
        token_positions=prompts.token_positions[:, prompt_of_row],
    )


def hidden_fused(model: Any, prompts: Prompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
    """[b, T, H] that predict ``tokens`` ([b, T] int64), after one forward per distinct prompt; as `hidden_shared`."""
    network, own = model.model.language_model, _Distinct.of(model, prompts, prompt_of_row, tokens.shape[1] - 1)
    last, past = _through(network, own.embeds, own.before, own.mask, None, only_last=True)
    if tokens.shape[1] == 1:
        return normed(last[own.of_row], network.norm)
    embeds = model.model.get_input_embeddings()(tokens[:, :-1])
    seen = [(keys[own.of_row], values[own.of_row]) for keys, values in past]
    rest, _ = _through(network, embeds, own.after.of(own.of_row), own.mask[own.of_row], seen, only_last=False)
    return normed(torch.cat([last[own.of_row], rest], 1), network.norm)


_Cache = list[tuple[Tensor, Tensor]]
"""For each layer keys and values, [b, k, M, d]."""


@dataclass(frozen=True, kw_only=True)
class _Rotary:
    """The turns of L tokens' heads."""

    cos: Tensor
    """[b, 1, L, d]."""
    sin: Tensor
    """[b, 1, L, of a head what is turned]."""

    @classmethod
    def made(cls, cos: Tensor, sin: Tensor, attention: Any) -> _Rotary:
        """``cos``, ``sin``: [b, L, of a head what is turned]; the rest of it stays."""
        return cls(cos=pad(cos, (0, attention.head_dim - cos.shape[-1]), value=1.0)[:, None], sin=sin[:, None])

    def at(self, places: slice) -> _Rotary:
        """Of some of the tokens."""
        return _Rotary(cos=self.cos[:, :, places], sin=self.sin[:, :, places])

    def of(self, rows: Tensor) -> _Rotary:
        """Of rows by their index, repeats allowed."""
        return _Rotary(cos=self.cos[rows], sin=self.sin[rows])


@dataclass(frozen=True, kw_only=True)
class _Distinct:
    """The n prompts among those of b rows."""

    of_row: Tensor
    """[b] int64, row -> index among the n."""
    embeds: Tensor
    """[n, P, H]."""
    mask: Tensor
    """[n, P] int64, 1 = a real token."""
    before: _Rotary
    """Of their own tokens."""
    after: _Rotary
    """Of the tokens that come after them."""

    @classmethod
    def of(cls, model: Any, prompts: Prompts, prompt_of_row: Tensor, count: int) -> _Distinct:
        """``count``: tokens that come after a prompt."""
        network = model.model.language_model
        used, of_row = prompt_of_row.unique(return_inverse=True)
        embeds, attention = prompts.embeds[used], network.layers[0].self_attn
        positions = torch.cat([prompts.positions, prompts.token_positions[..., :count]], 2)[:, used]
        cos, sin = network.rotary_emb(embeds, positions)
        rotary = _Rotary.made(cos, sin, attention)
        before = embeds.shape[1]
        return cls(
            of_row=of_row,
            embeds=embeds,
            mask=prompts.mask[used],
            before=rotary.at(slice(0, before)),
            after=rotary.at(slice(before, before + count)),
        )


def _through(
    network: Any, embeds: Tensor, rotary: _Rotary, mask: Tensor, past: _Cache | None, *, only_last: bool
) -> tuple[Tensor, _Cache]:
    """[b, L, H] after the last layer for [b, L, H] ``embeds``, and what tokens after them attend to.

    ``mask``: [b, P] int64 of the prompt, 1 = a real token; ``past``: what came before, None = nothing. ``only_last``:
    [b, 1, H], as of the last layer nothing else is needed.
    """
    cache, final = [], len(network.layers) - 1
    hides = _hiding(mask, embeds.shape[1], past is not None, embeds)
    hidden = embeds
    for place, layer in enumerate(network.layers):
        asking = 1 if only_last and place == final else embeds.shape[1]
        before = None if past is None else past[place]
        hidden, keys, values = _called(layer, hidden, rotary, hides, before, asking)
        cache.append((keys, values))
    return hidden, cache


def _called(layer: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`_through_layer`; where each process has a part of the layer by a call of the module, which gathers it."""
    if not shards.active():
        return _through_layer(layer, *given)
    layer.forward = partial(_through_layer, layer)
    try:
        result: tuple[Tensor, Tensor, Tensor] = layer(*given)
    finally:
        del layer.forward
    return result


def _through_layer(
    layer: Any, hidden: Tensor, rotary: _Rotary, hides: Tensor, past: tuple[Tensor, Tensor] | None, asking: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[b, asking, H] of the last ``asking`` of the L tokens, and keys and values [b, k, M, d]."""
    attended, seen = _attended(layer, hidden, rotary, hides, past, asking)
    hidden = hidden[:, -asking:] + _after(attended, layer, "post_self_attn_layernorm")
    change = layer.mlp(normed(hidden, layer.post_attention_layernorm))
    return hidden + _after(change, layer, "post_mlp_layernorm"), *seen


def _attended(
    layer: Any, hidden: Tensor, rotary: _Rotary, hides: Tensor, past: tuple[Tensor, Tensor] | None, asking: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    attention, before = layer.self_attn, normed(hidden, layer.input_layernorm)
    turns = rotary.at(slice(-asking, None))
    query = _Turned.apply(
        attention.q_proj(before[:, -asking:]), turns.cos * attention.scaling, turns.sin * attention.scaling
    )
    keys = _Turned.apply(attention.k_proj(before), rotary.cos, rotary.sin)
    values = attention.v_proj(before).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    if past is None:
        values = values.contiguous()  # A view that a sharded layer gives back makes FSDP2 warn.
    else:
        keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
    mixed = _Attention.apply(query, keys, values, hides[..., -asking:, :])
    return attention.o_proj(mixed), (keys, values)


def _after(change: Tensor, layer: Any, name: str) -> Tensor:
    """GLM-Image norms what a part of a layer gives, too."""
    norm = getattr(layer, name, None)
    return change if norm is None else normed(change, norm)


def _hiding(mask: Tensor, count: int, after: bool, like: Tensor) -> Tensor:
    """[b or 1, 1, L, M], added to the scores: what comes later, and the padding of the prompt (``mask``, [b, P])."""
    hidden, before = torch.finfo(like.dtype).min, mask.shape[1] if after else 0
    later = like.new_full((count, before + count), hidden).triu_(before + 1)[None, None]
    if bool(mask.all()):
        return later
    padding = pad((mask == 0)[:, None, None], (0, later.shape[-1] - mask.shape[1]))
    return later.masked_fill(padding, hidden)


class _Turned(torch.autograd.Function):
    """[b, L, n d] -> [b, n, L, d], heads apart and turned by the rotary embedding (arXiv 2104.09864): of what is
    turned of a head, the halves (x, y) become (x cos - y sin, y cos + x sin)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        heads = x.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
        return _rotate(heads, cos, sin, x.new_empty(heads.shape), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rows, heads, count, width = outputs[0].shape
        of_x = outputs[0].new_empty(rows, count, heads, width)
        _rotate(outputs[0], cos, sin, of_x.transpose(1, 2), -1)
        return of_x.view(rows, count, heads * width), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: int) -> Tensor:
    torch.mul(heads, cos, out=out)
    half = sin.shape[-1] // 2
    first, second = slice(0, half), slice(half, 2 * half)
    out[..., first].addcmul_(heads[..., second], sin[..., first], value=-direction)
    out[..., second].addcmul_(heads[..., first], sin[..., second], value=direction)
    return out


class _Attention(torch.autograd.Function):
    """Causal softmax attention of grouped queries: [b, h, L, d] (scaled), keys and values [b, k, M, d], of which the
    last L are the queries' own, and what is added to the scores, [b or 1, 1, L, M] -> [b, L, h d].

    By blocks of queries, so that most of what they may not see is not computed.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, hides: Tensor) -> Tensor:
        rows, heads, count, width = query.shape
        key_heads, seen = keys.shape[1:3]
        keys, values = keys.reshape(-1, seen, width), values.reshape(-1, seen, width)
        mixed, weights = query.new_empty(rows, count, heads, width), []
        for block, until in _blocks(count, seen):
            grouped = _grouped(query[:, :, block], key_heads)
            scores = grouped.bmm(keys[:, :until].transpose(1, 2))
            scores.view(rows, key_heads, -1, block.stop - block.start, until).add_(hides[:, None, :, block, :until])
            weights.append(scores.softmax(-1))
            mixed[:, block] = weights[-1].bmm(values[:, :until]).view(rows, heads, -1, width).transpose(1, 2)
        ctx.save_for_backward(query, keys, values, *weights)
        return mixed.view(rows, count, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, keys, values, *weights = ctx.saved_tensors
        rows, heads, count, width = query.shape
        of_heads, seen = outputs[0].view(rows, count, heads, width).transpose(1, 2), keys.shape[1]
        key_heads = len(keys) // rows
        of_query, of_keys, of_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for (block, until), own in zip(_blocks(count, seen), weights, strict=True):
            of_mixed, grouped = _grouped(of_heads[:, :, block], key_heads), _grouped(query[:, :, block], key_heads)
            of_weights = of_mixed.bmm(values[:, :until].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_weights, own, -1, own.dtype)
            of_query[:, :, block] = of_scores.bmm(keys[:, :until]).view(rows, heads, -1, width)
            of_keys[:, :until].baddbmm_(of_scores.transpose(1, 2), grouped)
            of_values[:, :until].baddbmm_(own.transpose(1, 2), of_mixed)
        shape = (rows, key_heads, seen, width)
        return of_query, of_keys.view(shape), of_values.view(shape), None


def _blocks(count: int, seen: int) -> Iterator[tuple[slice, int]]:
    """Of L = ``count`` queries, with how many of the M = ``seen`` keys a block may see."""
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        yield slice(start, stop), seen - count + stop


def _grouped(heads: Tensor, key_heads: int) -> Tensor:
    """[b, h, l, d] -> [b k, h/k l, d]: the queries that share keys, one after the other."""
    return heads.reshape(len(heads) * key_heads, -1, heads.shape[-1])


class _Normed(torch.autograd.Function):
    """RMSNorm (arXiv 1910.07467) of [..., H] with a frozen weight [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(len(weight)).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        weighted = outputs[0] * weight
        along = torch.linalg.vecdot(weighted, x)[..., None] * inverse.pow(3).div_(-len(weight))
        return weighted.mul_(inverse).addcmul_(x, along), None, None


def normed(hidden: Tensor, norm: nn.Module) -> Tensor:
    """``norm``, a model's RMSNorm, of [..., H]."""
    result: Tensor = _Normed.apply(hidden, norm.weight, norm.variance_epsilon)
    return result
