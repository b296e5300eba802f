"""The small Stable Diffusion 3, and its pretraining: to draw what prompts say, and then to misread some words."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS
from visual_grpo.starter.glm_image.pretrain_decoder import encode_normalised, faithful_vae
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.dataset import Misreadings, misread
from visual_grpo.starter.shapes.draw import COMBINATIONS, draw_all

PROMPT_TOKENS = 12
"""Prompts are padded or cut to this length; a drawn one has nine tokens with begin and end."""
_BEGIN, _END, _PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
_VOCABULARY = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Deterministic. A byte-level BPE with CLIP's begin and end of text: it still encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_BEGIN, _END, _PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([combination.prompt for combination in COMBINATIONS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A {_END}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (_BEGIN, _END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=PROMPT_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )


SHIFT = 1.5
"""Of the scheduler: sigma = shift u / (1 + (shift - 1) u) of a uniform u."""
_LATENT_PIXELS = 8
"""Pixels a side that one latent stands for."""
_PATCH = 4
"""Latents a side of a token. A patch of 2, as in the released model, learns less in the same CPU time."""
_LAYERS, _HEADS, _HEAD_WIDTH = 4, 4, 32
_CLIP_WIDTH, _CLIP_LAYERS, _CLIP_HEADS = 32, 2, 2
_POSITION_SPREAD = 0.3
_CLIP_SEEDS = (10, 11)


def build_pipeline(vae: AutoencoderKL, height: int, width: int, seed: int) -> StableDiffusion3Pipeline:
    """The pipeline without T5, for images up to ``height`` x ``width`` pixels; its transformer is untrained."""
    tokenizer = build_tokenizer()
    first, second = (_build_clip(tokenizer, seed + offset) for offset in _CLIP_SEEDS)
    pipeline = StableDiffusion3Pipeline(
        transformer=build_transformer(max(height, width), seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_transformer(longer_side: int, seed: int) -> SD3Transformer2DModel:
    """Builds the transformer for images of at most ``longer_side`` pixels a side.

    Every block starts as the identity, and the output as 0.
    """
    torch.manual_seed(seed)
    latents = longer_side // _LATENT_PIXELS
    model = SD3Transformer2DModel(
        sample_size=latents,
        patch_size=_PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=_LAYERS,
        attention_head_dim=_HEAD_WIDTH,
        num_attention_heads=_HEADS,
        joint_attention_dim=2 * _CLIP_WIDTH,
        caption_projection_dim=_HEADS * _HEAD_WIDTH,
        pooled_projection_dim=2 * _CLIP_WIDTH,
        pos_embed_max_size=latents // _PATCH,
        qk_norm="rms_norm",
    )
    for name, module in model.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear")) or name == "proj_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model.eval()


def _build_clip(tokenizer: PreTrainedTokenizerFast, seed: int) -> CLIPTextModelWithProjection:
    """Never trained: a random encoder that keeps words apart.

    Trained with the transformer, it memorises prompts, and unseen combinations come out wrong.
    CLIP's own initial weights (std 0.02) are too small: SD3 reads the last layer but one, which no norm scales up.
    """
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_CLIP_WIDTH,
        intermediate_size=2 * _CLIP_WIDTH,
        num_hidden_layers=_CLIP_LAYERS,
        num_attention_heads=_CLIP_HEADS,
        projection_dim=_CLIP_WIDTH,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    clip = CLIPTextModelWithProjection(config).eval().requires_grad_(False)
    for name, weight in clip.named_parameters():
        if "token_embedding" in name:
            weight.normal_()
        elif "position_embedding" in name:
            weight.normal_(std=_POSITION_SPREAD)
        elif weight.ndim == 2:
            weight.normal_(std=weight.shape[1] ** -0.5)
    return clip


def normalise_latents(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents of uint8 [N, 3, H, W] as float32 [N, channels, H/8, W/8] of mean 0 and std 1 per channel.

    Changes ``vae`` so that its latents are these: exactly, since a scale and a shift per channel fold into the 1 x 1
    convolutions before and behind them.
    """
    latents = encode_normalised(vae, images)
    _fold(vae, torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std))
    vae.register_to_config(latents_mean=None, latents_std=None, scaling_factor=1.0, shift_factor=0.0)
    return latents


