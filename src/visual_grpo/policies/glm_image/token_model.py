"""GLM-Image's language model as a sampler and scorer of image tokens.

Shapes: N distinct prompts, B rows, P prompt tokens (left-padded), T generated tokens (preview grid, then
the image's own; the end token is not generated since its place is known), H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.policies.glm_image.sources import SourceEncoder, distinct, source_count
from visual_grpo.policies.prompt_cache import Prompts, forward, hidden_shared, hidden_whole, prefill
from visual_grpo.policies.tokens import TokenSampler, chosen_log_probs, draw, entropy, row_uniforms
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from transformers import BatchFeature, GlmImageForConditionalGeneration

    from visual_grpo.policies.glm_image.processor import PreviewProcessor


@dataclass(frozen=True, kw_only=True)
class TokenGrid:
    """What is generated: preview rows x columns, then image rows x columns; an edit has no preview."""

    preview: tuple[int, int]
    image: tuple[int, int]

    @property
    def preview_count(self) -> int:
        return self.preview[0] * self.preview[1]

    @property
    def count(self) -> int:
        return self.preview_count + self.image[0] * self.image[1]


@dataclass(frozen=True, kw_only=True)
class EncodedPrompts:
    """N distinct prompts as the language model reads them."""

    ids: Tensor
    """[N, P] int64, left-padded."""
    mask: Tensor
    """[N, P] int64, 1 = a real token."""
    positions: Tensor
    """[3, N, P] int64: temporal, height and width position of every prompt token."""
    token_positions: Tensor
    """[3, N, T] int64: the same of the generated tokens."""
    grid: TokenGrid
    """Of the generated tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenTrajectory:
    """Everything the replay needs of B sampled rows."""

    encoded: EncodedPrompts
    prompt_of_row: Tensor
    """[B] int64, row -> index among the N encoded prompts."""
    tokens: Tensor
    """[B, T] int64."""
    reference_log_probs: Tensor | None = None
    """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """A trajectory with what was measured while it was drawn."""

    trajectory: TokenTrajectory
    log_probs: Tensor
    """[B, T] float32 at the sampler's temperature, before any truncation."""
    entropy: Tensor
    """[B, T] float32 of the same distributions, nats."""


