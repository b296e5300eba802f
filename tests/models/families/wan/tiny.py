"""A WanPipeline or WanImageToVideoPipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.sd3 import tiny as sd3

FRAMES = 9


def pipeline(*, unipc: bool = True, i2v: bool = False, **transformer: Any) -> Any:
    """As Wan 2.1 is saved, with UniPC's steps of a flow whose shift is 3; ``transformer``: its other settings."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import CLIPImageProcessor, UMT5Config, UMT5EncoderModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2}
    if i2v:  # The noise, 4 channels that say which frames are given, and the first frame.
        sizes |= {"in_channels": 12, "image_dim": 24, "added_kv_proj_dim": 32}
    network = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, rope_max_seq_len=32, **sizes | transformer
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, -0.4],
        latents_std=[1.5, 0.8, 1.2, 0.9],
    )
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    encoder = UMT5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    images = {"image_encoder": _clip(), "image_processor": CLIPImageProcessor(size=28, crop_size=28)} if i2v else {}
    return sd3.frozen(
        (WanImageToVideoPipeline if i2v else WanPipeline)(
            tokenizer=sd3.t5_tokenizer(),
            text_encoder=UMT5EncoderModel(encoder),
            vae=vae,
            scheduler=UniPCMultistepScheduler(**flow) if unipc else FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=network,
            **images,
        )
    )


def _clip() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=14, **sizes))
