"""Pretrains the small Stable Diffusion 3 on signs with random letters, of random fonts and sizes. No flaw is planted.

Its text encoders have absolute positions, so that the transformer learns in a minute which letter stands where.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.flow_models.models import SMALL_SD3, build_sd3
from examples.flow_models.pretrain import normalise_latents, pretrain_dit
from examples.flow_models.text_encoders import build_tokenizer
from examples.words.signs import FACES, SIZES, draw, prompt_of, random_text
from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.pretrain_decoder import pretrain_vae
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.shapes.render import stacked

_SIGNS = 3072
_PROMPT_TOKENS = 17
"""Of a prompt for a word of eight letters, with begin and end."""


def random_texts(rng: random.Random) -> list[str]:
    return [random_text(rng) for _ in range(_SIGNS)]


def draw_signs(height: int, width: int, seed: int) -> tuple[list[str], Tensor]:
    """Returns random texts and a sign of each, uint8 [_SIGNS, 3, height, width]."""
    rng = random.Random(seed)
    texts = random_texts(rng)
    return texts, stacked([draw(text, height, width, rng.choice(FACES), rng.uniform(*SIZES)) for text in texts])


def sign_tokenizer() -> PreTrainedTokenizerFast:
    """Every letter of a sign is a token."""
    return build_tokenizer([prompt_of("")], _PROMPT_TOKENS)


def pretrain_signs(job: Job, advance: Advance) -> None:
    """Saves a whole pipeline into ``job.folder``; deterministic on one thread."""
    texts, images = draw_signs(job.height, job.width, job.seed)
    vae = modules.build_vae(job.height, job.width, job.seed)
    pretrain_vae(vae, images, 0.0, job, advance)  # Only crops, because the reward judges letters, not colours.
    latents = normalise_latents(vae, images)
    pipeline = build_sd3(vae, max(job.height, job.width), job.seed, sign_tokenizer())
    with torch.no_grad():
        encoded = SMALL_SD3.encode(pipeline, [*map(prompt_of, texts), ""])
    pretrain_dit(
        SMALL_SD3.velocity,
        pipeline.transformer,
        shift=SMALL_SD3.shift,
        latents=latents.unsqueeze(1),
        texts=encoded,
        misread=lambda asked, _: asked,
        job=job,
        advance=advance,
    )
    pipeline.save_pretrained(job.folder)
