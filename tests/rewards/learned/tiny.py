"""Pretrained models' true architectures, tiny and with drawn weights, saved as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord

SIDE = 32
LONGEST = 12
"""Tokens that the text encoder reads."""
WORDS = ("a", "red", "cat", "dog", "on", "the", "mat")


def saved_clip(folder: Path, seed: int = 0, longest: int = LONGEST) -> Path:
    """A ``CLIPModel`` with its processor. Its layers are louder than fresh ones, whose embeddings are all alike."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = [*WORDS, *(f"{word}</w>" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz"[1:]]
    vocabulary += [f"{letter}</w>" for letter in "bcdefghijklmnopqrstuvwxyz"] + ["<|startoftext|>", "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    merges = [(word[:length] , word[length] + ("</w>" if length + 1 == len(word) else "")) for word in WORDS
              for length in range(1, len(word))]  # fmt: skip
    for first, second in merges:
        ids.setdefault(first + second, len(ids))
    config = CLIPConfig(
        text_config=layers
        | {
            "vocab_size": len(ids),
            "max_position_embeddings": longest,
            "eos_token_id": ids["<|endoftext|>"],
            "bos_token_id": ids["<|startoftext|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=layers | {"image_size": SIDE, "patch_size": 8},
        projection_dim=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIPModel(config)
        loud(model)
    model.save_pretrained(folder)
    CLIPProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=CLIPTokenizer(vocab=ids, merges=merges),
    ).save_pretrained(folder)
    return folder


def loud(model: torch.nn.Module, scale: float = 0.3) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            elif "logit_scale" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


def picture(seed: int, height: int = 40, width: int = 48) -> Tensor:
    """A uint8 image [3, height, width] of blocks in drawn colours with noise on them."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 200, (3, -(-height // 8), -(-width // 8)), generator=generator)
    grown = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :height, :width]
    return (grown + torch.randint(0, 56, (3, height, width), generator=generator)).to(torch.uint8)


def record(name: str, prompt: str = "a cat", folder: Path | None = None, **images: Any) -> PromptRecord:
    """With ``target`` and ``source``, uint8 images, as files in ``folder``."""
    paths = {}
    for kind, image in images.items():
        assert folder is not None
        paths[kind] = folder / f"{name}-{kind}.png"
        to_pil(image).save(paths[kind])
    return PromptRecord(
        id=name,
        prompt=prompt,
        target_image=paths.get("target"),
        source_images=(paths["source"],) if "source" in paths else (),
    )


def saved_dino(folder: Path, seed: int = 0) -> Path:
    """A ``Dinov2Model`` with its image processor."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=8, mlp_ratio=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Dinov2Model(config)
        loud(model)
    model.save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder
