"""GLM-Image's autoregressive module as a policy: its decisions are the image tokens.

The samples are decoded from those very tokens by the frozen DiT and VAE. Shapes: N distinct
prompts, B rows, P prompt tokens (left-padded), T generated tokens (preview grid, then the image's
own; the end token is not generated since its place is known).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.policies import lora
from visual_grpo.policies.glm_image import TokenDecoder
from visual_grpo.policies.tokens import TokenSampler, chosen_log_probs, draw, entropy, row_uniforms
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout, Sample

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline
    from transformers import DynamicCache

LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj)"
SEED_RANGE = 2**62


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


@dataclass(frozen=True, kw_only=True)
class TokenTrajectory:
    """Everything the replay needs of B sampled rows."""

    encoded: EncodedPrompts
    prompt_of_row: Tensor
    """[B] int64, row -> index among the N encoded prompts."""
    tokens: Tensor
    """[B, T] int64."""
    reference_log_probs: Tensor | None
    """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""


@dataclass(frozen=True, kw_only=True)
class TokenGrid:
    """How many tokens an image has: preview rows x columns, then image rows x columns."""

    preview: tuple[int, int]
    image: tuple[int, int]

    @property
    def preview_count(self) -> int:
        return self.preview[0] * self.preview[1]

    @property
    def count(self) -> int:
        return self.preview_count + self.image[0] * self.image[1]


