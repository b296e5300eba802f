"""A small Sam3TrackerModel with random weights whose masks depend on the prompts, saved with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.rewards.segmentation.small_sam2 import SIDE, enlarge, tie_places

if TYPE_CHECKING:
    from transformers import Sam3TrackerConfig


def sam3_config(side: int, patch: int, width: int) -> Sam3TrackerConfig:
    from transformers import Sam3TrackerConfig

    features = side // patch
    backbone = {
        "model_type": "sam3_vit_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": side,
        "pretrain_image_size": side // 2,
        "patch_size": patch,
        "window_size": 4,
        "global_attn_indexes": [1],
    }
    return Sam3TrackerConfig(
        vision_config={
            "model_type": "sam3_vision_model",
            "backbone_config": backbone,
            "fpn_hidden_size": width,
            "backbone_feature_sizes": [[features * scale] * 2 for scale in (4, 2, 1)],
        },
        prompt_encoder_config={"hidden_size": width, "image_size": side, "patch_size": patch, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": width,
            "mlp_dim": width,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": width,
            "dynamic_multimask_via_stability": False,
        },
    )


def save_sam3(folder: Path) -> Path:
    from transformers import Sam3ImageProcessor, Sam3TrackerModel, Sam3TrackerProcessor

    torch.manual_seed(0)
    model = Sam3TrackerModel(sam3_config(SIDE, patch=8, width=16)).float().eval()
    for part in (model.prompt_encoder, model.mask_decoder, model.shared_image_embedding):
        enlarge(part)
    tie_places(model)
    model.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    processor = Sam3TrackerProcessor(image_processor=Sam3ImageProcessor(size=size, mask_size=size), target_size=SIDE)
    processor.save_pretrained(folder)
    return folder
