"""The whole pretraining of the small Stable Diffusion 3 on drawn shapes."""

from __future__ import annotations

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from visual_grpo.starter.glm_image.pretrain_on_shapes import faithful_vae
from visual_grpo.starter.job import Advance, Job
from visual_grpo.starter.sd3.modules import build_pipeline
from visual_grpo.starter.sd3.pretrain_dit import pretrain_dit
from visual_grpo.starter.sd3.unit_latents import normalise_latents
from visual_grpo.starter.shapes.draw import draw_all
from visual_grpo.starter.shapes.world import COMBINATIONS

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
        steps=job.dit_steps,
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
