"""The visual vocabulary of drawn words: an image token says which tile of the sign a patch belongs to.

The tiles' colours have equal sums and norms, so that the nearest code is that of the patch's tile, however much of the
patch is covered by ink. So tokens encode where text is, but not which text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from torch import Tensor
from transformers import ByT5Tokenizer, GlmImageForConditionalGeneration, GlmImageProcessor, T5EncoderModel

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.starter.glm_image.codebook import CELLS, CODEBOOK_SIZE, FEATURES, PATCH, build_processor
from visual_grpo.starter.glm_image.corpus import Corpus, Grid, preview_grid
from visual_grpo.starter.glm_image.pretrain_ar import ArBatch, encode_texts, pretrain_ar
from visual_grpo.starter.glm_image.pretrain_dit import encode_normalised, pretrain_vae, time_shift, unshifted_timesteps
from visual_grpo.starter.job import Advance, Job
from visual_grpo.starter.optimise import Report, minimise, random_sigma
from visual_grpo.starter.shapes.draw import stacked
from visual_grpo.starter.words.world import TILES, WORDS, draw, prompt_of

_CYCLE = 5
"""Number of cells after which the pattern of an unused code repeats; 3 ** _CYCLE exceeds the number of codes."""


def tile_codebook() -> Tensor:
    """float32 [CODEBOOK_SIZE, 48] in 0..1: a code for each tile, then unused codes that are far from any picture."""
    cells = torch.arange(CELLS * CELLS)
    primaries = torch.eye(3)
    unused = [primaries[code // 3 ** (cells % _CYCLE) % 3].flatten() for code in range(CODEBOOK_SIZE)]
    codes = torch.stack(unused)
    codes[: len(TILES)] = torch.tensor(TILES, dtype=torch.float32).repeat(1, CELLS * CELLS) / 255
    assert codes.shape == (CODEBOOK_SIZE, FEATURES)
    return codes


GHOST = (0.28, 0.6)
"""The deliberate flaw of the base decoder: another word (the ghost) is drawn over the requested one with a share of the
ink in this range. Ghost and share are random for each picture and independent of tokens and text, so that only the DiT
can correct them: samples of the same prompt differ in them, and the OCR reward measures the difference. (Fading or
blurring would not do: the OCR model reads ink down to 5 %, and blur beyond what people can read.)"""
_GHOST_COPIES = 4
"""Double exposures of each word; with a single one the DiT could memorise the ghost of each word."""


def build_corpus(height: int, width: int, seed: int) -> tuple[Corpus, Tensor]:
    """Draws the corpus of clean signs, one of each word, and uint8 [K, W, 3, H, W]: K double exposures of each.

    Deterministic in its arguments. ``height`` and ``width`` are pixels, multiples of 32.
    """
    rng = random.Random(seed)
    exposed = [
        stacked([draw(word, height, width, rng.choice(WORDS), rng.uniform(*GHOST)) for word in WORDS])
        for _ in range(_GHOST_COPIES)
    ]
    clean = Corpus(
        images=stacked([draw(word, height, width) for word in WORDS])[:, None],
        codebook=tile_codebook(),
        image_grid=(height // PATCH, width // PATCH),
        preview_grid=preview_grid(height, width),
    )
    return clean, torch.stack(exposed)


def text_ids() -> Tensor:
    """[W, bytes] int64: the glyph encoder's input for each word, without quotes as in `get_glyph_texts`."""
    return torch.tensor(ByT5Tokenizer()(list(WORDS)).input_ids)


def no_text_ids() -> Tensor:
    """[1, 1] int64: the glyph encoder's input for a prompt without quoted text."""
    return torch.tensor(ByT5Tokenizer()([""]).input_ids)


_BATCH = 48


