"""Attention backends by their libraries' names, and compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from visual_grpo.common import console
from visual_grpo.common.device import resolve_device
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig
from visual_grpo.models.module import Module

ATTENTION = {"tokens": ("sdpa", "eager"), "flow": tuple(backend.value for backend in AttentionBackendName)}
"""Kind of module -> names of transformers, without those that refuse the masks of generation, or of diffusers."""
VARIANTS = 64
"""Most graphs of one kind of block: with gradient or without, adapter on or off, one row or more, masked or not."""


def attention_of(config: ModelConfig, modules: Mapping[str, Module]) -> dict[str, str]:
    """Module -> its attention backend, where ``model.attention`` names one.

    Raises UserError for a name that the module's library does not know, or that does not work here with a gradient.
    """
    named = config.attention
    chosen = named if isinstance(named, dict) else dict.fromkeys(modules if named else (), named or "")
    for module, backend in chosen.items():
        if module not in modules:
            raise UserError(f"model.attention names {module!r}; the family has the modules {', '.join(modules)}.")
        kind = modules[module].kind
        if backend not in ATTENTION[kind]:
            raise UserError(
                f"model.attention is {backend!r}, which {module} cannot compute with; expected one of"
                f" {', '.join(ATTENTION[kind])}, for each of several modules as model.attention.MODULE=NAME, or null."
            )
        if kind == "flow":
            _try_backend(backend, config)
    return chosen


def _try_backend(backend: str, config: ModelConfig) -> None:
    """Computes a small attention and its gradient."""
    device = resolve_device(config.device)
    query = torch.zeros(1, 128, 2, 64, device=device, dtype=getattr(torch, config.dtype), requires_grad=True)
    try:
        with torch.enable_grad(), attention_backend(backend):
            torch.autograd.grad(dispatch_attention_fn(query, query, query).sum(), query)
    except Exception as error:  # Of whatever library the backend calls.
        raise UserError(
            f"model.attention is {backend!r}, which does not work on {device} with {config.dtype} and a gradient:"
            f" {str(error).strip()} Install what it needs, or choose a different one of {', '.join(ATTENTION['flow'])}."
        ) from error


def set_execution(networks: Mapping[str, Any], modules: Mapping[str, Module], config: ModelConfig) -> None:
    """Applies ``model.attention`` and ``model.compile`` to the networks, by the names of their modules.

    torch does not choose cuDNN's attention by itself from here on: its backward pass gives NaN for some lengths and
    memory layouts (pytorch/pytorch issue 196678; on an H200, torch 2.11, small FLUX). ``_native_cudnn`` asks for it.

    Raises UserError where a network has no choice of attention, or no blocks to compile.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    for name, backend in attention_of(config, modules).items():
        network = networks[name]
        if modules[name].kind == "tokens":
            network.set_attn_implementation(backend)
            continue
        processors = [getattr(module, "processor", None) for module in network.modules()]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            raise UserError(
                f"model.attention is {backend!r}, but diffusers' {type(network).__name__} always calls torch's"
                " scaled_dot_product_attention. Leave model.attention out."
            )
        with attention_backend(backend):  # The library would set it for all other models, too.
            network.set_attention_backend(backend)
    if config.compile:
        for name, network in networks.items():
            compile_blocks(network.model.language_model if modules[name].kind == "tokens" else network)


def compile_blocks(network: Any) -> None:
    """Compiles the repeated blocks, each kind once for all and for any batch and length.

    Where that fails, all go on uncompiled after one line. Raises UserError for a network that names no such blocks.
    """
    # As diffusers' compile_repeated_blocks, which not every model of it names blocks for.
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    blocks = [block for block in network.modules() if type(block).__name__ in names]
    if not blocks:
        raise UserError(
            f"model.compile is true, but {type(network).__name__} names no repeated blocks (_repeated_blocks or"
            " _no_split_modules). Leave model.compile out."
        )
    for block in blocks:
        block.compile(dynamic=True, fullgraph=True, recompile_limit=VARIANTS)
        block._compiled_call_impl = _with_fallback(block, blocks)


def _with_fallback(block: nn.Module, blocks: Sequence[nn.Module]) -> Callable[..., Any]:
    compiled: Any = block._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # A whole graph fails before any of it runs.
            if block._compiled_call_impl is not None:
                for each in blocks:
                    each._compiled_call_impl = None
                reason = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
                console.note(
                    f"Warning: {type(block).__name__} cannot be compiled here, so model.compile has no effect: {reason}"
                )
        return block._call_impl(*args, **kwargs)

    return call
