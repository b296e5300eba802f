"""Generates tokens with a small model on a CPU, in fewer and cheaper operations than the model's own layers take.

For a few rows of a small model most of the time is not the matrix products but calling modules and growing the cache.
Here query, key and value are one product, which also gives queries and keys turned by 90 degrees, as the rotary
embedding (arXiv 2104.09864) adds them; keys and values are written to memory of known length. For layers of the form
of Qwen2.5-VL's and GLM-Image's language models (RMSNorm before or on both sides of attention and gated MLP, grouped
queries, half-rotated rotary embedding), without gradient.

Shapes: b rows, P prompt tokens (left-padded), T generated tokens, H hidden width, h and k heads of queries and of keys,
d their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from visual_grpo.hardware import shards
from visual_grpo.policies.fused_layers import known
from visual_grpo.policies.prompt_cache import Prefix


def fits(model: Any, prefix: Prefix) -> bool:
    """Whether `FusedSteps` can be asked: layers that are known, adapters merged or off."""
    layers = model.model.language_model.layers
    return (
        prefix.hidden.device.type == "cpu"
        and not shards.active()
        and known(model, prefix.hidden)
        and all(_is_plain(part) for layer in layers for part in (*layer.self_attn.children(), *layer.mlp.children()))
    )


class FusedSteps:
    """Satisfies `token_steps.TokenSteps`."""

    def __init__(self, model: Any, prefix: Prefix, length: int, mask: Tensor | None) -> None:
        """Takes over the cache of ``prefix``; at most T = ``length`` tokens. The weights are those of now.

        ``mask``: [b, 1, 1, P + T - 1], added to the scores; None = nothing is hidden.
        """
        network = model.model.language_model
        places = prefix.mask.shape[1] + length - 1  # The last token is drawn and not read again.
        cos, sin = network.rotary_emb(prefix.hidden, prefix.token_positions)
        self._layers = [
            _Layer(layer, grown, places, cos.shape[-1])
            for layer, grown in zip(network.layers, prefix.cache.layers, strict=True)
        ]
        self._norm, self._place = network.norm, prefix.mask.shape[1]
        straight = (0, self._layers[0].width - cos.shape[-1])  # What of a head is not turned.
        self._tables = zip(pad(cos, straight, value=1.0).split(1, 1), pad(sin, straight).split(1, 1), strict=True)
        self._mask = mask

    def next(self, embeds: Tensor) -> Tensor:
        """[b, 1, H] after the token with these embeddings, [b, 1, H]."""
        cos, sin = next(self._tables)
        hidden = embeds[:, 0]
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, self._mask, self._place)
        self._place += 1
        return _normed(hidden, self._norm)[:, None]


class _Layer:
    def __init__(self, layer: Any, grown: Any, places: int, turning: int) -> None:
        """``grown``: the layer's part of the cache, keys and values [b, k, P, d], which it gives up. ``turning``: how
        many of a head's first d numbers the rotary embedding turns."""
        attention, mlp = layer.self_attn, layer.mlp
        self._small = [
            norm.variance_epsilon * len(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._after_attention = getattr(layer, "post_self_attn_layernorm", None)
        self._after_mlp = getattr(layer, "post_mlp_layernorm", None)
        self._rows, self._key_heads, before, self.width = grown.keys.shape
        # Keys [b k, d, places], which is how a product with them is quickest; values [b k, places, d].
        self._keys = grown.keys.new_empty(self._rows * self._key_heads, self.width, places)
        self._values = grown.keys.new_empty(self._rows * self._key_heads, places, self.width)
        self._new_keys = self._keys.view(self._rows, self._key_heads, self.width, places).unbind(-1)
        self._new_values = self._values.view(self._rows, self._key_heads, places, self.width).unbind(2)
        self._keys[..., :before] = grown.keys.flatten(0, 1).transpose(1, 2)
        self._values[:, :before] = grown.values.flatten(0, 1)
        grown.keys = grown.values = None
        self._heads = self._key_heads * attention.num_key_value_groups
        mixing, self._mixing_bias = self._mixed(attention, turning)
        self._mixing = _scale(layer.input_layernorm)[:, None] * mixing
        self._out = _weight(attention.o_proj).t()
        if hasattr(mlp, "gate_up_proj"):
            gate_up, self._activation = _weight(mlp.gate_up_proj), mlp.activation_fn
        else:
            gate_up, self._activation = torch.cat([_weight(mlp.gate_proj), _weight(mlp.up_proj)]), mlp.act_fn
        self._gate_up = (gate_up * _scale(layer.post_attention_layernorm)).t()
        self._down = _weight(mlp.down_proj).t()

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, place: int) -> Tensor:
        """[b, H] -> [b, H] for the token that is put at ``place``; ``cos``, ``sin``: [b, 1, d], ``mask``: added to the
        scores of all places."""
        attended = self._attended(_of_length_one(hidden, self._small[0]), cos, sin, mask, place)
        hidden = _added(hidden, attended, self._out, self._after_attention)
        gate, up = (_of_length_one(hidden, self._small[1]) @ self._gate_up).chunk(2, -1)
        return _added(hidden, self._activation(gate).mul_(up), self._down, self._after_mlp)

    def _attended(self, normed: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, place: int) -> Tensor:
        rows, heads, key_heads, width = self._rows, self._heads, self._key_heads, self.width
        mixed = torch.addmm(self._mixing_bias, normed, self._mixing).view(rows, -1, width)
        turning, turned, value = mixed.split([heads + key_heads, heads + key_heads, key_heads], 1)
        rotated = (turning * cos).addcmul_(turned, sin)
        self._new_keys[place].copy_(rotated[:, heads:])
        self._new_values[place].copy_(value)
        query = rotated[:, :heads].reshape(rows * key_heads, -1, width)
        scores = query.bmm(self._keys[..., : place + 1])
        if mask is not None:
            scores.view(rows, key_heads, -1, place + 1).add_(mask[..., : place + 1])
        return scores.softmax(-1).bmm(self._values[:, : place + 1]).view(rows, -1)

    def _mixed(self, attention: Any, turning: int) -> tuple[Tensor, Tensor]:
        """[H, (2 h + 3 k) d] and its bias: queries and keys, both once more turned by 90 degrees, and values; the
        queries with the scale of the scores."""
        scaled = [(attention.q_proj, attention.scaling), (attention.k_proj, 1.0)]
        straight = torch.cat([_with_bias(projection) * scale for projection, scale in scaled])
        mixed = torch.cat([straight, self._turned(straight, turning), _with_bias(attention.v_proj)])
        return mixed[:, :-1].t(), mixed[:, -1].contiguous()

    def _turned(self, weight: Tensor, turning: int) -> Tensor:
        """Of the first ``turning`` outputs of each head the halves (x, y) become (-y, x), the others 0."""
        first, second, _ = weight.view(-1, self.width, weight.shape[-1]).split(
            [turning // 2, turning // 2, self.width - turning], 1
        )
        return pad(torch.cat([-second, first], 1), (0, 0, 0, self.width - turning)).view(weight.shape)


def _is_plain(part: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is all that it does, or none."""
    from peft.tuners.lora import LoraLayer

    if isinstance(part, LoraLayer):
        return (part.merged or part.disable_adapters) and _is_plain(part.get_base_layer())
    return not hasattr(part, "weight") or (type(part) is nn.Linear and part.weight.dtype == torch.float32)


def _linear(part: Any) -> nn.Linear:
    linear: nn.Linear = part.get_base_layer() if hasattr(part, "get_base_layer") else part
    return linear


def _weight(part: Any) -> Tensor:
    return _linear(part).weight.detach()


def _with_bias(part: Any) -> Tensor:
    """[outputs, inputs + 1]."""
    linear = _linear(part)
    bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
    return torch.cat([linear.weight.detach(), bias[:, None]], 1)


def _scale(norm: Any) -> Tensor:
    """[H]: what RMSNorm does after `_of_length_one`, which is done by the weights that come next."""
    weight: Tensor = norm.weight.detach()
    return weight * len(weight) ** 0.5


def _of_length_one(hidden: Tensor, small: float) -> Tensor:
    """x / sqrt(|x|^2 + small) for each row x of [b, H]."""
    return torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_().add_(small).rsqrt_() * hidden


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _added(hidden: Tensor, change: Tensor, weight: Tensor, norm: Any | None) -> Tensor:
    """``hidden`` plus ``change @ weight``, which GLM-Image norms before."""
    return torch.addmm(hidden, change, weight) if norm is None else hidden + _normed(change @ weight, norm)
