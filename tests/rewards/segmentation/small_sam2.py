"""Small SAM 2 and SAM 3 models with random weights whose masks depend on the prompts, saved with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIDE = 64
WIDTH = 16
DECODER = {
    "hidden_size": WIDTH,
    "mlp_dim": WIDTH,
    "num_attention_heads": 4,
    "iou_head_hidden_dim": WIDTH,
    "dynamic_multimask_via_stability": False,
}


def save_sam2(folder: Path) -> Path:
    from transformers import Sam2Config, Sam2ImageProcessor, Sam2Model, Sam2Processor

    stages = [8, 12, 16, 24]
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": stages[0],
        "num_attention_heads": 1,
        "image_size": [SIDE, SIDE],
        "patch_kernel_size": [3, 3],
        "patch_stride": [2, 2],
        "patch_padding": [1, 1],
        "query_stride": [2, 2],
        "window_positional_embedding_background_size": [4, 4],
        "num_query_pool_stages": 3,
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": stages,
        "num_attention_heads_per_stage": [1, 2, 2, 4],
        "window_size_per_stage": [8, 4, 8, 4],
        "global_attention_blocks": [3],
    }
    vision: dict[str, Any] = {"backbone_config": backbone, "backbone_channel_list": stages[::-1]}
    vision |= {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]], "fpn_hidden_size": WIDTH}
    torch.manual_seed(0)
    model = Sam2Model(_config(Sam2Config, vision)).float()
    _enlarge(model)
    return _save(folder, model, Sam2ImageProcessor, Sam2Processor)


def save_sam3(folder: Path) -> Path:
    from transformers import Sam3ImageProcessor, Sam3TrackerConfig, Sam3TrackerModel, Sam3TrackerProcessor

    backbone = {
        "model_type": "sam3_vit_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "pretrain_image_size": SIDE // 2,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": [1],
    }
    vision = {"model_type": "sam3_vision_model", "backbone_config": backbone, "fpn_hidden_size": WIDTH}
    vision |= {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
    torch.manual_seed(0)
    model = Sam3TrackerModel(_config(Sam3TrackerConfig, vision)).float()
    for part in (model.prompt_encoder, model.mask_decoder, model.shared_image_embedding):
        _enlarge(part)
    return _save(folder, model, Sam3ImageProcessor, Sam3TrackerProcessor)


def _config(kind: Any, vision: dict[str, Any]) -> Any:
    prompts = {"hidden_size": WIDTH, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4}
    return kind(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=DECODER)


@torch.no_grad()
def _enlarge(model: torch.nn.Module) -> None:
    """Initial weights are so small that every prompt gives the same mask."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_code = "embed" in name or "token" in name
            parameter.normal_(std=1.0 if is_code else 2 / parameter[0].numel() ** 0.5)
        else:
            parameter.add_(0.2 * torch.randn(parameter.shape))


@torch.no_grad()
def _save(folder: Path, model: Any, image_processor: Any, processor: Any) -> Path:
    # Image and prompt share their positional encoding in pretrained models; new models initialise them apart.
    model.prompt_encoder.shared_embedding.positional_embedding.copy_(model.shared_image_embedding.positional_embedding)
    model.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    processor(image_processor=image_processor(size=size, mask_size=size), target_size=SIDE).save_pretrained(folder)
    return folder
