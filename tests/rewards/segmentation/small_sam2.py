"""A small Sam2Model with random weights whose masks depend on the prompts, saved with its processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Sam2Config, Sam2Model, Sam2Processor

SIDE = 64


def sam2_config(side: int, stride: int, stages: Sequence[int], width: int) -> Sam2Config:
    """For square images of ``side`` pixels with patches of ``stride`` pixels; ``stages``: the encoder's four widths."""
    from transformers import Sam2Config

    features = side // stride
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": stages[0],
        "num_attention_heads": 1,
        "image_size": [side, side],
        "patch_kernel_size": [3, 3],
        "patch_stride": [stride, stride],
        "patch_padding": [1, 1],
        "query_stride": [2, 2],
        "window_positional_embedding_background_size": [4, 4],
        "num_query_pool_stages": 3,
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": list(stages),
        "num_attention_heads_per_stage": [1, 2, 2, 4],
        "window_size_per_stage": [8, 4, 8, 4],
        "global_attention_blocks": [3],
    }
    return Sam2Config(
        vision_config={
            "backbone_config": backbone,
            "backbone_channel_list": list(stages)[::-1],
            "backbone_feature_sizes": [[features // 2**k] * 2 for k in range(3)],
            "fpn_hidden_size": width,
        },
        prompt_encoder_config={
            "hidden_size": width,
            "image_size": side,
            "patch_size": 4 * stride,
            "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": width,
            "mlp_dim": width,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": width,
            "dynamic_multimask_via_stability": False,
        },
    )


def build_sam2(seed: int = 0) -> Sam2Model:
    from transformers import Sam2Model

    torch.manual_seed(seed)
    model = Sam2Model(sam2_config(SIDE, stride=2, stages=(8, 12, 16, 24), width=16)).float().eval()
    enlarge(model)
    tie_places(model)
    return model


@torch.no_grad()
def enlarge(model: torch.nn.Module) -> None:
    """Initial weights are so small that every prompt gives the same mask."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_code = "embed" in name or "token" in name
            parameter.normal_(std=1.0 if is_code else 2 / parameter[0].numel() ** 0.5)
        else:
            parameter.add_(0.2 * torch.randn(parameter.shape))


@torch.no_grad()
def tie_places(model: Any) -> None:
    """Shares the positional encoding of image and prompt as in pretrained models; new models initialise them apart."""
    model.prompt_encoder.shared_embedding.positional_embedding.copy_(model.shared_image_embedding.positional_embedding)


def build_processor(side: int = SIDE) -> Sam2Processor:
    from transformers import Sam2ImageProcessor, Sam2Processor

    size = {"height": side, "width": side}
    return Sam2Processor(image_processor=Sam2ImageProcessor(size=size, mask_size=size), target_size=side)


def save_sam2(folder: Path) -> Path:
    build_sam2().save_pretrained(folder)
    build_processor().save_pretrained(folder)
    return folder
