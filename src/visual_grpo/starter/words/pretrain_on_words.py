"""The two independent halves of the pretraining on drawn words: the AR module, and the decoder (VAE and DiT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.starter.glm_image.pretrain_ar import pretrain_ar
from visual_grpo.starter.glm_image.pretrain_vae import encode_normalised, pretrain_vae
from visual_grpo.starter.glm_image.tokenizer import build_processor
from visual_grpo.starter.job import Advance, Job
from visual_grpo.starter.words.ar_batches import word_batches
from visual_grpo.starter.words.corpus import build_corpus
from visual_grpo.starter.words.pretrain_dit import pretrain_dit_and_glyphs


def pretrain_language_half(job: Job, advance: Advance) -> None:
    """Trains the AR module and saves it as ``vision_language_encoder``."""
    corpus, processor = build_corpus(job.height, job.width, job.seed), build_processor()
    model = modules.build_ar(processor, corpus.codebook, job.seed)
    grids = [corpus.image_grid, corpus.preview_grid]
    batches = word_batches(model, processor, corpus.generated_tokens(), grids=grids, seed=job.seed)
    pretrain_ar(model, batches, steps=job.ar_steps, report=lambda done: advance("ar", done))
    model.save_pretrained(job.folder / "vision_language_encoder")


def pretrain_decoder_half(job: Job, advance: Advance) -> None:
    """Trains and saves ``vae``, ``transformer`` and the glyph encoder (``text_encoder``)."""
    corpus = build_corpus(job.height, job.width, job.seed)
    vae = modules.build_vae(*corpus.size, job.seed)
    # Only clean ink, so that decoded ghosts break letters up instead of covering them in grey.
    # Only crops, because the reward judges letters, not colours.
    pretrain_vae(
        vae,
        corpus.clean,
        steps=job.vae_steps,
        whole_share=0.0,
        seed=job.seed,
        report=lambda done: advance("vae", done),
    )
    latents = encode_normalised(vae, corpus.exposed.flatten(0, 1))
    dit, glyph_encoder = modules.build_dit(corpus.codebook, job.seed), modules.build_glyph_encoder(job.seed)
    pretrain_dit_and_glyphs(
        dit,
        glyph_encoder,
        modules.build_scheduler(),
        latents=latents.unflatten(0, corpus.exposed.shape[:2]),
        tokens=corpus.upsampled_tokens(),
        size=corpus.size,
        steps=job.dit_steps,
        seed=job.seed,
        report=lambda done: advance("dit", done),
    )
    vae.save_pretrained(job.folder / "vae")
    dit.save_pretrained(job.folder / "transformer")
    glyph_encoder.save_pretrained(job.folder / "text_encoder")


HALVES: Mapping[str, Callable[[Job, Advance], None]] = {
    "decoder": pretrain_decoder_half,
    "language": pretrain_language_half,
}
"""By name, the slower one first."""
