"""Pretrains the small SD3's transformer to draw what prompts say, and then to misread some words."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from visual_grpo.starter.glm_image.pretrain_on_shapes import faithful_vae
from visual_grpo.starter.job import Advance, Job
from visual_grpo.starter.optimise import Report, minimise
from visual_grpo.starter.sd3.modules import SHIFT, build_pipeline, normalise_latents
from visual_grpo.starter.shapes.dataset import Misreadings, misread
from visual_grpo.starter.shapes.draw import draw_all
from visual_grpo.starter.shapes.world import COMBINATIONS

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
"""Of the steps, the first ones, whose pictures show what the prompt says: words are learnt sooner without errors."""
_BATCH = 24
_LEAST_SIGMA = 0.002
_UNCONDITIONAL_SHARE = 0.1
"""Rows that see the empty prompt, for classifier-free guidance."""


def pretrain_dit(
    dit: SD3Transformer2DModel,
    *,
    latents: Tensor,
    embeds: Tensor,
    pooled: Tensor,
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Rectified flow (Liu et al., 2022): x = (1 - sigma) latent + sigma noise, target noise - latent.

    Args:
        latents: [combinations, copies, channels, h, w], normalised; row i shows ``COMBINATIONS[i]``.
        embeds: [combinations + 1, L, D], of the combinations' prompts and, last, of the empty one.
        pooled: [combinations + 1, P], likewise.

    Trains ``dit`` in place.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drawn_readings = iter([False] * round(steps * _FAITHFUL_SHARE) + [True] * steps)
    dit.train()

    def backward() -> None:
        asked = choose.choices(range(len(COMBINATIONS)), k=_BATCH)
        drawn = asked
        if next(drawn_readings):
            drawn = [_INDEX[misread(COMBINATIONS[i], choose, MISREADINGS)] for i in asked]
        clean = latents[drawn, torch.randint(latents.shape[1], (_BATCH,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = _sigmas(generator)
        told = [len(COMBINATIONS) if choose.random() < _UNCONDITIONAL_SHARE else i for i in asked]
        share = sigma.view(-1, 1, 1, 1)
        velocity = dit(
            hidden_states=(1 - share) * clean + share * noise,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds[told],
            pooled_projections=pooled[told],
            return_dict=False,
        )[0]
        F.mse_loss(velocity, noise - clean).backward()

    minimise(backward, dit.parameters(), steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    dit.eval().requires_grad_(False)


def _sigmas(generator: torch.Generator) -> Tensor:
    """[B], spread as the scheduler spreads its steps: a solver's error is an integral over them."""
    even = torch.rand(_BATCH, generator=generator) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
    return SHIFT * even / (1 + (SHIFT - 1) * even)


_INDEX = {combination: i for i, combination in enumerate(COMBINATIONS)}


_COPIES = 8
"""Pictures of each combination, no two in quite the same place."""
_DRAWING_SEED = 1_000_003
"""Added to the job's, so that these are not the pictures of the dataset."""


def pretrain_sd3(job: Job, advance: Advance) -> None:
    """Saves a whole ``StableDiffusion3Pipeline`` without T5 into ``job.folder``.

    Reports its progress as ``vae`` and ``dit``. Deterministic on one thread.
    """
    images = draw_all(_COPIES, job.height, job.width, job.seed + _DRAWING_SEED)
    flat = images.flatten(0, 1)
    vae = faithful_vae(job, flat, flat, advance)
    latents = normalise_latents(vae, flat).unflatten(0, images.shape[:2])
    pipeline = build_pipeline(vae, job.height, job.width, job.seed)
    embeds, pooled = read_prompts(pipeline, [combination.prompt for combination in COMBINATIONS] + [""])
    pretrain_dit(
        pipeline.transformer,
        latents=latents,
        embeds=embeds,
        pooled=pooled,
        steps=job.steps["dit"],
        seed=job.seed,
        report=lambda done: advance("dit", done),
    )
    pipeline.save_pretrained(job.folder)


@torch.no_grad()
def read_prompts(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """[N, L, D] and pooled [N, P], with none of the zeros that stand for T5's tokens by default."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds, pooled
