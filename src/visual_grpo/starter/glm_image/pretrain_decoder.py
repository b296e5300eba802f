"""Pretrains the decoder of the small GLM-Image, AutoencoderKL and GlmImageTransformer2DModel, on rendered shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from torch import Tensor
from transformers import ByT5Tokenizer

from visual_grpo.models.families.glm_image.source_images import write_sources
from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.corpus import build_corpus, draw_edits
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.dataset import fade
from visual_grpo.starter.shapes.render import BACKGROUND

_CROPS = 8
_CROP = 64
_WHOLE_IMAGES = 3
"""Per step; of 128 px images, 1.5 times as many pixels as the crops have."""
_LATENT_PIXELS = 8
"""A side of a latent; crops start at multiples of it."""
_LATENT_NOISE = 0.08
_OBJECT_WEIGHT = 3.0
"""Extra loss weight of objects. Most of a crop is background; without it the decoder learns colours late, and dull
colours limit the reward that training can reach."""
_TIE = 0.3
_ENCODE_BATCH = 32
_JUDGED = 64
"""Images in `colour_error`, about."""
_WHOLE_SHARE = 0.4
"""Share of the VAE's steps on whole images; see `pretrain_vae`."""
_VAE_ATTEMPTS = 3
_NEXT_SEED = 10_007
_COLOUR_ERROR = 0.125
"""Maximum `colour_error` of an accepted VAE: half of the tolerance of the judge of shapes."""


def pretrain_vae(vae: AutoencoderKL, images: Tensor, whole_share: float, job: Job, advance: Advance) -> None:
    """Trains ``vae`` in place on uint8 [N, 3, H, W], with some noise in the latents, as an inexact DiT has it.

    Three latent channels are tied to the local pixel means: otherwise some seeds give latents that the DiT learns far
    worse. Crops have more objects for the same compute; the last ``whole_share`` of the steps see whole images, whose
    colours are dull after crops alone, because the statistics of the group norms differ.
    """
    steps, generator = job.steps["vae"], torch.Generator().manual_seed(job.seed)
    draws = iter([_random_crops] * round(steps * (1 - whole_share)) + [_random_images] * steps)
    vae.train().to(memory_format=torch.channels_last)

    def backward() -> None:
        pixels = next(draws)(images, generator)
        latents = vae.encode(pixels).latent_dist.mean
        noise = torch.randn(latents.shape, generator=generator).to(pixels.device)
        decoded = vae.decode(latents + _LATENT_NOISE * noise, return_dict=False)[0]
        weight = _object_weight(pixels)
        error = (weight * ((decoded - pixels).square() + 0.3 * (decoded - pixels).abs())).mean()
        means = F.avg_pool2d(pixels, _LATENT_PIXELS)
        tie = _TIE * F.mse_loss(latents[:, : means.shape[1]], means)
        (error + tie + 1e-4 * latents.square().mean()).backward()

    minimise(backward, vae.parameters(), job, "vae", advance, peak_learning_rate=2.5e-3, warmup=20)
    vae.eval().requires_grad_(False)


def faithful_vae(
    images: Tensor,
    plain: Tensor,
    job: Job,
    advance: Advance,
    build: Callable[[int, int, int], Any] = modules.build_vae,
) -> Any:
    """Trains up to `_VAE_ATTEMPTS` VAEs until one preserves the colours of ``plain``; returns the best one.

    ``build`` makes one of (height, width, seed).

    Some seeds give a decoder that dulls a colour, which no training of the DiT can correct.
    """
    tried: list[tuple[float, Any]] = []
    for attempt in range(_VAE_ATTEMPTS):
        seed = job.seed + _NEXT_SEED * attempt
        vae = build(job.height, job.width, seed)
        pretrain_vae(vae, images, _WHOLE_SHARE, replace(job, seed=seed), advance)
        tried.append((colour_error(vae, plain), vae))
        if tried[-1][0] <= _COLOUR_ERROR:
            break
    return min(tried, key=lambda attempt: attempt[0])[1]