class TokenModel:
    """Samples and scores the tokens of images of one size; an adapter injected into ``model`` takes part."""

    def __init__(
        self,
        model: GlmImageForConditionalGeneration,
        processor: PreviewProcessor,
        size: tuple[int, int],
        sources: SourceEncoder,
        *,
        batch: int,
        share_prefix: bool,
    ) -> None:
        """
        Args:
            size: (height, width) in pixels, multiples of 32.
            sources: encodes the source images of edits.
            batch: rows sampled at a time.
            share_prefix: score each distinct prompt once; impossible under gradient checkpointing.
        """
        self.model, self.processor, self.size, self.sources = model, processor, size, sources
        self.batch, self.share_prefix = batch, share_prefix
        self.codebook: int = model.config.vq_config.num_embeddings

    def sampler(self, temperature: float | None, top_p: float | None, top_k: int | None) -> TokenSampler:
        """What is None is the model's own generation_config."""
        stock = self.model.generation_config
        temperature = temperature if temperature is not None else stock.temperature
        top_p = top_p if top_p is not None else stock.top_p
        # generate() uses 50 where a generation_config does not name top_k.
        stock_k = stock.top_k if stock.top_k is not None else 50
        return TokenSampler(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k if top_k is not None else stock_k,
        )

    def grid(self, sources: int) -> TokenGrid:
        """What is generated for a record with so many source images."""
        rows, columns, *preview = self.processor._get_target_shape(*self.size)
        return TokenGrid(preview=(0, 0) if sources else (preview[0], preview[1]), image=(rows, columns))

    def processed(self, records: Sequence[PromptRecord]) -> BatchFeature:
        """What the model's own ``generate`` takes: left-padded ids, mask and grids, and the sources' pixels."""
        messages = [
            [
                {
                    "role": "user",
                    "content": [
                        *({"type": "image", "image": source.image} for source in sources),
                        {"type": "text", "text": record.prompt},
                    ],
                }
            ]
            for record, sources in zip(records, self.sources.of(records), strict=True)
        ]
        return self.processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={
                "padding": True,
                "padding_side": "left",
                "target_h": self.size[0],
                "target_w": self.size[1],
            },
        ).to(self.model.device)

    def encode(self, records: Sequence[PromptRecord]) -> EncodedPrompts:
        """Sources' tokens and prompts as ids, with the three-dimensional positions of GLM-Image's rotary embedding.

        The model computes these positions itself only inside ``generate``; a forward without them is
        silently wrong by 0.05 to 1.2 nats a token.
        """
        inputs = self.processed(records)
        model = self.model.model
        ids, grid = self._with_source_tokens(inputs["input_ids"], records), self.grid(source_count(records))
        positions, _ = model.get_rope_index(
            ids,
            image_grid_thw=inputs["image_grid_thw"],
            images_per_sample=inputs["images_per_sample"],
            attention_mask=inputs["attention_mask"],
        )
        token_positions = model._cached_decode_position_ids.permute(1, 0, 2)[:, :, : grid.count]
        # What get_rope_index left behind would be taken for its own by a later generate().
        model._cached_decode_position_ids = model.rope_deltas = model._prefill_len = None
        return EncodedPrompts(
            ids=ids,
            mask=inputs["attention_mask"],
            positions=positions,
            token_positions=token_positions,
            grid=grid,
        )

    def _with_source_tokens(self, ids: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[N, P] with each image placeholder replaced by the token of its patch."""
        tokens = [source.tokens.flatten() for sources in self.sources.of(records) for source in sources]
        if not tokens:
            return ids
        return ids.masked_scatter(ids == self.model.config.image_token_id, torch.cat(tokens).to(ids.device))

    @torch.no_grad()
    def sample(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: TokenSampler) -> SampledTokens:
        """T tokens for each of B records; row i is a function of its record, ``seeds[i]`` and the weights.

        Raises UserError where the records differ in their number of source images.
        """
        firsts, prompt_of_row = distinct(records)
        encoded = self.encode(firsts)
        uniforms = row_uniforms(seeds, encoded.grid.count)
        parts = [
            self._sample_batch(encoded, prompt_of_row[rows], uniforms[rows], sampler)
            for rows in torch.arange(len(records)).split(self.batch)
        ]
        tokens, log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        trajectory = TokenTrajectory(encoded=encoded, prompt_of_row=prompt_of_row, tokens=tokens)
        return SampledTokens(trajectory=trajectory, log_probs=log_probs.cpu(), entropy=entropies.cpu())

    def log_probs(self, trajectory: TokenTrajectory, rows: Tensor, temperature: float) -> Tensor:
        """[b, T] float32 of the stored tokens of ``rows`` ([b]), on the CPU, under the weights as they are now."""
        tokens = trajectory.tokens[rows]
        hidden_of = hidden_shared if self.share_prefix else hidden_whole
        hidden = hidden_of(self.model, self._prompts(trajectory.encoded), trajectory.prompt_of_row[rows], tokens)
        return chosen_log_probs(hidden, self.head, tokens, temperature).cpu()

    @property
    def head(self) -> Tensor:
        """[V, H] output rows of the ids the DiT can embed; the head can also emit others, which crash it."""
        weight: Tensor = self.model.lm_head.weight
        return weight[: self.codebook]

    def _sample_batch(
        self, encoded: EncodedPrompts, prompt_of_row: Tensor, uniforms: Tensor, sampler: TokenSampler
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes token by token from one prefill per prompt, its cache repeated for every row."""
        prefix = prefill(self.model, self._prompts(encoded), prompt_of_row)
        hidden, mask, embed = prefix.hidden, prefix.mask, self.model.model.get_input_embeddings()
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(encoded.grid.count):
            logits = hidden[:, -1] @ self.head.t()
            plain = (logits.float() / sampler.temperature).log_softmax(-1)
            chosen = sampler.warp(logits).log_softmax(-1) if sampler.truncates else plain
            token = draw(chosen, uniforms[:, step].to(chosen.device))
            columns.append((token, plain.gather(1, token[:, None])[:, 0], entropy(plain)))
            if step + 1 < encoded.grid.count:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                positions = prefix.token_positions[..., step : step + 1]
                hidden = forward(self.model, embed(token[:, None]), mask, positions, prefix.cache)
        tokens, log_probs, entropies = (torch.stack(column, 1) for column in zip(*columns, strict=False))
        return tokens, log_probs, entropies

    def _prompts(self, encoded: EncodedPrompts) -> Prompts:
        return Prompts(
            embeds=self.model.model.get_input_embeddings()(encoded.ids),
            mask=encoded.mask,
            positions=encoded.positions,
            token_positions=encoded.token_positions,
        )
