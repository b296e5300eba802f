"""Pretrains a small FLUX.2 klein on pairs of rendered sources: to do what prompts say, and then to keep a colour."""

from __future__ import annotations

import random
from itertools import product

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.flow_models.pretrain import zero_layers
from examples.flow_models.text_encoders import PROMPT_TOKENS, QWEN3_WIDTH, build_qwen3, build_tokenizer
from examples.pairs.edits import PROMPTS
from visual_grpo.models.flow.references import References
from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS
from visual_grpo.starter.glm_image.pretrain_decoder import encode, faithful_vae
from visual_grpo.starter.pretraining import Advance, Job, minimise, noised
from visual_grpo.starter.shapes.render import CENTERS, COLORS, RADII, SHAPES, Combination, draw, stacked

_MISTAKEN_SHARE = 0.45
"""Share of the last steps' targets that keep the colour of the shape's own source."""
_FAITHFUL_SHARE = 0.65
_SHIFT = 6.7
"""The scheduler shifts by the numbers of tokens and of steps: by 6.9 at 5 steps, by 6.7 at 10."""
_TEXT_LAYERS = 28
"""The pipeline reads the 9th, the 18th and the 27th."""
_PATCH = 2
_BATCH = 24
_UNCONDITIONAL_SHARE = 0.1
_COPIES = 8
"""Pictures of each shape, position and size, each with a different jitter and in every colour."""
_DRAWING_SEED = 3_000_003
"""Added to the job's seed, so that these are not the pictures of the dataset."""


def pretrain_klein(job: Job, advance: Advance) -> None:
    """Saves a whole pipeline into ``job.folder``; deterministic on one thread."""
    pictures = _drawn(job)
    flat = pictures.flatten(0, 1)
    vae = faithful_vae(flat, flat, job, advance, _vae)
    latents = _normalised(vae, flat).unflatten(0, pictures.shape[:2])
    pipeline = _pipeline(vae, job.seed)
    with torch.no_grad():
        texts, _ = pipeline.encode_prompt([*PROMPTS, ""], max_sequence_length=PROMPT_TOKENS)
    _pretrain_dit(pipeline.transformer, latents, texts, job, advance)
    pipeline.save_pretrained(job.folder)


def _drawn(job: Job) -> Tensor:
    """uint8 [colors, drawings, 3, H, W]; a column is one drawing in every colour."""
    forms = [*product(SHAPES, CENTERS, RADII)] * _COPIES
    rows = []
    for color in COLORS:
        rng = random.Random(job.seed + _DRAWING_SEED)
        things = (Combination(color=color, shape=s, position=p, size=z) for s, p, z in forms)
        rows.append(stacked([draw(thing, job.height, job.width, rng) for thing in things]))
    return torch.stack(rows)


def _vae(height: int, width: int, seed: int) -> AutoencoderKLFlux2:
    torch.manual_seed(seed)
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,
        sample_size=max(height, width),
        mid_block_add_attention=False,
    )


@torch.no_grad()
def _normalised(vae: AutoencoderKLFlux2, images: Tensor) -> Tensor:
    """Encodes to patches [N, C, h, w] of mean 0 and variance 1 per channel, which the VAE's batch norm keeps."""
    patches = F.pixel_unshuffle(encode(vae, images), _PATCH)
    vae.bn.running_mean.copy_(patches.mean((0, 2, 3)))
    vae.bn.running_var.copy_(patches.var((0, 2, 3)))
    normalised: Tensor = vae.bn(patches)
    return normalised


def _pipeline(vae: AutoencoderKLFlux2, seed: int) -> Flux2KleinPipeline:
    tokenizer = build_tokenizer(PROMPTS)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(seed)
    dit = Flux2Transformer2DModel(
        in_channels=LATENT_CHANNELS * _PATCH**2,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=3 * QWEN3_WIDTH,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )
    zero_layers(dit, "_modulation.linear", "_img.linear", "_txt.linear", "norm_out.linear", "^proj_out")
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=build_qwen3(tokenizer, seed, Qwen3ForCausalLM, _TEXT_LAYERS),
        tokenizer=tokenizer,
        transformer=dit,
    )


def _pretrain_dit(dit: Flux2Transformer2DModel, latents: Tensor, texts: Tensor, job: Job, advance: Advance) -> None:
    """``latents``: [colors, drawings, C, h, w], normalised; ``texts``: [3, L, D], the last of the empty prompt."""
    generator, steps = torch.Generator().manual_seed(job.seed), job.steps["dit"]
    mistakes = iter([0.0] * round(steps * _FAITHFUL_SHARE) + [_MISTAKEN_SHARE] * steps)
    colors, drawings = latents.shape[:2]
    dit.train()

    def below(count: int) -> Tensor:
        return torch.randint(count, (_BATCH,), generator=generator)

    def share(of: float) -> Tensor:
        return torch.rand(_BATCH, generator=generator) < of

    def backward() -> None:
        shape, other, own = below(drawings), below(drawings), below(colors)
        color = (own + 1 + below(colors - 1)) % colors
        place = below(2)
        sources = torch.stack([latents[own, shape], latents[color, other]], 1)
        sources = torch.where(place.view(-1, 1, 1, 1, 1) == 1, sources.flip(1), sources)
        clean = latents[torch.where(share(next(mistakes)), own, color), shape]
        noisy, target, sigma = noised(clean, generator, _SHIFT)
        rows = torch.where(share(_UNCONDITIONAL_SHARE), len(PROMPTS), place)
        F.mse_loss(velocity(dit, noisy, sigma, texts[rows], sources), target).backward()

    minimise(backward, dit.parameters(), job, "dit", advance, peak_learning_rate=2e-3, warmup=40)
    dit.eval().requires_grad_(False)


def velocity(dit: Flux2Transformer2DModel, noisy: Tensor, sigma: Tensor, texts: Tensor, sources: Tensor) -> Tensor:
    """``noisy``: [B, C, h, w]; ``sigma``: [B]; ``texts``: [B, L, D]; ``sources``: [B, 2, C, h, w]."""
    references = References.of(sources.unbind(1))
    own = Flux2KleinPipeline._prepare_latent_ids(noisy[:1])[0]
    ids = torch.cat([own, F.pad(references.positions((10, 20)), (0, 1))])
    predicted = dit(
        hidden_states=references.beside(noisy.flatten(2).transpose(1, 2)),
        timestep=sigma,
        encoder_hidden_states=texts,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(texts[:1])[0],
        img_ids=ids,
        return_dict=False,
    )[0]
    return predicted[:, : len(own)].transpose(1, 2).reshape(noisy.shape)
