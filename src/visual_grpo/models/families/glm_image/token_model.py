"""GLM-Image's language model: what it reads of a prompt, and the grid of image tokens that it writes.

Shapes: N distinct prompts, B rows, P prompt tokens (left-padded), T generated tokens (preview grid, then the image's
own; the end token is not generated since its place is known), V ids of the codebook, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import SamplerConfig
from visual_grpo.models.families.glm_image.source_images import SourceEncoder
from visual_grpo.models.rows import source_count
from visual_grpo.models.tokens.interface import TokenTrajectory
from visual_grpo.models.tokens.probabilities import TokenSampler
from visual_grpo.models.tokens.prompt_cache import Prompts

if TYPE_CHECKING:
    from transformers import BatchFeature, GlmImageForConditionalGeneration

    from visual_grpo.models.families.glm_image.processor import PreviewProcessor

Decode = Callable[[Sequence[PromptRecord], Tensor, Sequence[int]], list[Sample]]
"""(records, [B, T] tokens, seeds of the start noise) -> B uint8 images [3, H, W]."""


class GlmImageTokens:
    """A ``TokenModel[Prompts]`` at one image size; ``decode`` turns tokens into images."""

    ends: Sequence[int] = ()
    bias: Tensor | None = None

    def __init__(
        self,
        network: GlmImageForConditionalGeneration,
        processor: PreviewProcessor,
        size: tuple[int, int],
        sources: SourceEncoder,
        decode: Decode,
    ) -> None:
        """
        Args:
            size: (height, width) in pixels, multiples of 32.
            sources: encodes the source images of edits.
        """
        self.network, self.processor, self.size, self.sources = network, processor, size, sources
        self.decode = decode
        self.codebook: int = network.config.vq_config.num_embeddings

    @property
    def head(self) -> Tensor:
        """[V, H] output rows of the ids the DiT can embed; the head can also emit other ids, which crash it."""
        weight: Tensor = self.network.lm_head.weight
        return weight[: self.codebook]

    def sampler(self, settings: SamplerConfig) -> TokenSampler:
        """Returns the model's sampler. Its pipeline always samples."""
        return TokenSampler.of(settings, self.network.generation_config, do_sample=True)

    def samples(
        self, records: Sequence[PromptRecord], trajectory: TokenTrajectory[Prompts], seeds: Sequence[int]
    ) -> list[Sample]:
        """B images, decoded by the DiT as it is from the start noise of ``seeds``."""
        return self.decode(records, trajectory.tokens, seeds)

    def grid(self, sources: int) -> tuple[int, tuple[int, int]]:
        """Tokens of the preview, which an edit does not have, and rows and columns of the image's own."""
        rows, columns, *preview = self.processor._get_target_shape(*self.size)
        return 0 if sources else preview[0] * preview[1], (rows, columns)

    def image_tokens(self, tokens: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[B, rows, columns] int64: the part of [B, T] tokens that reaches the DiT, without the preview."""
        preview, image = self.grid(source_count(records))
        return tokens[:, preview:].view(-1, *image)

    def processed(self, records: Sequence[PromptRecord]) -> BatchFeature:
        """The arguments of the model's own ``generate``: left-padded ids, mask and grids, and the sources' pixels."""
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
        ).to(self.network.device)

    @torch.no_grad()
    def encode(self, records: Sequence[PromptRecord]) -> Prompts:
        """Sources' tokens and prompts as embeddings, with the positions of GLM-Image's three-dimensional RoPE.

        The model computes these positions itself only inside ``generate``; a forward without them is wrong by 0.05 to
        1.2 nats a token, without any error.
        """
        inputs = self.processed(records)
        model = self.network.model
        ids = self._with_source_tokens(inputs["input_ids"], records)
        preview, (rows, columns) = self.grid(source_count(records))
        positions, _ = model.get_rope_index(
            ids,
            image_grid_thw=inputs["image_grid_thw"],
            images_per_sample=inputs["images_per_sample"],
            attention_mask=inputs["attention_mask"],
        )
        token_positions = model._cached_decode_position_ids.permute(1, 0, 2)[:, :, : preview + rows * columns]
        # A later generate() would take what get_rope_index stored for its own.
        model._cached_decode_position_ids = model.rope_deltas = model._prefill_len = None
        return Prompts(
            embeds=model.get_input_embeddings()(ids),
            mask=inputs["attention_mask"],
            positions=positions,
            token_positions=token_positions,
        )

    def _with_source_tokens(self, ids: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        """[N, P] with each image placeholder replaced by the token of its patch."""
        tokens = [source.tokens.flatten() for sources in self.sources.of(records) for source in sources]
        if not tokens:
            return ids
        return ids.masked_scatter(ids == self.network.config.image_token_id, torch.cat(tokens).to(ids.device))