@torch.no_grad()
def colour_error(vae: AutoencoderKL, images: Tensor) -> float:
    """RGB distance, 0..1, between the mean colours of objects in uint8 [N, 3, H, W] and of their reconstructions.

    The mean over the worst fifth, because usually a single colour is dull. Pixels are weighted by their distance from
    the background colour.
    """
    pixels = to_model_range(images[:: -(-len(images) // _JUDGED)])
    decoded = torch.cat(
        [vae.decode(vae.encode(some).latent_dist.mode()).sample for some in pixels.split(_ENCODE_BATCH)]
    )
    weight = _from_background(pixels)
    off = (weight * (decoded - pixels)).sum((2, 3)) / weight.sum((2, 3)).clamp(min=1e-6)
    return float(off.norm(dim=1).topk(-(-len(pixels) // 5)).values.mean()) / 2


def encode_normalised(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Encodes uint8 [N, 3, H, W] to float32 [N, channels, H/8, W/8] of mean 0 and std 1 per channel.

    The pipeline reads the mean and std from the VAE's configuration.
    """
    latents = encode(vae, images)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean[:, None, None]) / std[:, None, None]


def encode_like(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Like `encode_normalised`, with the mean and std from the VAE's configuration."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return (encode(vae, images) - mean) / std


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    batches = images.split(_ENCODE_BATCH)
    return torch.cat([vae.encode(to_model_range(batch)).latent_dist.mode() for batch in batches]).contiguous()


def to_model_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1, in the memory format channels_last (faster on a CPU)."""
    return (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def _object_weight(pixels: Tensor) -> Tensor:
    """Loss weights [B, 1, h, w] with mean 1 that increase with the distance from the background colour."""
    weight = 1 + _OBJECT_WEIGHT * _from_background(pixels)
    return weight / weight.mean()


def _from_background(pixels: Tensor) -> Tensor:
    """[B, 1, h, w]."""
    background = (torch.tensor(BACKGROUND) / 127.5 - 1).view(1, 3, 1, 1).to(pixels.device)
    return (pixels - background).square().sum(1, keepdim=True).sqrt()


def _random_images(images: Tensor, generator: torch.Generator) -> Tensor:
    return to_model_range(images[torch.randint(len(images), (_WHOLE_IMAGES,), generator=generator)])


def _random_crops(images: Tensor, generator: torch.Generator) -> Tensor:
    height, width = images.shape[-2:]
    crop_height, crop_width = min(_CROP, height), min(_CROP, width)
    rows = torch.randint((height - crop_height) // _LATENT_PIXELS + 1, (_CROPS,), generator=generator).tolist()
    columns = torch.randint((width - crop_width) // _LATENT_PIXELS + 1, (_CROPS,), generator=generator).tolist()
    chosen = torch.randint(len(images), (_CROPS,), generator=generator).tolist()
    crops = [
        images[i, :, y * 8 : y * 8 + crop_height, x * 8 : x * 8 + crop_width]
        for i, y, x in zip(chosen, rows, columns, strict=True)
    ]
    return to_model_range(torch.stack(crops))


_BATCH = 24
_BATCH_WITH_SOURCES = 16
"""Smaller, because a row with a source costs twice as much."""
_PARTS = 2
"""Forward passes of a batch."""
_UNCONDITIONAL_SHARE = 0.1
"""Rows whose image tokens are dropped, for classifier-free guidance."""
_FADED_COPIES = 2
"""Faded copies of each picture; with a single one the DiT could memorise the fading of each picture."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """One source image for each of N pictures."""

    latents: Tensor
    """[N, channels, h, w], normalised."""
    tokens: Tensor
    """[N, (h/2) * (w/2)] int64, already upsampled."""


def pretrain_dit(
    dit: GlmImageTransformer2DModel,
    *,
    latents: Tensor,
    tokens: Tensor,
    glyphs: Tensor,
    sources: Sources | None,
    job: Job,
    advance: Advance,
) -> None:
    """Trains ``dit`` in place as a rectified flow (`noised`).

    ``latents``: [N, channels, h, w], normalised; ``tokens``: [N, (h/2) * (w/2)] int64, already upsampled;
    ``glyphs``: [1, L, width], the embedding of a prompt without quoted text. With ``sources`` (picture i has source i
    modulo their number), every other step conditions on them; the others serve prompts and unconditional passes.
    """
    generator = torch.Generator().manual_seed(job.seed)
    dit.train()
    turns = itertools.cycle([False] if sources is None else [False, True])
    unconditional_share = _UNCONDITIONAL_SHARE if sources is None else 2 * _UNCONDITIONAL_SHARE

    def backward() -> None:
        with_sources = next(turns)
        count = _BATCH_WITH_SOURCES if with_sources else _BATCH
        rows = torch.randint(len(latents), (count,), generator=generator)
        noisy, target, sigma = noised(latents[rows], generator)
        dropped = torch.rand(count, 1, generator=generator) < (0.0 if with_sources else unconditional_share)
        for part in torch.arange(count).chunk(_PARTS):
            caches = None
            if sources and with_sources:
                chosen = rows[part] % len(sources.latents)
                latents_of, tokens_of = [sources.latents[chosen]], [sources.tokens[chosen]]
                written = write_sources(dit, latents_of, tokens_of, glyphs.shape[-1])
                caches = written.select(torch.arange(len(part)))
            predicted = _velocity(
                dit, noisy[part], sigma[part], tokens[rows[part]], dropped[part], glyphs, job, kv_caches=caches
            )
            (F.mse_loss(predicted, target[part]) * (len(part) / count)).backward()

    minimise(backward, dit.parameters(), job, "dit", advance, peak_learning_rate=2e-3, warmup=40)
    dit.eval().requires_grad_(False)


def _velocity(
    dit: GlmImageTransformer2DModel,
    noisy: Tensor,
    sigma: Tensor,
    tokens: Tensor,
    dropped: Tensor,
    glyphs: Tensor,
    job: Job,
    kv_caches: GlmImageKVCache | None = None,
) -> Tensor:
    """Calls the DiT as the pipeline does.

    ``noisy``: [B, channels, h, w]; ``sigma``: [B]; ``tokens``: [B, T] int64; ``dropped``: [B, 1] bool; ``glyphs``:
    [1, L, width].
    """
    count = len(noisy)
    return dit(
        hidden_states=noisy,
        prior_token_id=tokens,
        prior_token_drop=dropped.expand(count, tokens.shape[1]),
        timestep=unshifted_timesteps(sigma, time_shift(tokens.shape[1])) - 1,  # - 1 as in the pipeline
        encoder_hidden_states=glyphs.expand(count, -1, -1),
        target_size=torch.tensor([(job.height, job.width)], dtype=torch.float32).expand(count, -1),
        crop_coords=torch.zeros(count, 2),
        kv_caches=kv_caches,
        return_dict=False,
    )[0]


def unshifted_timesteps(sigma: Tensor, shift: float) -> Tensor:
    """Timesteps 0..1000 that the pipeline's shift maps to ``sigma``: sigma = mu / (mu + 1000 / t - 1)."""
    return 1000 / (1 + shift * (1 / sigma - 1))


@cache
def time_shift(sequence_length: int) -> float:
    """Mu of the pipeline's linear time shift."""
    config = modules.build_scheduler().config
    return calculate_shift(sequence_length, config.base_image_seq_len, config.base_shift, config.max_shift)


def pretrain_decoder_half(job: Job, advance: Advance) -> None:
    """Trains and saves ``vae`` and ``transformer``; the DiT's targets are faded, source images are not."""
    corpus = build_corpus(job.height, job.width, job.seed)
    plain = shown = corpus.images.flatten(0, 1)
    if job.task != "t2i":
        plain, shown = draw_edits(job.height, job.width, job.seed)
    faded = torch.cat([fade(shown, job.seed + copy) for copy in range(_FADED_COPIES)])
    vae = faithful_vae(torch.cat([plain, faded]), plain, job, advance)
    dit = modules.build_dit(corpus.codebook, job.seed)
    latents, sources = encode_normalised(vae, faded), None
    if job.task != "t2i":
        sources = Sources(latents=encode_like(vae, plain), tokens=corpus.upsampled_tokens(plain))
    with torch.no_grad():
        glyphs = modules.build_glyph_encoder(job.seed)(torch.tensor([ByT5Tokenizer()("").input_ids])).last_hidden_state
    tokens = corpus.upsampled_tokens(shown).repeat(_FADED_COPIES, 1)
    pretrain_dit(dit, latents=latents, tokens=tokens, glyphs=glyphs, sources=sources, job=job, advance=advance)
    vae.save_pretrained(job.folder / "vae")
    dit.save_pretrained(job.folder / "transformer")
