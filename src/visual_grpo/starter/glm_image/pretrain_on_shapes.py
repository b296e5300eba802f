"""The two independent halves of the pretraining on drawn shapes: the AR module, and the decoder (VAE and DiT)."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import ByT5Tokenizer, T5EncoderModel

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.starter.glm_image.codebook import build_processor
from visual_grpo.starter.glm_image.corpus import SceneBank, build_corpus, build_edit_corpus
from visual_grpo.starter.glm_image.pretrain_ar import edit_batches, in_turns, pretrain_ar, prompt_batches
from visual_grpo.starter.glm_image.pretrain_dit import (
    Sources,
    colour_error,
    encode_like,
    encode_normalised,
    pretrain_dit,
    pretrain_vae,
)
from visual_grpo.starter.job import Advance, Job
from visual_grpo.starter.shapes.dataset import fade

_FADED_COPIES = 2
"""Faded copies of each picture; with a single one the DiT could memorise the fading of each picture."""
_WHOLE_SHARE = 0.4
"""Share of the VAE's steps on whole images; see `pretrain_vae`."""
_VAE_ATTEMPTS = 3
_NEXT_SEED = 10_007
_COLOUR_ERROR = 0.125
"""Maximum `colour_error` of an accepted VAE: half of the tolerance of the judge of shapes."""


def pretrain_language_half(job: Job, advance: Advance) -> None:
    """Trains the AR module and saves it as ``vision_language_encoder``."""
    corpus, processor = build_corpus(job.height, job.width, job.seed), build_processor(job.task)
    model = modules.build_ar(processor, corpus.codebook, job.seed)
    kinds = []
    if job.task != "i2i":
        grids = [corpus.image_grid, corpus.preview_grid]
        kinds.append(prompt_batches(model, processor, corpus.generated_tokens(), grids=grids, seed=job.seed))
    if job.task != "t2i":
        bank = SceneBank(corpus.codebook, job.height, job.width, job.seed)
        kinds.append(edit_batches(model, processor, bank, seed=job.seed))
    pretrain_ar(model, in_turns(*kinds), steps=job.steps["ar"], report=lambda done: advance("ar", done))
    model.save_pretrained(job.folder / "vision_language_encoder")


def pretrain_decoder_half(job: Job, advance: Advance) -> None:
    """Trains and saves ``vae`` and ``transformer``; the DiT's targets are faded, source images are not."""
    corpus = build_corpus(job.height, job.width, job.seed)
    edits = None if job.task == "t2i" else build_edit_corpus(corpus.codebook, job.height, job.width, job.seed)
    shown = corpus.images.flatten(0, 1) if edits is None else edits.targets
    tokens = corpus.upsampled_tokens() if edits is None else edits.target_tokens
    plain = shown if edits is None else edits.sources
    faded = torch.cat([fade(shown, job.seed + copy) for copy in range(_FADED_COPIES)])
    vae = faithful_vae(job, torch.cat([plain, faded]), plain, advance)
    dit = modules.build_dit(corpus.codebook, job.seed)
    latents = encode_normalised(vae, faded)
    pretrain_dit(
        dit,
        modules.build_scheduler(),
        latents=latents,
        tokens=tokens.repeat(_FADED_COPIES, 1),
        glyphs=_no_glyphs(modules.build_glyph_encoder(job.seed)),
        size=corpus.size,
        sources=None if edits is None else Sources(latents=encode_like(vae, plain), tokens=edits.source_tokens),
        steps=job.steps["dit"],
        seed=job.seed,
        report=lambda done: advance("dit", done),
    )
    vae.save_pretrained(job.folder / "vae")
    dit.save_pretrained(job.folder / "transformer")


def faithful_vae(job: Job, images: Tensor, plain: Tensor, advance: Advance) -> AutoencoderKL:
    """Trains up to `_VAE_ATTEMPTS` VAEs until one preserves the colours of ``plain``; returns the best one.

    Some seeds give a decoder that dulls a colour, which no training of the DiT can correct.
    """
    tried: list[tuple[float, AutoencoderKL]] = []
    for attempt in range(_VAE_ATTEMPTS):
        seed = job.seed + _NEXT_SEED * attempt
        vae = modules.build_vae(job.height, job.width, seed)
        pretrain_vae(
            vae,
            images,
            steps=job.steps["vae"],
            whole_share=_WHOLE_SHARE,
            seed=seed,
            report=lambda done: advance("vae", done),
        )
        tried.append((colour_error(vae, plain), vae))
        if tried[-1][0] <= _COLOUR_ERROR:
            break
    return min(tried, key=lambda found: found[0])[1]


@torch.no_grad()
def _no_glyphs(encoder: T5EncoderModel) -> Tensor:
    """[1, L, width]: the DiT's text input for a prompt without quoted text."""
    ids = torch.tensor([ByT5Tokenizer()("").input_ids])
    return encoder(ids).last_hidden_state