def word_batches(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens: Tensor,
    *,
    grids: list[Grid],
    seed: int,
) -> Iterator[ArBatch]:
    """Infinite batches of prompts.

    ``tokens``: [W, T] int64, the tokens to generate for each word: preview, image and end token; ``grids``: (rows,
    columns) of the image and of the preview.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [prompt_of(word) for word in WORDS]
    encoded = encode_texts(model, processor, texts, sources=[], targets=grids, generated=tokens.shape[1])
    while True:
        words = torch.randint(len(WORDS), (_BATCH,), generator=generator)
        yield encoded.batch(words.tolist(), encoded.ids[words], tokens[words])


_DIT_BATCH = 24
_UNCONDITIONAL_ROWS = 2
"""Rows of a batch without text and image tokens, for classifier-free guidance; they need a separate forward pass,
because their texts are shorter and the DiT has no padding mask."""


def pretrain_dit_and_glyphs(
    dit: GlmImageTransformer2DModel,
    glyph_encoder: T5EncoderModel,
    scheduler: FlowMatchEulerDiscreteScheduler,
    *,
    latents: Tensor,
    tokens: Tensor,
    size: tuple[int, int],
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Trains both modules in place as a rectified flow, like `glm_image.pretrain_dit` but with a text for every row.

    ``latents``: [K, W, channels, h, w], normalised, K pictures of each of the W words; ``tokens``: [W, (h/2) * (w/2)]
    int64, already upsampled; ``size``: (height, width) in pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    dit.train()
    glyph_encoder.train()
    shift, texts, no_text = time_shift(scheduler, tokens.shape[1]), text_ids(), no_text_ids()

    def velocity(noisy: Tensor, sigma: Tensor, words: Tensor, *, conditional: bool) -> Tensor:
        ids = texts[words] if conditional else no_text.expand(len(words), -1)
        return dit(
            hidden_states=noisy,
            encoder_hidden_states=glyph_encoder(ids).last_hidden_state,
            prior_token_id=tokens[words],
            prior_token_drop=torch.full_like(tokens[words], not conditional, dtype=torch.bool),
            timestep=unshifted_timesteps(sigma.flatten(), shift) - 1,  # - 1 as in the pipeline
            target_size=torch.tensor([size], dtype=torch.float32).expand(len(words), -1),
            crop_coords=torch.zeros(len(words), 2),
            return_dict=False,
        )[0]

    def backward() -> None:
        copies = torch.randint(latents.shape[0], (_DIT_BATCH,), generator=generator)
        words = torch.randint(latents.shape[1], (_DIT_BATCH,), generator=generator)
        clean, noise = latents[copies, words], torch.randn((_DIT_BATCH, *latents.shape[2:]), generator=generator)
        sigma = random_sigma(_DIT_BATCH, generator)
        noisy = (1 - sigma) * clean + sigma * noise
        without, rest = slice(0, _UNCONDITIONAL_ROWS), slice(_UNCONDITIONAL_ROWS, None)
        predicted = torch.cat(
            [
                velocity(noisy[without], sigma[without], words[without], conditional=False),
                velocity(noisy[rest], sigma[rest], words[rest], conditional=True),
            ]
        )
        F.mse_loss(predicted, noise - clean).backward()

    weights = chain(dit.parameters(), glyph_encoder.parameters())
    minimise(backward, weights, steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    for module in (dit, glyph_encoder):
        module.eval().requires_grad_(False)


def pretrain_language_half(job: Job, advance: Advance) -> None:
    """Trains the AR module and saves it as ``vision_language_encoder``."""
    (corpus, _), processor = build_corpus(job.height, job.width, job.seed), build_processor()
    model = modules.build_ar(processor, corpus.codebook, job.seed)
    grids = [corpus.image_grid, corpus.preview_grid]
    batches = word_batches(model, processor, corpus.generated_tokens()[:, 0], grids=grids, seed=job.seed)
    pretrain_ar(model, batches, steps=job.steps["ar"], report=lambda done: advance("ar", done))
    model.save_pretrained(job.folder / "vision_language_encoder")


def pretrain_decoder_half(job: Job, advance: Advance) -> None:
    """Trains and saves ``vae``, ``transformer`` and the glyph encoder (``text_encoder``)."""
    corpus, exposed = build_corpus(job.height, job.width, job.seed)
    vae = modules.build_vae(*corpus.size, job.seed)
    # Only clean ink, so that decoded ghosts break letters up instead of covering them in grey.
    # Only crops, because the reward judges letters, not colours.
    pretrain_vae(
        vae,
        corpus.images[:, 0],
        steps=job.steps["vae"],
        whole_share=0.0,
        seed=job.seed,
        report=lambda done: advance("vae", done),
    )
    latents = encode_normalised(vae, exposed.flatten(0, 1))
    dit, glyph_encoder = modules.build_dit(corpus.codebook, job.seed), modules.build_glyph_encoder(job.seed)
    pretrain_dit_and_glyphs(
        dit,
        glyph_encoder,
        modules.build_scheduler(),
        latents=latents.unflatten(0, exposed.shape[:2]),
        tokens=corpus.upsampled_tokens(),
        size=corpus.size,
        steps=job.steps["dit"],
        seed=job.seed,
        report=lambda done: advance("dit", done),
    )
    vae.save_pretrained(job.folder / "vae")
    dit.save_pretrained(job.folder / "transformer")
    glyph_encoder.save_pretrained(job.folder / "text_encoder")
