"""The models of the learned rewards in their true sizes with drawn weights, saved as the hub has them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

TEXT_LENGTH, VOCABULARY = 77, 49408
LARGE = {
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    "projection_dim": 768,
}
"""CLIP ViT-L/14."""
HUGE = {
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
    "projection_dim": 1024,
}
"""CLIP ViT-H/14."""


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """The options of a reward that needs weights, which are saved in ``folder``; none of another one."""
    if name in ("clip_score", "aesthetic"):
        _save_clip(folder, LARGE)
    if name in ("pick_score", "hps"):
        _save_clip(folder, HUGE)
    if name in ("dino_identity", "dino_structure"):
        _save_dino(folder)
    if name == "aesthetic":
        _save_head(folder)
        return {"model": str(folder), "head": str(folder)}
    if name == "lpips":
        return {"backbone": str(_save_backbone(folder))}
    return {"model": str(folder)} if any(folder.iterdir()) else {}


def _save_clip(folder: Path, sizes: dict[str, Any]) -> None:
    """Its tokenizer knows letters only, so that it cuts a prompt into more tokens than the true one does."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    ids = {token: number for number, token in enumerate([*letters, '"', '"</w>', "<|startoftext|>", "<|endoftext|>"])}
    text = sizes["text_config"] | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": TEXT_LENGTH,
        "bos_token_id": ids["<|startoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    CLIPModel(CLIPConfig(**sizes | {"text_config": text})).save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab=ids, merges=[])
    CLIPProcessor(image_processor=CLIPImageProcessor(), tokenizer=tokenizer).save_pretrained(folder)


def _save_dino(folder: Path) -> None:
    """DINOv2 ViT-B/14."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    Dinov2Model(Dinov2Config(image_size=518, patch_size=14)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 256}).save_pretrained(folder)


def _save_head(folder: Path) -> None:
    sizes = (768, 1024, 128, 64, 16, 1)
    weights = {}
    for number, before, after in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        weights[f"layers.{number}.weight"] = torch.randn(after, before) / before**0.5
        weights[f"layers.{number}.bias"] = torch.zeros(after)
    torch.save(weights, folder / "aesthetic-model.pth")


def _save_backbone(folder: Path) -> Path:
    from torchvision import models

    torch.save(models.alexnet().state_dict(), folder / "alexnet.pth")
    return folder / "alexnet.pth"
