"""Pretrains a small FLUX.1 Kontext on edits of the drawn shapes: to do what they say, and then to misread some."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxKontextPipeline
from torch import Tensor

from examples.flow_models.models import FLUX_SHIFT, build_flux, encode_flux, flux_velocity
from examples.flow_models.pretrain import MISREADINGS, normalise_latents
from examples.flow_models.text_encoders import build_tokenizer
from visual_grpo.starter.glm_image.pretrain_decoder import faithful_vae
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.dataset import misread_edit
from visual_grpo.starter.shapes.render import (
    COMBINATIONS,
    EDITS,
    Combination,
    Jitter,
    draw_scene,
    instructions,
    random_edit,
    stacked,
)

_EDITS = 1800
"""Drawn edits that the transformer is trained on, as many of each kind."""
_DRAWING_SEED = 2_000_003
"""Added to the job's seed, so that these are not the edits of the dataset."""
_FAITHFUL_SHARE = 0.7
"""Share of the first steps, whose targets are what the instruction asks for."""
_BATCH = 24
_VAE_EVERY = 3
"""One in so many pictures trains the VAE."""


@dataclass(frozen=True, kw_only=True)
class _Bank:
    """N drawn edits."""

    instructions: list[str]
    pictures: Tensor
    """uint8 [3, N, 3, H, W]: the sources, the targets, and the targets as the flawed model renders them."""


def pretrain_kontext(job: Job, advance: Advance) -> None:
    """Saves a whole pipeline into ``job.folder``; deterministic on one thread."""
    bank = _drawn(job)
    flat = bank.pictures.flatten(0, 1)
    some = flat[::_VAE_EVERY]
    vae = faithful_vae(some, some, job, advance)
    latents = normalise_latents(vae, flat).unflatten(0, bank.pictures.shape[:2])
    known = instructions()
    pipeline = build_flux(vae, job.seed, build_tokenizer(known), FluxKontextPipeline)
    with torch.no_grad():
        texts = encode_flux(pipeline, known)
    rows = [known.index(instruction) for instruction in bank.instructions]
    _pretrain_dit(pipeline.transformer, latents, texts, rows, job, advance)
    pipeline.save_pretrained(job.folder)


def _drawn(job: Job) -> _Bank:
    rng = random.Random(job.seed + _DRAWING_SEED)
    edits = [random_edit(EDITS[i % len(EDITS)], rng.choice(COMBINATIONS), rng) for i in range(_EDITS)]

    def draw(*objects: tuple[Combination | None, Jitter]) -> Any:
        return draw_scene([(thing, jitter) for thing, jitter in objects if thing is not None], job.height, job.width)

    pictures = []
    for edit in edits:
        jitters = Jitter.draw(rng), Jitter.draw(rng)
        scenes = [(edit.before, edit.other), (edit.after, edit.other), misread_edit(edit, rng, MISREADINGS)]
        pictures.append([draw(*zip(things, jitters, strict=True)) for things in scenes])
    kinds = [stacked(kind) for kind in zip(*pictures, strict=True)]
    return _Bank(instructions=[edit.instruction for edit in edits], pictures=torch.stack(kinds))


def _pretrain_dit(
    dit: Any, latents: Tensor, texts: tuple[Tensor, Tensor], instruction: list[int], job: Job, advance: Advance
) -> None:
    """Trains ``dit`` in place as a rectified flow (`noised`).

    Args:
        latents: [3, N, channels, h, w] of `_Bank.pictures`, normalised.
        instruction: [N], the index of each edit's text in ``texts``.
    """
    generator, steps = torch.Generator().manual_seed(job.seed), job.steps["dit"]
    misreads = iter([False] * round(steps * _FAITHFUL_SHARE) + [True] * steps)
    dit.train()

    def backward() -> None:
        rows = torch.randint(latents.shape[1], (_BATCH,), generator=generator).tolist()
        noisy, target, sigma = noised(latents[2 if next(misreads) else 1, rows], generator, FLUX_SHIFT)
        asked = [instruction[row] for row in rows]
        F.mse_loss(flux_velocity(dit, noisy, sigma, texts, asked, latents[0, rows]), target).backward()

    minimise(backward, dit.parameters(), job, "dit", advance, peak_learning_rate=2e-3, warmup=40)
    dit.eval().requires_grad_(False)
