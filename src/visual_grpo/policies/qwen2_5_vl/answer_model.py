"""Qwen2.5-VL as a sampler and scorer of answers about images.

Shapes: N distinct records, B rows, P prompt tokens (left-padded, the image's included), T answer tokens, H hidden
width, V vocabulary. A row's answer ends with its first end token, which counts; what follows does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import read_image
from visual_grpo.policies.glm_image.sources import distinct
from visual_grpo.policies.prompt_cache import Prompts, forward, hidden_shared, hidden_whole, prefill
from visual_grpo.policies.tokens import TokenSampler, chosen_log_probs, draw, entropy, row_uniforms
from visual_grpo.types import PromptRecord, TextSample

if TYPE_CHECKING:
    from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True, kw_only=True)
class EncodedQueries:
    """N distinct records as the language model reads them."""

    prompts: Prompts
    frames: list[tuple[int, int]]
    """Height and width of each image in pixels, as the processor gave it to the model."""


@dataclass(frozen=True, kw_only=True)
class AnswerTrajectory:
    """Everything the replay needs of B answers."""

    encoded: EncodedQueries
    prompt_of_row: Tensor
    """[B] int64, row -> index among the N encoded records."""
    tokens: Tensor
    """[B, T] int64; after the end token it goes on with end tokens."""
    mask: Tensor
    """[B, T] bool: up to and with the first end token."""
    reference_log_probs: Tensor | None = None
    """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""


@dataclass(frozen=True, kw_only=True)
class SampledAnswers:
    """A trajectory with what was measured while it was drawn."""

    trajectory: AnswerTrajectory
    log_probs: Tensor
    """[B, T] float32 at the sampler's temperature, before any truncation."""
    entropy: Tensor
    """[B, T] float32 of the same distributions, nats."""


