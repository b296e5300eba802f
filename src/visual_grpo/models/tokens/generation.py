"""Generates tokens with a cache that grows by each token or, on a GPU, is allocated in full and run by a CUDA graph.

Masks and rotary tables of all tokens are made once and passed to the language model's layers: its forward would make
them for each token, and read the mask's values, for which the host waits for the GPU.
Shapes: B rows (b of them), P prompt tokens (left-padded), T generated tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import alike, captured, phase
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.quantized import quantized_layers
from visual_grpo.models.rows import distinct
from visual_grpo.models.tokens.interface import TokenModel, TokenTrajectory
from visual_grpo.models.tokens.probabilities import TokenSampler, deviation, entropy, row_uniforms, sample_ids
from visual_grpo.models.tokens.prompt_cache import LayerCache, PlacedLayerCache, Prefix, Prompts, prefill, run_layer

E = TypeVar("E", bound=Prompts)

EOS_CHECK_INTERVAL = 8
"""Tokens between two checks of whether all rows have ended, each of which waits for the GPU."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens(Generic[E]):
    """A trajectory and its sampler's measurements."""

    trajectory: TokenTrajectory[E]
    log_probs: Tensor
    """[B, T] float32 at the sampler's temperature, before any truncation."""
    entropy: Tensor
    """[B, T] float32 of the same distributions, nats."""
    deviation: Tensor | None = None
    """[B, T] float32, standard deviation of the logits at the sampler's temperature; in half precision only, where
    rounding grows with it."""


@phase("tokens")
@torch.no_grad()
def sample_tokens(
    model: TokenModel[E],
    records: Sequence[PromptRecord],
    seeds: Sequence[int],
    sampler: TokenSampler,
    batch: int,
) -> SampledTokens[E]:
    """Samples T tokens for each of B records, ``batch`` rows at a time.

    Row i is a function of its record, ``seeds[i]`` and the weights.

    Raises UserError where the records differ in their number of source images.
    """
    firsts, prompt_of_row = distinct(records)
    prompts = model.encode(firsts)
    uniforms = row_uniforms(seeds, prompts.token_positions.shape[-1])
    parts = [
        _sample_batch(model, prompts, prompt_of_row[rows], uniforms[rows], sampler)
        for rows in torch.arange(len(records)).split(batch)
    ]
    tokens, log_probs, entropies, deviations = (torch.cat(column) for column in zip(*parts, strict=True))
    ended = is_end(model, tokens)
    mask = ((ended.cumsum(1) - ended.long()) == 0).cpu()
    trajectory = TokenTrajectory(prompts=prompts, prompt_of_row=prompt_of_row, tokens=tokens, mask=mask)
    return SampledTokens(
        trajectory=trajectory,
        log_probs=log_probs.cpu(),
        entropy=entropies.cpu(),
        deviation=deviations.cpu() if _is_half(model) else None,
    )


def is_end(model: TokenModel[E], tokens: Tensor) -> Tensor:
    """Returns True for tokens that end a row, in the shape of ``tokens``."""
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in model.ends:  # A tensor of ids would be copied to the GPU for every token.
        ended |= tokens == end
    return ended


