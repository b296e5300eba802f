"""A GlmImagePipeline in memory: loading it, and the way from prior tokens to pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.bars import hidden_bars
from visual_grpo.config import ModelConfig, SamplerConfig
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline

COMPONENTS = ("vision_language_encoder", "text_encoder", "transformer", "vae")


def load_pipeline(path: str, config: ModelConfig) -> GlmImagePipeline:
    """Loads a folder or hub id with plain ``from_pretrained``, frozen and in evaluation mode.

    Raises UserError if there is nothing at ``path`` or it is not a GLM-Image pipeline.
    """
    from diffusers import GlmImagePipeline

    from visual_grpo.policies.processing import PreviewProcessor, preview_side

    check_model_path(path)
    # A folder loads in a moment; a download keeps its bars.
    with hidden_bars() if Path(path).exists() else nullcontext():
        try:
            pipeline = GlmImagePipeline.from_pretrained(path, dtype=getattr(torch, config.dtype))
        except (OSError, ValueError) as error:  # What the hub's client and both libraries raise for what they lack.
            raise UserError(
                f"The pipeline {path!r} cannot be loaded: {error}\n"
                "A hub id needs a network or a download made before; a folder must be whole."
            ) from error
    pipeline.processor = PreviewProcessor.of(pipeline.processor, preview_side(path))
    pipeline.set_progress_bar_config(disable=True)
    for name in COMPONENTS:
        getattr(pipeline, name).eval().requires_grad_(False)
    pipeline.vae.to(memory_format=torch.channels_last)  # 3x faster convolutions on a CPU.
    return pipeline.to(resolve_device(config.device))


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first accelerator if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device is {name!r}; expected auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device is {name!r}, but torch finds no CUDA device; use auto or cpu.")
    return device


class TokenDecoder:
    """Decodes image tokens with the frozen DiT and VAE by the pipeline's own call."""

    def __init__(self, pipeline: GlmImagePipeline, *, denoise_batch: int, decode_batch: int) -> None:
        """How many images the DiT denoises, and the VAE decodes, at a time."""
        self.pipeline, self.denoise_batch, self.decode_batch = pipeline, denoise_batch, decode_batch

    def decode(
        self,
        tokens: Tensor,
        prompts: Sequence[str],
        noise_seeds: Sequence[int],
        size: tuple[int, int],
        sampler: SamplerConfig,
    ) -> list[Tensor]:
        """[B, rows, columns] int64 token ids -> B uint8 images [3, height, width].

        Row i starts from the noise of ``noise_seeds[i]``; ``size`` is (height, width) in pixels.
        """
        upsampled = tokens.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
        noise = torch.stack([self._noise(seed, size) for seed in noise_seeds])
        latents = torch.empty_like(noise, device=tokens.device)
        for glyphs, rows in self._batches(prompts):
            latents[rows] = self.pipeline(
                prompt_embeds=glyphs,
                prior_token_ids=upsampled[rows],
                latents=noise[rows].to(glyphs.dtype),
                height=size[0],
                width=size[1],
                num_inference_steps=sampler.steps,
                guidance_scale=sampler.guidance_scale,
                output_type="latent",
            ).images.to(latents.dtype)
        return self._pixels(latents)

    def _noise(self, seed: int, size: tuple[int, int]) -> Tensor:
        factor, channels = self.pipeline.vae_scale_factor, self.pipeline.transformer.config.in_channels
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(channels, size[0] // factor, size[1] // factor, generator=generator)

    def _batches(self, prompts: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """(embeddings [b, L, D], rows [b]) with one glyph length L in a batch.

        The pipeline left-pads glyph embeddings of a batch without a mask, so a prompt's image would
        depend on its neighbours' quoted texts; batches of one length need no padding.
        """
        glyphs = {p: self.pipeline.encode_prompt(p, do_classifier_free_guidance=False)[0] for p in set(prompts)}
        lengths = [glyphs[p].shape[1] for p in prompts]
        for length in sorted(set(lengths)):
            alike = torch.tensor([i for i, own in enumerate(lengths) if own == length])
            for rows in alike.split(self.denoise_batch):
                yield torch.cat([glyphs[prompts[i]] for i in rows]), rows

    def _pixels(self, latents: Tensor) -> list[Tensor]:
        vae = self.pipeline.vae
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(1, -1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(1, -1, 1, 1)
        images: list[Tensor] = []
        for part in (latents * std + mean).split(self.decode_batch):
            part = part.to(vae.dtype).contiguous(memory_format=torch.channels_last)
            decoded = vae.decode(part, return_dict=False)[0].float()
            images += list(((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())
        return images


def check_model_path(path: str) -> None:
    """Raises UserError if ``path`` is a folder, or can be nothing else, and holds no pipeline."""
    is_hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    if not is_hub_id and not (Path(path) / "model_index.json").is_file():
        raise UserError(
            f"model.path is {path}, which holds no model_index.json; expected a folder saved by"
            " GlmImagePipeline.save_pretrained, a hub id, or null for the starter's model."
        )