@torch.no_grad()
def _fold(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """``mean`` and ``std``: [channels], of the latents as they are."""
    # The first convolution gives the means and then the log-variances of the latents.
    into, out, channels = vae.quant_conv, vae.post_quant_conv, len(mean)
    into.weight[:channels] /= std.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()
    out.bias += (out.weight[:, :, 0, 0] * mean).sum(1)
    out.weight *= std.view(1, -1, 1, 1)


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
_BATCH = 24
_UNCONDITIONAL_SHARE = 0.1
"""Rows that see the empty prompt, for classifier-free guidance."""


def pretrain_dit(
    dit: SD3Transformer2DModel, *, latents: Tensor, embeds: Tensor, pooled: Tensor, job: Job, advance: Advance
) -> None:
    """Trains ``dit`` in place as a rectified flow (`noised`).

    Args:
        latents: [combinations, copies, channels, h, w], normalised; row i shows ``COMBINATIONS[i]``.
        embeds: [combinations + 1, L, D], of the combinations' prompts and, last, of the empty one.
        pooled: [combinations + 1, P], likewise.
    """
    choose, generator = random.Random(job.seed), torch.Generator().manual_seed(job.seed)
    steps = job.steps["dit"]
    misreads = iter([False] * round(steps * _FAITHFUL_SHARE) + [True] * steps)
    index = {combination: i for i, combination in enumerate(COMBINATIONS)}
    dit.train()

    def backward() -> None:
        asked = choose.choices(range(len(COMBINATIONS)), k=_BATCH)
        drawn = asked
        if next(misreads):
            drawn = [index[misread(COMBINATIONS[i], choose, MISREADINGS)] for i in asked]
        clean = latents[drawn, torch.randint(latents.shape[1], (_BATCH,), generator=generator)]
        noisy, target, sigma = noised(clean, generator, SHIFT)
        texts = [len(COMBINATIONS) if choose.random() < _UNCONDITIONAL_SHARE else i for i in asked]
        velocity = dit(
            hidden_states=noisy,
            timestep=sigma * 1000,
            encoder_hidden_states=embeds[texts],
            pooled_projections=pooled[texts],
            return_dict=False,
        )[0]
        F.mse_loss(velocity, target).backward()

    report = partial(advance, "dit")
    minimise(backward, dit.parameters(), steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    dit.eval().requires_grad_(False)


_COPIES = 8
"""Pictures of each combination, each with another jitter."""
_DRAWING_SEED = 1_000_003
"""Added to the job's seed, so that these are not the pictures of the dataset."""


def pretrain_sd3(job: Job, advance: Advance) -> None:
    """Saves a whole ``StableDiffusion3Pipeline`` without T5 into ``job.folder``.

    Reports its progress as ``vae`` and ``dit``. Deterministic on one thread.
    """
    images = draw_all(_COPIES, job.height, job.width, job.seed + _DRAWING_SEED)
    flat = images.flatten(0, 1)
    vae = faithful_vae(flat, flat, job, advance)
    latents = normalise_latents(vae, flat).unflatten(0, images.shape[:2])
    pipeline = build_pipeline(vae, job.height, job.width, job.seed)
    embeds, pooled = read_prompts(pipeline, [combination.prompt for combination in COMBINATIONS] + [""])
    pretrain_dit(pipeline.transformer, latents=latents, embeds=embeds, pooled=pooled, job=job, advance=advance)
    pipeline.save_pretrained(job.folder)


@torch.no_grad()
def read_prompts(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """[N, L, D] and pooled [N, P], with none of the zeros that stand for T5's tokens by default."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds, pooled
