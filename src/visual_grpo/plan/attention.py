"""Fused attention on tensors without values: the kernel that the planned device would take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from visual_grpo.plan.replaced import replaced

aten = torch.ops.aten


@contextmanager
def fused_attention(device: str) -> Iterator[None]:
    """Meta tensors alone would take the unfused formula, whose memory grows with the square of the length.

    A CUDA device takes flash attention in half precision without a mask, and the memory-efficient kernel otherwise; a
    CPU has only one such kernel. ``device``: cpu or cuda, the kind that is planned for.
    """
    kernel = _on_cpu if device == "cpu" else _on_cuda

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "meta":
            return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        return kernel(query, key, value, attn_mask, is_causal, scale)

    real = F.scaled_dot_product_attention
    # No TorchFunctionMode: torch leaves it while it goes backward, where checkpoints run attention again.
    with replaced(F, "scaled_dot_product_attention", lambda _: attend):
        yield


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    if mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:  # This kernel knows no groups of queries.
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    keep = torch.is_grad_enabled() and any(part.requires_grad for part in (q, k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, keep, 0.0, causal, scale=scale)[0]


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[0]