class GlmImageArPolicy:
    """Satisfies ``types.Policy[TokenTrajectory]``."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        config: PolicyConfig,
        rollout_sampler: SamplerConfig,
        size: tuple[int, int],
        *,
        kl_reference: bool = False,
        adapter: Path | None = None,
        seed: int = 0,
    ) -> None:
        """A policy on ``pipeline``'s AR module with a fresh LoRA, or with the saved one in ``adapter``.

        Args:
            rollout_sampler: how training samples are drawn; no top-p or top-k.
            size: (height, width) in pixels, multiples of 32.
            kl_reference: keep the reference's log-probs with every rollout, for a KL penalty.
            seed: of the LoRA's initial values.
        """
        self.pipeline, self.config, self.rollout_sampler, self.size = pipeline, config, rollout_sampler, size
        self.kl_reference = kl_reference
        base = pipeline.vision_language_encoder
        self.codebook: int = base.config.vq_config.num_embeddings
        if adapter is not None:
            self.model = lora.load_lora(base, adapter)
        else:
            self.model = lora.attach_lora(base, config.lora, LORA_TARGETS, seed)
        self.base = base
        self.decoder = TokenDecoder(pipeline, denoise_batch=config.denoise_batch, decode_batch=config.decode_batch)
        self._set_gradient_checkpointing(config.gradient_checkpointing)

    # -- types.Policy ------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[TokenTrajectory]:
        """G samples of each prompt. All randomness comes from seeds drawn from ``generator``."""
        rows = [record for record in prompts for _ in range(group_size)]
        seeds = _draw_seeds(generator, len(rows))
        noise_seeds = seeds
        if self.config.share_start_noise:
            noise_seeds = [seeds[i - i % group_size] for i in range(len(rows))]
        clock = time.perf_counter()
        sampler = self.token_sampler(self.rollout_sampler)
        trajectory, log_probs, entropies = self._sample(rows, seeds, sampler)
        if self.kl_reference:
            trajectory = replace(trajectory, reference_log_probs=self._reference_log_probs(trajectory))
        sampled = time.perf_counter()
        samples = self._decode(trajectory.tokens, rows, noise_seeds, self.rollout_sampler)
        stats = {
            "entropy": float(entropies.mean()),
            "speed/tokens_per_second": trajectory.tokens.numel() / (sampled - clock),
            "seconds/tokens": sampled - clock,
            "seconds/decode": time.perf_counter() - sampled,
        }
        mask = torch.ones(trajectory.tokens.shape, dtype=torch.bool)
        return Rollout(
            prompts=rows, samples=samples, trajectory=trajectory, log_probs=log_probs, mask=mask, stats=stats
        )

    def replay(self, trajectory: TokenTrajectory, rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk: all T tokens of ``rows`` under the current adapter, with gradient."""
        log_probs = self._log_probs(trajectory, rows)
        kl = None
        if trajectory.reference_log_probs is not None:
            kl = k3_kl(log_probs, trajectory.reference_log_probs[rows])
        yield ReplayChunk(steps=slice(0, log_probs.shape[1]), log_probs=log_probs, kl=kl)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return lora.adapter_state(self.model)

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        lora.load_adapter_state(self.model, state)

    # -- inference ---------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One uint8 image [3, H, W] a prompt; each depends on its prompt, its seed and the weights."""
        trajectory, _, _ = self._sample(prompts, seeds, self.token_sampler(sampler))
        return self._decode(trajectory.tokens, prompts, seeds, sampler)

    def token_sampler(self, sampler: SamplerConfig) -> TokenSampler:
        """What ``sampler`` leaves open is the model's own generation_config."""
        stock = self.base.generation_config
        temperature = sampler.temperature if sampler.temperature is not None else stock.temperature
        top_p = sampler.top_p if sampler.top_p is not None else stock.top_p
        # generate() uses 50 where a generation_config does not name top_k.
        stock_k = stock.top_k if stock.top_k is not None else 50
        top_k = sampler.top_k if sampler.top_k is not None else stock_k
        return TokenSampler(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k,
        )

    def save_adapter(self, folder: Path) -> None:
        """peft's own format: ``adapter_config.json`` and ``adapter_model.safetensors``."""
        self.model.save_pretrained(str(folder))

    # -- prompts -----------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str]) -> EncodedPrompts:
        """Prompts as ids with the three-dimensional positions of GLM-Image's rotary embedding.

        The model computes these positions itself only inside ``generate``; a forward without them is
        silently wrong by 0.05 to 1.2 nats a token.
        """
        messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in prompts]
        inputs = self.pipeline.processor.apply_chat_template(
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
        ).to(self.base.device)
        model = self.base.model
        positions, _ = model.get_rope_index(
            inputs["input_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            images_per_sample=inputs["images_per_sample"],
            attention_mask=inputs["attention_mask"],
        )
        token_positions = model._cached_decode_position_ids.permute(1, 0, 2)[:, :, : self.grid.count]
        # What get_rope_index left behind would be taken for its own by a later generate().
        model._cached_decode_position_ids = model.rope_deltas = model._prefill_len = None
        return EncodedPrompts(
            ids=inputs["input_ids"],
            mask=inputs["attention_mask"],
            positions=positions,
            token_positions=token_positions,
        )

    @property
    def grid(self) -> TokenGrid:
        rows, columns, *preview = self.pipeline.processor._get_target_shape(*self.size)
        return TokenGrid(preview=(preview[0], preview[1]), image=(rows, columns))

    # -- tokens ------------------------------------------------------------------------------------

    def _sample(
        self, prompts: Sequence[PromptRecord], seeds: Sequence[int], sampler: TokenSampler
    ) -> tuple[TokenTrajectory, Tensor, Tensor]:
        """Trajectory of B rows with log-probs [B, T] float32 under the model before truncation, and
        entropies [B, T]."""
        texts = list(dict.fromkeys(record.prompt for record in prompts))
        encoded = self.encode(texts)
        prompt_of_row = torch.tensor([texts.index(record.prompt) for record in prompts])
        uniforms = row_uniforms(seeds, self.grid.count)
        parts = []
        self.model.eval()
        with lora.merged(self.model):
            for rows in torch.arange(len(prompts)).split(self.config.rollout_batch):
                parts.append(self._sample_batch(encoded, prompt_of_row[rows], uniforms[rows], sampler))
        tokens, log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=False))
        trajectory = TokenTrajectory(
            encoded=encoded, prompt_of_row=prompt_of_row, tokens=tokens, reference_log_probs=None
        )
        return trajectory, log_probs.cpu(), entropies.cpu()

    def _sample_batch(
        self, encoded: EncodedPrompts, prompt_of_row: Tensor, uniforms: Tensor, sampler: TokenSampler
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes token by token from one prefill per prompt, its cache repeated for every row."""
        hidden, cache, own = self._prefill(encoded, prompt_of_row)
        mask = encoded.mask[own]
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(self.grid.count):
            logits = hidden[:, -1] @ self.head.t()
            plain = (logits.float() / sampler.temperature).log_softmax(-1)
            chosen = sampler.warp(logits).log_softmax(-1) if sampler.truncates else plain
            token = draw(chosen, uniforms[:, step].to(chosen.device))
            columns.append((token, plain.gather(1, token[:, None])[:, 0], entropy(plain)))
            if step + 1 < self.grid.count:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                positions = encoded.token_positions[:, own, step : step + 1]
                hidden = self._forward(token[:, None], mask, positions, cache)
        tokens, log_probs, entropies = (torch.stack(column, 1) for column in zip(*columns, strict=False))
        return tokens, log_probs, entropies

    def _log_probs(self, trajectory: TokenTrajectory, rows: Tensor) -> Tensor:
        """[b, T] float32 of the stored tokens, on the CPU, under the weights as they are now."""
        self.model.train(self.config.gradient_checkpointing)  # No module has dropout; checkpointing needs the mode.
        tokens = trajectory.tokens[rows]
        encoded, prompt_of_row = trajectory.encoded, trajectory.prompt_of_row[rows]
        share = self.config.share_prefix and not self.config.gradient_checkpointing
        hidden = (self._hidden_shared if share else self._hidden_whole)(encoded, prompt_of_row, tokens)
        temperature = self.token_sampler(self.rollout_sampler).temperature
        return chosen_log_probs(hidden, self.head, tokens, temperature).cpu()

    def _hidden_shared(self, encoded: EncodedPrompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
        """[b, T, H]: each prompt runs once, its cache serves all its rows, and gradient flows through it."""
        last, cache, own = self._prefill(encoded, prompt_of_row)
        mask = torch.cat([encoded.mask[own], torch.ones_like(tokens[:, :-1])], 1)
        positions = encoded.token_positions[:, own, :-1]
        rest = self._forward(tokens[:, :-1], mask, positions, cache)
        return torch.cat([last[:, -1:], rest], 1)

    def _hidden_whole(self, encoded: EncodedPrompts, prompt_of_row: Tensor, tokens: Tensor) -> Tensor:
        """[b, T, H] by one forward of prompt and tokens: gradient checkpointing excludes a cache."""
        own = prompt_of_row
        ids = torch.cat([encoded.ids[own], tokens[:, :-1]], 1)
        mask = torch.cat([encoded.mask[own], torch.ones_like(tokens[:, :-1])], 1)
        positions = torch.cat([encoded.positions[:, own], encoded.token_positions[:, own, :-1]], 2)
        return self._forward(ids, mask, positions, None)[:, -tokens.shape[1] :]

    @torch.no_grad()
    def _reference_log_probs(self, trajectory: TokenTrajectory) -> Tensor:
        """[B, T] float32 with the adapter switched off."""
        batch = self.config.rollout_batch
        with self.model.disable_adapter():
            parts = [self._log_probs(trajectory, rows) for rows in torch.arange(len(trajectory.tokens)).split(batch)]
        return torch.cat(parts)

    def _prefill(self, encoded: EncodedPrompts, prompt_of_row: Tensor) -> tuple[Tensor, DynamicCache, Tensor]:
        """Last hidden state [b, 1, H] and cache of every row from one forward per distinct prompt."""
        from transformers import DynamicCache

        used, inverse = prompt_of_row.unique(return_inverse=True)
        cache = DynamicCache(config=self.base.config.get_text_config())
        hidden = self._forward(encoded.ids[used], encoded.mask[used], encoded.positions[:, used], cache)
        cache.batch_select_indices(inverse.to(hidden.device))
        return hidden[inverse, -1:], cache, prompt_of_row

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None) -> Tensor:
        """Hidden states [b, L, H] of the language model for ids [b, L] after what ``cache`` holds."""
        output = self.base.model.language_model(
            inputs_embeds=self.base.model.get_input_embeddings()(ids),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @property
    def head(self) -> Tensor:
        """[V, H] output rows of the ids the DiT can embed; the head can also emit others, which crash it."""
        weight: Tensor = self.base.lm_head.weight
        return weight[: self.codebook]

    # -- pixels ------------------------------------------------------------------------------------

    def _decode(
        self,
        tokens: Tensor,
        prompts: Sequence[PromptRecord],
        noise_seeds: Sequence[int],
        sampler: SamplerConfig,
    ) -> list[Sample]:
        rows, columns = self.grid.image
        large = tokens[:, self.grid.preview_count :].view(-1, rows, columns)
        return self.decoder.decode(large, [record.prompt for record in prompts], noise_seeds, self.size, sampler)

    def _set_gradient_checkpointing(self, on: bool) -> None:
        if not on:
            return
        # use_reentrant=False: a reentrant checkpoint drops the gradient when its input needs none.
        self.base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def _draw_seeds(generator: torch.Generator, count: int) -> list[int]:
    seeds: list[int] = torch.randint(SEED_RANGE, (count,), generator=generator).tolist()
    return seeds