def _sample_batch(
    model: TokenModel[E],
    prompts: Prompts,
    prompt_of_row: Tensor,
    uniforms: Tensor,
    sampler: TokenSampler,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[b, T] tokens, log-probs, entropies and deviations, token by token after one prefill per prompt.

    T columns are returned whether or not every row ends before, so that batches can be joined.
    """
    prefix = prefill(model.network, prompts, prompt_of_row)
    hidden, steps = prefix.hidden, token_steps(model.network, prefix, uniforms.shape[1])
    embed = model.network.model.get_input_embeddings()
    padding = model.ends[0] if model.ends else 0
    tokens = torch.full(uniforms.shape, padding, device=hidden.device)
    log_probs, entropies, deviations = torch.zeros(3, *uniforms.shape, device=hidden.device)
    # Copied before the first token: each copy would make the GPU wait for the host.
    uniforms = uniforms.to(hidden.device)
    done = torch.zeros(len(tokens), dtype=torch.bool, device=hidden.device)
    for step in alike(range(uniforms.shape[1])):
        if step:
            hidden = steps.next(embed(tokens[:, step - 1, None]))
        logits = (hidden[:, -1] @ model.head.t()).float()
        if model.bias is not None:
            logits += model.bias
        plain = (logits / sampler.temperature).log_softmax(-1)
        probabilities = plain.exp()
        chosen = sampler.warp(logits).softmax(-1) if sampler.truncates else probabilities
        token = sample_ids(chosen, uniforms[:, step])
        if model.ends:
            token = torch.where(done, padding, token)
        tokens[:, step] = token
        log_probs[:, step] = plain.gather(1, token[:, None])[:, 0]
        entropies[:, step] = entropy(plain, probabilities)
        if _is_half(model):
            deviations[:, step] = deviation(plain)
        if model.ends:
            done |= is_end(model, token)
            if step % EOS_CHECK_INTERVAL == EOS_CHECK_INTERVAL - 1 and done.all():
                break
    return tokens, log_probs, entropies, deviations


def _is_half(model: TokenModel[Any]) -> bool:
    return model.head.dtype != torch.float32


def token_steps(model: Any, prefix: Prefix, length: int) -> TokenSteps | CapturedSteps:
    """The steps after the prompts of ``prefix``, whose cache they take over; ``length``: T, the most tokens.

    Raises UserError for a model of sliding windows, which `_mask` does not know.
    """
    if any(layer.is_sliding for layer in DynamicCache(config=model.config.get_text_config()).layers):
        raise UserError(f"{type(model).__name__} has layers that attend to a window only, which cannot be sampled.")
    captures = prefix.hidden.is_meta or (prefix.hidden.is_cuda and can_be_captured(model))
    return (CapturedSteps if captures else TokenSteps)(model, prefix, length)


def can_be_captured(model: Any) -> bool:
    """False for layers on several GPUs, whose gathering no graph can hold, and for untested bitsandbytes kernels."""
    return not isinstance(model.model.language_model.layers[0], FSDPModule) and not quantized_layers(model)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the same stream for all batches: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


class TokenSteps:
    """Steps with a cache that grows by each token. It holds past tokens only, so no mask hides later ones."""

    def __init__(self, model: Any, prefix: Prefix, length: int) -> None:
        self._model, self._cache, self._token = model, prefix.cache, 0
        self._prompt = prefix.mask.shape[1]
        self._rotary = _rotary(model, prefix)
        self._mask: Tensor | None = None  # sdpa needs none where nothing is padded.
        if _attention(model) != "sdpa" or bool((prefix.mask == 0).any()):
            self._mask = _mask(model, prefix, length)

    def next(self, embeds: Tensor) -> Tensor:
        """[b, 1, H] after the next token, with these embeddings, [b, 1, H]."""
        at, self._token = self._token, self._token + 1
        mask = None if self._mask is None else self._mask[..., : self._prompt + self._token]
        cos, sin = self._rotary
        return layers(self._model, embeds, mask, (cos[:, at : at + 1], sin[:, at : at + 1]), self._cache)


class CapturedSteps:
    """Steps in a cache that has all places, with a mask that hides the places of later tokens.

    So each token runs the same kernels on the same memory. They are captured once for a batch and launched together:
    launching them one by one takes the host several times as long as they take the GPU.
    """

    def __init__(self, model: Any, prefix: Prefix, length: int) -> None:
        self._model, self._prompt, self._token = model, prefix.mask.shape[1], 0
        self._mask = _mask(model, prefix, length)
        self._mask_of_tokens = self._mask[..., self._prompt :].fill_(_masked(model, prefix.hidden.dtype))
        self._place = torch.full((1,), self._prompt, device=prefix.hidden.device)
        places = self._mask.shape[-1]
        self._cache = [PlacedLayerCache(layer, places, self._place) for layer in prefix.cache]
        self._tables = _rotary(model, prefix)
        self._rotary = self._tables[0][:, :1].clone(), self._tables[1][:, :1].clone()
        self._embeds = torch.empty_like(prefix.hidden)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result = prefix.hidden

    def next(self, embeds: Tensor) -> Tensor:
        """[b, 1, H] after the next token, with these embeddings, [b, 1, H]; overwritten by the next call."""
        at, self._token = self._token, self._token + 1
        self._embeds.copy_(embeds)
        for current, table in zip(self._rotary, self._tables, strict=True):
            current.copy_(table[:, at : at + 1])
        self._mask_of_tokens[..., at] = 0
        self._place.fill_(self._prompt + at)
        if embeds.is_meta:  # A plan counts what the graph would run.
            with captured() if can_be_captured(self._model) else nullcontext():
                return self._step()
        if self._graph is None:
            self._capture()
        assert self._graph is not None, "just captured"
        self._graph.replay()
        return self._result

    def _step(self) -> Tensor:
        return layers(self._model, self._embeds, self._mask, self._rotary, self._cache)

    def _capture(self) -> None:
        """Runs a step uncaptured, so that libraries choose kernels, and captures it. Both write the same place."""
        beside = _side_stream(self._embeds.device)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread only: a reward may run in a different one.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = self._step()


def layers(
    model: Any, embeds: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Sequence[LayerCache]
) -> Tensor:
    """Hidden states [b, 1, H] of one token more than ``cache`` holds, by the language model's layers themselves."""
    network, hidden = model.model.language_model, embeds
    for layer, own in zip(network.layers, cache, strict=True):
        hidden = run_layer(layer, hidden, mask, rotary, own)
    normed: Tensor = network.norm(hidden)
    return normed


def _rotary(model: Any, prefix: Prefix) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the generated tokens' positions, [b, T, width of a head] twice."""
    tables: tuple[Tensor, Tensor] = model.model.language_model.rotary_emb(prefix.hidden, prefix.token_positions)
    return tables


def _mask(model: Any, prefix: Prefix, length: int) -> Tensor:
    """[b, 1, 1, P + T - 1], which attention adds to its scores; it hides the prompts' padding.

    The last token is sampled and not read again.
    """
    rows, before = prefix.mask.shape
    mask = prefix.hidden.new_zeros(rows, 1, 1, before + length - 1)
    mask[..., :before].masked_fill_(prefix.mask[:, None, None] == 0, _masked(model, mask.dtype))
    return mask


def _masked(model: Any, dtype: torch.dtype) -> float:
    """The value that transformers hides by: -inf for sdpa, and the smallest number in its eager attention."""
    return -torch.inf if _attention(model) == "sdpa" else torch.finfo(dtype).min


def _attention(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)
