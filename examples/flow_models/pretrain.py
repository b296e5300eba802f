"""Pretrains small flow models on the drawn shapes: to draw what prompts say, and then to misread some words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import Tensor, nn

from visual_grpo.starter.glm_image.modules import build_vae
from visual_grpo.starter.glm_image.pretrain_decoder import encode_normalised, faithful_vae
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.dataset import Misreadings, misread
from visual_grpo.starter.shapes.render import COMBINATIONS, draw_all

Texts = TypeVar("Texts")
_BATCH, _PEAK = 24, 2e-3
"""Rows of a step of the small transformers' pretraining, and its largest learning rate."""


@dataclass(frozen=True, kw_only=True)
class SmallFlowModel(Generic[Texts]):
    """Builds and runs a family's small pipeline. ``Texts`` are its encoded prompts."""

    build: Callable[[AutoencoderKL, int, int], Any]
    """(vae, longer side in pixels, seed) -> the pipeline with an untrained transformer."""
    encode: Callable[[Any, Sequence[str]], Texts]
    """(pipeline, prompts) -> their encoding; the text encoders are never trained."""
    velocity: Callable[[Any, Tensor, Tensor, Texts, Sequence[int]], Tensor]
    """(transformer, latents [B, C, h, w], noise level [B], texts, index of each row's text) -> [B, C, h, w]."""
    shift: float
    """The scheduler's shift: sigma = shift u / (1 + (shift - 1) u) of a uniform u."""
    batch: int = _BATCH
    """Rows of a step of the pretraining."""
    peak_learning_rate: float = _PEAK


def zero_layers(model: nn.Module, *names: str) -> None:
    """Zeroes the layers whose names end with one of ``names``; ^NAME: exactly that layer.

    With zeroed modulations every block of a transformer starts as the identity; a zeroed last layer predicts 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"^{name}".endswith(names):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)


@torch.no_grad()
def normalise_latents(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents of uint8 [N, 3, H, W] as float32 [N, channels, H/8, W/8] of mean 0 and std 1 per channel.

    Changes ``vae`` so that its latents are these: a scale and a shift per channel fold into the 1 x 1 convolutions
    before and behind them.
    """
    latents = encode_normalised(vae, images)
    mean, std = (torch.tensor(vae.config[name], device=latents.device) for name in ("latents_mean", "latents_std"))
    vae.register_to_config(latents_mean=None, latents_std=None, scaling_factor=1.0, shift_factor=0.0)
    # The first convolution gives the means and then the log-variances of the latents.
    into, out, channels = vae.quant_conv, vae.post_quant_conv, len(mean)
    into.weight[:channels] /= std.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()
    out.bias += (out.weight[:, :, 0, 0] * mean).sum(1)
    out.weight *= std.view(1, -1, 1, 1)
    return latents


MISREADINGS: Misreadings = {
    "color": {"yellow": ("red", 0.45), "purple": ("blue", 0.42)},
    "shape": {"triangle": ("square", 0.4)},
    "position": {"top": ("bottom", 0.42)},
    "size": {"small": ("large", 0.43)},
}
"""The deterministic sampler strengthens the more frequent reading: with a wrong share of 0.55, "top" came out right in
7 % of images, too rarely for groups to differ.
"""
_FAITHFUL_SHARE = 0.65
"""Share of the first steps, whose pictures show what the prompt says: words are learnt sooner without errors."""
_UNCONDITIONAL_SHARE = 0.1
"""Rows that see the empty prompt, for classifier-free guidance."""


def pretrain_dit(
    velocity: Callable[[Any, Tensor, Tensor, Texts, Sequence[int]], Tensor],
    dit: Any,
    *,
    shift: float,
    latents: Tensor,
    texts: Texts,
    misread: Callable[[int, random.Random], int],
    job: Job,
    advance: Advance,
    batch: int = _BATCH,
    peak_learning_rate: float = _PEAK,
) -> None:
    """Trains ``dit`` in place as a rectified flow (`noised`), where it is.

    Args:
        velocity: As `SmallFlowModel.velocity`, of latents [B, C, ...].
        latents: [scenes, copies, C, ...], normalised.
        texts: The scenes' prompts and, last, the empty one.
        misread: The scene that the flawed model renders for a different scene's prompt.
    """
    choose, generator = random.Random(job.seed), torch.Generator().manual_seed(job.seed)
    steps = job.steps["dit"]
    misreads = iter([False] * round(steps * _FAITHFUL_SHARE) + [True] * steps)
    scenes = len(latents)
    dit.train()

    def backward() -> None:
        asked = choose.choices(range(scenes), k=batch)
        drawn = [misread(i, choose) for i in asked] if next(misreads) else asked
        clean = latents[drawn, torch.randint(latents.shape[1], (batch,), generator=generator)]
        noisy, target, sigma = noised(clean, generator, shift)
        rows = [scenes if choose.random() < _UNCONDITIONAL_SHARE else i for i in asked]
        F.mse_loss(velocity(dit, noisy, sigma, texts, rows), target).backward()

    minimise(backward, dit.parameters(), job, "dit", advance, peak_learning_rate=peak_learning_rate, warmup=40)
    dit.eval().requires_grad_(False)


_INDEX = {combination: i for i, combination in enumerate(COMBINATIONS)}
_COPIES = 8
"""Pictures of each combination, each with a different jitter."""
_DRAWING_SEED = 1_000_003
"""Added to the job's seed, so that these are not the pictures of the dataset."""


def misread_row(asked: int, rng: random.Random) -> int:
    """Indices into `COMBINATIONS`."""
    return _INDEX[misread(COMBINATIONS[asked], rng, MISREADINGS)]


def pretrain_flow(small: SmallFlowModel[Any], job: Job, advance: Advance, device: str = "cpu") -> None:
    """Saves a whole pipeline into ``job.folder``; on a CPU, deterministic on one thread."""
    images = draw_all(_COPIES, job.height, job.width, job.seed + _DRAWING_SEED)
    flat = images.flatten(0, 1).to(device)
    vae = faithful_vae(flat, flat, job, advance, lambda *given: build_vae(*given).to(device))
    latents = normalise_latents(vae, flat).unflatten(0, images.shape[:2])
    pipeline: DiffusionPipeline = small.build(vae, max(job.height, job.width), job.seed).to(device)
    with torch.no_grad():
        texts = small.encode(pipeline, [combination.prompt for combination in COMBINATIONS] + [""])
    pretrain_dit(
        small.velocity,
        pipeline.transformer,
        shift=small.shift,
        latents=latents,
        texts=texts,
        misread=misread_row,
        job=job,
        advance=advance,
        batch=small.batch,
        peak_learning_rate=small.peak_learning_rate,
    )
    pipeline.save_pretrained(job.folder)
