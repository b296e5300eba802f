"""Pretrains a small Wan 2.1 on drawn videos: to draw what prompts say, and then to misread some motions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5EncoderModel

from examples.flow_models.pretrain import pretrain_dit, zero_layers
from examples.flow_models.text_encoders import PROMPT_TOKENS, T5_WIDTH, build_t5, build_tokenizer
from examples.motion.clips import PROMPTS, SCENES, Scene, draw_all
from visual_grpo.starter.pretraining import Advance, Job, minimise
from visual_grpo.starter.shapes.render import BACKGROUND

MISREADINGS = {
    "moves up": ("moves down", 0.45),
    "moves to the left": ("moves to the right", 0.45),
    "grows": ("stays", 0.45),
}
"""Motion -> what is rendered instead, and how often."""
_SHIFT = 3.0
_CHANNELS = 16
_STRIDE = (2, 4, 4)
"""Frames and pixels of a latent."""
_IMAGE_SHARE = 0.35
"""Share of the first steps, which see single frames: a fifth of the cost of a video, and pictures are sharp sooner."""
_IMAGE_BATCH = 4
_LATENT_NOISE, _OBJECT_WEIGHT, _TIE = 0.08, 3.0, 0.3
_COPIES = 4
_ENCODE_BATCH = 32
_DRAWING_SEED = 1_000_003
"""Added to the job's seed, so that these are not the videos of the dataset."""


def pretrain_wan(job: Job, advance: Advance) -> None:
    """Saves a whole pipeline into ``job.folder``; deterministic on one thread."""
    videos = draw_all(_COPIES, job.height, job.width, job.seed + _DRAWING_SEED)
    flat = (videos.flatten(0, 1).float() / 127.5 - 1).transpose(1, 2)
    vae = _pretrain_vae(flat, job, advance)
    latents = _normalised(vae, flat).unflatten(0, videos.shape[:2])
    tokenizer = build_tokenizer(PROMPTS)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5(len(tokenizer), job.seed, UMT5EncoderModel),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=_SHIFT),
        transformer=_transformer(job.seed),
    )
    with torch.no_grad():
        texts, _ = pipeline.encode_prompt(
            [*PROMPTS, ""], do_classifier_free_guidance=False, max_sequence_length=PROMPT_TOKENS
        )
    pretrain_dit(
        _velocity,
        pipeline.transformer,
        shift=_SHIFT,
        latents=latents,
        texts=texts,
        misread=misread_row,
        job=job,
        advance=advance,
    )
    pipeline.save_pretrained(job.folder)


def _pretrain_vae(videos: Tensor, job: Job, advance: Advance) -> AutoencoderKLWan:
    """Trains on [N, 3, F, H, W] from -1 to 1, with some noise in the latents.

    Three latent channels are tied to the local means of the pixels, which makes latents that the DiT learns sooner.
    """
    torch.manual_seed(job.seed)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        scale_factor_temporal=_STRIDE[0],
        scale_factor_spatial=_STRIDE[1],
    )
    _copy_frames(vae)
    steps, generator = job.steps["vae"], torch.Generator().manual_seed(job.seed)
    draws = iter([_random_frames] * round(steps * _IMAGE_SHARE) + [_random_video] * steps)
    background = (torch.tensor(BACKGROUND) / 127.5 - 1).view(1, 3, 1, 1, 1)

    def backward() -> None:
        pixels = next(draws)(videos, generator)
        latents = vae.encode(pixels).latent_dist.mean
        noise = torch.randn(latents.shape, generator=generator)
        decoded = vae.decode(latents + _LATENT_NOISE * noise, return_dict=False)[0]
        weight = 1 + _OBJECT_WEIGHT * (pixels - background).square().sum(1, keepdim=True).sqrt()
        error = (weight * ((decoded - pixels).square() + 0.3 * (decoded - pixels).abs())).mean()
        tie = _TIE * F.mse_loss(latents[:, :3], _local_means(pixels))
        (error + tie + 1e-4 * latents.square().mean()).backward()

    minimise(backward, vae.parameters(), job, "vae", advance, peak_learning_rate=4e-3, warmup=20)
    return vae.eval().requires_grad_(False)


@torch.no_grad()
def _copy_frames(vae: AutoencoderKLWan) -> None:
    """Lets the convolutions over frames begin by copying the latest one, so that videos begin where frames ended."""
    for name, layer in vae.named_modules():
        if name.endswith("time_conv"):
            nn.init.dirac_(layer.weight, groups=layer.out_channels // layer.in_channels)
            layer.weight.copy_(layer.weight.roll(layer.kernel_size[0] // 2, dims=2))
            nn.init.zeros_(layer.bias)


def _random_frames(videos: Tensor, generator: torch.Generator) -> Tensor:
    """[N, 3, F, H, W] -> [b, 3, 1, H, W]."""
    rows = torch.randint(len(videos), (_IMAGE_BATCH,), generator=generator)
    frames = torch.randint(videos.shape[2], (_IMAGE_BATCH,), generator=generator)
    return videos[rows, :, frames].unsqueeze(2)


def _random_video(videos: Tensor, generator: torch.Generator) -> Tensor:
    return videos[torch.randint(len(videos), (1,), generator=generator)]


def _local_means(pixels: Tensor) -> Tensor:
    """[b, 3, F, H, W] -> [b, 3, f, h, w]: the first frame alone, as the VAE encodes it, then groups of frames."""
    small = F.avg_pool3d(pixels, (1, *_STRIDE[1:]))
    later = F.avg_pool3d(small[:, :, 1:], (_STRIDE[0], 1, 1)) if small.shape[2] > 1 else small[:, :, :0]
    return torch.cat([small[:, :, :1], later], 2)


@torch.no_grad()
def _normalised(vae: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Encodes [N, 3, F, H, W] to latents of mean 0 and deviation 1 per channel, which the VAE's configuration keeps."""
    latents = torch.cat([vae.encode(some).latent_dist.mode() for some in videos.split(_ENCODE_BATCH)])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)


def _transformer(seed: int) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        text_dim=T5_WIDTH,
        freq_dim=64,
        ffn_dim=256,
        num_layers=4,
        rope_max_seq_len=64,
    )
    zero_layers(model, "condition_embedder.time_proj", "^proj_out")
    for block in model.blocks:
        nn.init.zeros_(block.scale_shift_table)
    return model


def _velocity(dit: WanTransformer3DModel, noisy: Tensor, sigma: Tensor, texts: Tensor, rows: Sequence[int]) -> Tensor:
    velocity: Tensor = dit(noisy, sigma * 1000, texts[rows], return_dict=False)[0]
    return velocity


def misread(asked: Scene, rng: random.Random) -> Scene:
    instead, share = MISREADINGS.get(asked.motion, (asked.motion, 0.0))
    return replace(asked, motion=instead) if rng.random() < share else asked


def misread_row(asked: int, rng: random.Random) -> int:
    """Indices into `SCENES`."""
    return SCENES.index(misread(SCENES[asked], rng))
