"""Pretrains the small GLM-Image on drawn words: an image token says which tile of the sign a patch belongs to.

The tiles' colours have equal sums and norms, so that the nearest code is that of the patch's tile, however much of the
patch is covered by ink. So tokens encode where text is, but not which text.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import GlmImageTransformer2DModel
from torch import Tensor
from transformers import ByT5Tokenizer, T5EncoderModel

from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import CELLS, CODEBOOK_SIZE, build_processor
from visual_grpo.starter.glm_image.corpus import Corpus
from visual_grpo.starter.glm_image.pretrain_ar import BATCH, pretrain_ar, prompt_batches
from visual_grpo.starter.glm_image.pretrain_decoder import encode_normalised, pretrain_vae, velocity
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.draw import stacked
from visual_grpo.starter.words import TILES, WORDS, draw, prompt_of

_CYCLE = 5
"""Cells after which the pattern of an unused code repeats; 3 ** _CYCLE exceeds the number of codes."""


def tile_codebook() -> Tensor:
    """float32 [CODEBOOK_SIZE, 48] in 0..1: a code for each tile, then unused codes that are far from any picture."""
    cells = torch.arange(CELLS * CELLS)
    primaries = torch.eye(3)
    unused = [primaries[code // 3 ** (cells % _CYCLE) % 3].flatten() for code in range(CODEBOOK_SIZE)]
    codes = torch.stack(unused)
    codes[: len(TILES)] = torch.tensor(TILES, dtype=torch.float32).repeat(1, CELLS * CELLS) / 255
    return codes


_GHOST = (0.28, 0.6)
"""The deliberate flaw of the base decoder: another word (the ghost) is drawn over the requested one with a share of the
ink in this range. Both are random and independent of tokens and text, so that only the DiT can correct them: samples of
a prompt differ in them, and the OCR reward measures it (fading or blurring would not do: OCR reads ink down to 5 %)."""
_GHOST_COPIES = 4
"""Double exposures of each word; with a single one the DiT could memorise the ghost of each word."""


def build_corpus(height: int, width: int, seed: int) -> tuple[Corpus, Tensor]:
    """Draws the corpus of clean signs, one of each word, and uint8 [K, W, 3, H, W]: K double exposures of each."""
    rng = random.Random(seed)
    exposed = [
        stacked([draw(word, height, width, rng.choice(WORDS), rng.uniform(*_GHOST)) for word in WORDS])
        for _ in range(_GHOST_COPIES)
    ]
    clean = stacked([draw(word, height, width) for word in WORDS])[:, None]
    return Corpus(images=clean, codebook=tile_codebook()), torch.stack(exposed)


def text_ids() -> Tensor:
    """[W, bytes] int64: the glyph encoder's input for each word, without quotes as in `get_glyph_texts`."""
    return torch.tensor(ByT5Tokenizer()(list(WORDS)).input_ids)


def no_text_ids() -> Tensor:
    """[1, 1] int64: the glyph encoder's input for a prompt without quoted text."""
    return torch.tensor(ByT5Tokenizer()([""]).input_ids)


_DIT_BATCH = 24
_UNCONDITIONAL_ROWS = 2
"""Rows of a batch without text and image tokens, for classifier-free guidance; they need a separate forward pass,
because their texts are shorter and the DiT has no padding mask."""


def pretrain_dit_and_glyphs(
    dit: GlmImageTransformer2DModel,
    glyph_encoder: T5EncoderModel,
    *,
    latents: Tensor,
    tokens: Tensor,
    job: Job,
    advance: Advance,
) -> None:
    """Trains both modules in place as a rectified flow, with a text for every row.

    ``latents``: [K, W, channels, h, w], normalised, K pictures of each of the W words; ``tokens``: [W, (h/2) * (w/2)]
    int64, already upsampled.
    """
    generator = torch.Generator().manual_seed(job.seed)
    dit.train()
    glyph_encoder.train()
    texts, no_text = text_ids(), no_text_ids()

    def backward() -> None:
        copies = torch.randint(latents.shape[0], (_DIT_BATCH,), generator=generator)
        words = torch.randint(latents.shape[1], (_DIT_BATCH,), generator=generator)
        noisy, target, sigma = noised(latents[copies, words], generator)
        predicted = []
        for rows, is_dropped in ((slice(_UNCONDITIONAL_ROWS), True), (slice(_UNCONDITIONAL_ROWS, None), False)):
            ids = no_text.expand(_UNCONDITIONAL_ROWS, -1) if is_dropped else texts[words[rows]]
            glyphs, dropped = glyph_encoder(ids).last_hidden_state, torch.tensor([[is_dropped]])
            predicted.append(velocity(dit, noisy[rows], sigma[rows], tokens[words[rows]], dropped, glyphs, job))
        F.mse_loss(torch.cat(predicted), target).backward()

    weights = chain(dit.parameters(), glyph_encoder.parameters())
    minimise(backward, weights, job, "dit", advance, peak_learning_rate=2e-3, warmup=40)
    for module in (dit, glyph_encoder):
        module.eval().requires_grad_(False)


def pretrain_language_half(job: Job, advance: Advance) -> None:
    (corpus, _), processor = build_corpus(job.height, job.width, job.seed), build_processor()
    model = modules.build_ar(processor, corpus.codebook, job.seed)
    generator = torch.Generator().manual_seed(job.seed)

    def draw_words() -> tuple[list[int], Any]:
        words = torch.randint(len(WORDS), (BATCH,), generator=generator).tolist()
        return words, (words, 0)

    batches = prompt_batches(model, processor, [prompt_of(word) for word in WORDS], corpus, draw_words)
    pretrain_ar(model, batches, job, advance)


def pretrain_decoder_half(job: Job, advance: Advance) -> None:
    corpus, exposed = build_corpus(job.height, job.width, job.seed)
    vae = modules.build_vae(job.height, job.width, job.seed)
    # Only clean ink, so that decoded ghosts break letters up instead of covering them in grey.
    # Only crops, because the reward judges letters, not colours.
    pretrain_vae(vae, corpus.images[:, 0], 0.0, job, advance)
    latents = encode_normalised(vae, exposed.flatten(0, 1)).unflatten(0, exposed.shape[:2])
    dit, glyph_encoder = modules.build_dit(corpus.codebook, job.seed), modules.build_glyph_encoder(job.seed)
    tokens = corpus.upsampled_tokens(corpus.images[:, 0])
    pretrain_dit_and_glyphs(dit, glyph_encoder, latents=latents, tokens=tokens, job=job, advance=advance)
    vae.save_pretrained(job.folder / "vae")
    dit.save_pretrained(job.folder / "transformer")
    glyph_encoder.save_pretrained(job.folder / "text_encoder")
