"""The small Z-Image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor

from visual_grpo.starter.flow import SmallFlowModel, pretrain_flow, zero_layers
from visual_grpo.starter.glm_image.modules import LATENT_CHANNELS
from visual_grpo.starter.pretraining import Advance, Job
from visual_grpo.starter.text_encoders import PROMPT_TOKENS, QWEN3_WIDTH, build_qwen3, build_tokenizer

_SHIFT = 6.0
"""Of the scheduler, as in the released Z-Image; Turbo has 3."""
_WIDTH, _HEADS = 128, 4
_ROTARY_WIDTHS = [8, 12, 12]
_ROTARY_LENGTHS = [64, 64, 64]
_TEXT_SEED = 10
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def build_pipeline(vae: AutoencoderKL, longer_side: int, seed: int) -> ZImagePipeline:
    """The pipeline with an untrained transformer, which takes images of any size."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE
    pipeline = ZImagePipeline(
        transformer=build_transformer(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=_SHIFT),
        vae=vae,
        text_encoder=build_qwen3(tokenizer, seed + _TEXT_SEED),
        tokenizer=tokenizer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_transformer(seed: int) -> ZImageTransformer2DModel:
    torch.manual_seed(seed)
    model = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=_WIDTH,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=_HEADS,
        n_kv_heads=_HEADS,
        cap_feat_dim=QWEN3_WIDTH,
        axes_dims=_ROTARY_WIDTHS,
        axes_lens=_ROTARY_LENGTHS,
    )
    zero_layers(model, ".adaLN_modulation.0", "^all_final_layer.2-1.linear")
    return model.eval()


def encode(pipeline: ZImagePipeline, prompts: Sequence[str]) -> list[Tensor]:
    """Returns N of [length, D]."""
    texts, _ = pipeline.encode_prompt(
        list(prompts), do_classifier_free_guidance=False, max_sequence_length=PROMPT_TOKENS
    )
    return texts


def velocity(
    dit: ZImageTransformer2DModel, noisy: Tensor, sigma: Tensor, texts: list[Tensor], rows: Sequence[int]
) -> Tensor:
    """The transformer takes the share of the image and predicts image minus noise."""
    images = dit(list(noisy[:, :, None]), 1 - sigma, [texts[row] for row in rows], return_dict=False)[0]
    return -torch.stack(images).squeeze(2)


_SMALL_Z_IMAGE = SmallFlowModel(build=build_pipeline, encode=encode, velocity=velocity, shift=_SHIFT)


def pretrain_z_image(job: Job, advance: Advance) -> None:
    pretrain_flow(_SMALL_Z_IMAGE, job, advance)
