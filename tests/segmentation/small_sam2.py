"""A small Sam2Model with random weights that reads its prompts, saved with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import Sam2Model, Sam2Processor

SIDE = 64


def build_sam2(seed: int = 0) -> Sam2Model:
    from transformers import Sam2Config, Sam2Model

    widths, features = [8, 12, 16, 24], SIDE // 2
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": widths[0],
        "num_attention_heads": 1,
        "image_size": [SIDE, SIDE],
        "patch_kernel_size": [3, 3],
        "patch_stride": [2, 2],
        "patch_padding": [1, 1],
        "query_stride": [2, 2],
        "window_positional_embedding_background_size": [4, 4],
        "num_query_pool_stages": 3,
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": widths,
        "num_attention_heads_per_stage": [1, 2, 2, 4],
        "window_size_per_stage": [8, 4, 8, 4],
        "global_attention_blocks": [3],
    }
    config = Sam2Config(
        vision_config={
            "backbone_config": backbone,
            "backbone_channel_list": widths[::-1],
            "backbone_feature_sizes": [[features // 2**k] * 2 for k in range(3)],
            "fpn_hidden_size": 16,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 16,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 16,
            "dynamic_multimask_via_stability": False,
        },
    )
    torch.manual_seed(seed)
    model = Sam2Model(config).float().eval()
    with torch.no_grad():
        # Fresh weights are so small that every prompt gives the same mask.
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                is_code = "embed" in name or "token" in name
                parameter.normal_(std=1.0 if is_code else 2 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
        # A pretrained model has one code for places in the image and in the prompt; fresh ones are drawn apart.
        model.prompt_encoder.shared_embedding.positional_embedding.copy_(
            model.shared_image_embedding.positional_embedding
        )
    return model


def build_processor() -> Sam2Processor:
    from transformers import Sam2ImageProcessor, Sam2Processor

    size = {"height": SIDE, "width": SIDE}
    return Sam2Processor(image_processor=Sam2ImageProcessor(size=size, mask_size=size), target_size=SIDE)


def save_sam2(folder: Path) -> Path:
    build_sam2().save_pretrained(folder)
    build_processor().save_pretrained(folder)
    return folder
