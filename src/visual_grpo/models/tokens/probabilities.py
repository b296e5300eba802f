"""Sampling and scoring of tokens under exactly one distribution.

Shapes: B rows, T generated tokens, H hidden width, V token ids that may be sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper

from visual_grpo.common import console
from visual_grpo.config import SamplerConfig

_TOP_K = 50
"""Default of ``generate`` where a generation_config does not name top_k."""
CHUNK = 2048
"""Rows of the [rows, V] logits that exist at a time."""
_CACHED = 2**17
"""Logits at a time on a CPU: half a MiB, which stays in a core's cache from one operation to the next."""
_LEAST = 64
"""Rows at a time on a CPU: fewer make slow products."""
ROUNDING = {torch.bfloat16: 0.003, torch.float16: 0.003 / 8}
"""Mean |log ratio| in nats, for one layer and logits of standard deviation 1, between decoding from a cache and scoring
whole sequences. It grows with the root of the layers and with the deviation (`benchmarks/rounding_gap.py`)."""

_NOT_APPLIED = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "top_h", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), None),
}
"""Settings of a generation_config that change what ``generate`` samples, with the value that changes nothing."""


@dataclass(frozen=True, kw_only=True)
class TokenSampler:
    """The distribution that tokens are sampled from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, settings: SamplerConfig, stock: GenerationConfig, *, do_sample: bool) -> Self:
        """Samples as ``generate`` does: a setting of None is that of ``stock``, the model's generation_config.

        Without ``do_sample``, decoding is greedy unless a temperature or a top_k is given.
        """
        if not do_sample and settings.temperature is None and settings.top_k is None:
            return cls(top_k=1)

        def chosen(name: str, default: float) -> Any:
            given = (getattr(settings, name), getattr(stock, name), default)
            return next(value for value in given if value is not None)

        temperature = chosen("temperature", 1.0) or 1.0  # A config of greedy decoding may name 0.
        return cls(temperature=temperature, top_p=chosen("top_p", 1.0), top_k=chosen("top_k", _TOP_K))

    @staticmethod
    def warn_of_what_is_not_applied(stock: GenerationConfig, path: str, ids: float = math.inf) -> None:
        """Names the settings of ``stock``, the generation_config of the model ``path``, that no sampler here has.

        Only token ids below ``ids`` can be sampled, so that others need not be suppressed.
        """
        given = {name: getattr(stock, name, None) for name in _NOT_APPLIED}
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            given[name] = [token for token in given[name] or () if token < ids]
        left = [f"{name} = {value}" for name, value in given.items() if value not in (None, [], {}, _NOT_APPLIED[name])]
        if left:
            console.note(
                f"Warning: {path} is sampled without {', '.join(left)} of its generation_config: a token's log-prob is"
                " the model's own."
            )

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    def warp(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B, V] float32 in the order of ``generate``: temperature, top-k, top-p.

        Of equal logits, all are kept, but ``top_k`` = 1 keeps the first alone, as greedy decoding does.
        """
        warped = logits.float() / self.temperature
        unused: Any = None  # The warpers' input_ids argument, which they do not read.
        if self.top_k == 1:
            first = warped.argmax(-1, keepdim=True)
            warped = torch.full_like(warped, -torch.inf).scatter(-1, first, warped.gather(-1, first))
        elif self.top_k:
            warped = TopKLogitsWarper(min(self.top_k, warped.shape[-1]))(unused, warped)
        if self.top_p < 1:
            warped = TopPLogitsWarper(self.top_p)(unused, warped)
        return warped


def sample_ids(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: [B, V] probabilities and [B] uniforms in [0, 1) -> [B] token ids.

    One number a token makes a row's tokens depend on its own seed alone, and lets two policies be
    compared on common random numbers. The sum runs in float64, so that no tail is lost.
    """
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    points = (uniforms.double() * cdf[:, -1])[:, None]
    ids = torch.searchsorted(cdf, points, right=True)[:, 0]
    return ids.clamp(max=probabilities.shape[-1] - 1)


def row_uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[B, count] float64 uniforms, each row from a generator with that row's seed."""
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return torch.stack(rows)


class _ChosenLogProbs(torch.autograd.Function):
    """``log softmax(h W^T / temperature)[y]`` for a frozen head W, without keeping [rows, V].

    The gradient ``(W[y] - softmax W) / temperature`` is formed in the forward, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, bias: Tensor | None
    ) -> Tensor:
        values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        at_once = CHUNK
        if hidden.device.type == "cpu":
            at_once = min(CHUNK, max(_LEAST, _CACHED // len(head)))
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            logits = (hidden[part] @ head.t()).float()
            if bias is not None:
                logits += bias
            log_probs = logits.div_(temperature).log_softmax(-1)
            values[part] = log_probs.gather(1, tokens[part, None])[:, 0]
            if gradient is not None:
                expected = log_probs.exp_().to(head.dtype) @ head
                gradient[part] = (head[tokens[part]] - expected) / temperature
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return outputs[0][:, None].to(gradient.dtype) * gradient, None, None, None, None


def chosen_log_probs(
    hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, bias: Tensor | None = None
) -> Tensor:
    """Log-probability of each chosen token, [B, T, H] and [B, T] int64 -> [B, T] float32.

    ``head`` [V, H] is frozen: no gradient reaches it. ``bias`` [V] float32 is added to its logits: 0, or -inf for an id
    that may not be sampled and is not among ``tokens``.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    values: Tensor = _ChosenLogProbs.apply(flat, head.detach(), tokens.reshape(-1), temperature, bias)
    return values.view(tokens.shape)


def deviation(log_probs: Tensor) -> Tensor:
    """Standard deviation of [B, V] log-probs over the ids that may be sampled, which equals their logits', [B]."""
    allowed = log_probs.isfinite()
    count = allowed.sum(-1, keepdim=True)
    values = log_probs.masked_fill(~allowed, 0.0)
    spread = (values - values.sum(-1, keepdim=True) / count).masked_fill(~allowed, 0.0)
    return (spread.square().sum(-1) / count[:, 0]).sqrt()


def entropy(log_probs: Tensor, probabilities: Tensor) -> Tensor:
    """Shannon entropy in nats, [B], of [B, V] log-probs and their exponentials; ids of probability 0 add nothing."""
    return -(probabilities * log_probs.clamp(min=-1e9)).sum(-1)


def expected_gap(network: Any, dtype: torch.dtype, deviation: float) -> float:
    """Mean |log ratio| in nats that rounding alone makes between sampler and replay of a transformers model.

    ``deviation``: standard deviation of its logits, divided by the temperature, over the ids that may be sampled.
    """
    layers: int = network.config.get_text_config().num_hidden_layers
    return ROUNDING[dtype] * math.sqrt(layers) * deviation