class AnswerModel:
    """Samples and scores answers; an adapter injected into ``model`` takes part."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        processor: Qwen2_5_VLProcessor,
        *,
        instruction: str,
        max_tokens: int,
        batch: int,
        share_prefix: bool,
    ) -> None:
        """
        Args:
            instruction: what is asked beside the image; ``{query}`` is the record's prompt.
            max_tokens: of an answer, its end included.
            batch: rows sampled at a time.
            share_prefix: score each distinct record once; impossible under gradient checkpointing.
        """
        self.model, self.processor = model, processor
        self.instruction, self.max_tokens, self.batch, self.share_prefix = instruction, max_tokens, batch, share_prefix
        self.ends = _end_ids(model)
        self.bias = self._bias()

    def processed(self, records: Sequence[PromptRecord]) -> BatchFeature:
        """All that the model's forward takes: left-padded ids, mask, token types, pixels and grids."""
        texts = [self.processor.apply_chat_template(self._messages(record), **_AS_TEXT) for record in records]
        images = [read_image(_image_of(record)) for record in records]
        inputs = self.processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")
        return inputs.to(self.model.device)

    @torch.no_grad()
    def encode(self, records: Sequence[PromptRecord]) -> EncodedQueries:
        """Images and queries as embeddings; the vision tower is frozen, so they serve sampling and every replay."""
        inputs = self.processed(records)
        model, ids, grid = self.model.model, inputs["input_ids"], inputs["image_grid_thw"]
        embeds = model.get_input_embeddings()(ids)
        seen = torch.cat(tuple(model.get_image_features(inputs["pixel_values"], grid).pooler_output)).to(embeds)
        embeds = embeds.masked_scatter((ids == self.model.config.image_token_id)[..., None].expand_as(embeds), seen)
        mask = inputs["attention_mask"]
        positions, deltas = model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grid, attention_mask=mask
        )
        first = mask.sum(1) + deltas[:, 0]
        after = first[:, None] + torch.arange(self.max_tokens, device=first.device)
        patch: int = self.model.config.vision_config.patch_size
        return EncodedQueries(
            prompts=Prompts(
                embeds=embeds, mask=mask, positions=positions, token_positions=after.expand(3, *after.shape)
            ),
            frames=[(int(rows) * patch, int(columns) * patch) for _, rows, columns in grid],
        )

    @torch.no_grad()
    def sample(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: TokenSampler) -> SampledAnswers:
        """An answer to each of B records; row i is a function of its record, ``seeds[i]`` and the weights."""
        firsts, prompt_of_row = distinct(records)
        encoded = self.encode(firsts)
        uniforms = row_uniforms(seeds, self.max_tokens)
        parts = [
            self._sample_batch(encoded.prompts, prompt_of_row[rows], uniforms[rows], sampler)
            for rows in torch.arange(len(records)).split(self.batch)
        ]
        tokens, log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ended = self._ends(tokens)
        trajectory = AnswerTrajectory(
            encoded=encoded,
            prompt_of_row=prompt_of_row,
            tokens=tokens,
            mask=((ended.cumsum(1) - ended.long()) == 0).cpu(),
        )
        return SampledAnswers(trajectory=trajectory, log_probs=log_probs.cpu(), entropy=entropies.cpu())

    def log_probs(self, trajectory: AnswerTrajectory, rows: Tensor, temperature: float) -> Tensor:
        """[b, T] float32 of the stored tokens of ``rows`` ([b]), on the CPU, under the weights as they are now."""
        tokens = trajectory.tokens[rows]
        hidden_of = hidden_shared if self.share_prefix else hidden_whole
        hidden = hidden_of(self.model, trajectory.encoded.prompts, trajectory.prompt_of_row[rows], tokens)
        return chosen_log_probs(hidden, self.model.lm_head.weight, tokens, temperature, self.bias).cpu()

    def samples(self, trajectory: AnswerTrajectory) -> list[TextSample]:
        """[B] what the tokens say."""
        finished = self._ends(trajectory.tokens).any(1).tolist()
        samples = []
        for row, prompt in enumerate(trajectory.prompt_of_row.tolist()):
            said = trajectory.tokens[row, : int(trajectory.mask[row].sum()) - finished[row]]
            text = self.processor.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            samples.append(TextSample(text=text, finished=finished[row], frame=trajectory.encoded.frames[prompt]))
        return samples

    def _sample_batch(
        self, prompts: Prompts, prompt_of_row: Tensor, uniforms: Tensor, sampler: TokenSampler
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[b, T] tokens, log-probs and entropies; T = ``max_tokens``, reached or not, so that batches can be joined."""
        prefix = prefill(self.model, prompts, prompt_of_row)
        hidden, mask, embed = prefix.hidden, prefix.mask, self.model.model.get_input_embeddings()
        tokens = torch.full(uniforms.shape, self.ends[0], device=hidden.device)
        log_probs, entropies = torch.zeros(2, *uniforms.shape, device=hidden.device)
        done = torch.zeros(len(tokens), dtype=torch.bool, device=hidden.device)
        for step in range(self.max_tokens):
            logits = (hidden[:, -1] @ self.model.lm_head.weight.t()).float() + self.bias
            plain = (logits / sampler.temperature).log_softmax(-1)
            chosen = sampler.warp(logits).log_softmax(-1) if sampler.truncates else plain
            token = torch.where(done, self.ends[0], draw(chosen, uniforms[:, step].to(chosen.device)))
            tokens[:, step] = token
            log_probs[:, step] = plain.gather(1, token[:, None])[:, 0]
            entropies[:, step] = entropy(plain)
            done |= self._ends(token)
            if done.all() or step + 1 == self.max_tokens:
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = prefix.token_positions[..., step : step + 1]
            hidden = forward(self.model, embed(token[:, None]), mask, positions, prefix.cache)
        return tokens, log_probs, entropies

    def _messages(self, record: PromptRecord) -> list[dict[str, object]]:
        text = self.instruction.replace("{query}", record.prompt)
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]

    def _ends(self, tokens: Tensor) -> Tensor:
        """Which tokens end an answer, in their shape."""
        return torch.isin(tokens, torch.tensor(self.ends, device=tokens.device))

    def _bias(self) -> Tensor:
        """[V] float32: -inf for ids that no answer may have.

        A sampled image placeholder would ask for pixels that are not there, so none can be drawn and none counts in
        the softmax, while sampling and while scoring; nor does the padding at the end of a larger head.
        """
        tokenizer, head = self.processor.tokenizer, self.model.lm_head.weight
        known = tokenizer.get_vocab()
        banned = {known[token] for token in VISION_TOKENS if token in known} | set(tokenizer.all_special_ids)
        bias = torch.zeros(len(head), device=head.device)
        bias[sorted(banned - set(self.ends))] = -torch.inf
        bias[len(tokenizer) :] = -torch.inf
        return bias


_AS_TEXT = {"tokenize": False, "add_generation_prompt": True}


def _image_of(record: PromptRecord) -> Path:
    if len(record.source_images) != 1:
        raise UserError(
            f"record {record.id!r} has {len(record.source_images)} source images; a query is about exactly one."
            " Use data.task=segmentation"
        )
    return record.source_images[0]


def _end_ids(model: Qwen2_5_VLForConditionalGeneration) -> list[int]:
    """The ids that end an answer, the one that also fills up finished rows first."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        raise UserError("The model's generation_config names no eos_token_id: it would not know when to stop.")
    return [ends] if isinstance(ends, int) else list(ends)
