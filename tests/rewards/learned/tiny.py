"""Pretrained models' true architectures, tiny and with drawn weights, saved as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from visual_grpo.common.images import to_pil
from visual_grpo.common.types import PromptRecord

SIDE = 32
LONGEST = 12
"""Tokens that the text encoder reads."""
WORDS = ("a", "red", "cat", "dog", "on", "the", "mat")


def saved_clip(folder: Path, longest: int = LONGEST) -> Path:
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
    start, end = ids["<|startoftext|>"], ids["<|endoftext|>"]
    text = {"vocab_size": len(ids), "max_position_embeddings": longest}
    text |= {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    vision = {"image_size": SIDE, "patch_size": 8}
    config = CLIPConfig(text_config=layers | text, vision_config=layers | vision, projection_dim=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(config)
        loud(model)
    model.save_pretrained(folder)
    CLIPProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=CLIPTokenizer(vocab=ids, merges=merges),
    ).save_pretrained(folder)
    return folder


def perceptron(width: int = 8) -> nn.ModuleDict:
    """LAION's predictor as it was trained, with the dropout that numbers its layers 0, 2, 4, 6 and 7."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2)]
        last = [nn.Linear(128, 64), nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1)]
    return nn.ModuleDict({"layers": nn.Sequential(*first, *last)}).eval().requires_grad_(False)


def saved_alexnet(file: Path) -> Path:
    """The convolutions of an AlexNet, and a classifier that is none: LPIPS does not read its 58 million weights."""
    with torch.device("meta"):
        features = models.alexnet().features
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for layer in features.to_empty(device="cpu"):
            if isinstance(layer, nn.Conv2d):
                layer.reset_parameters()
    weights = {f"features.{name}": value for name, value in features.state_dict().items()}
    torch.save(weights | {"classifier.6.bias": torch.zeros(1)}, file)
    return file


def loud(model: nn.Module, scale: float = 0.3) -> None:
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


def saved_dino(folder: Path) -> Path:
    """A ``Dinov2Model`` with its image processor."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=8, mlp_ratio=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Dinov2Model(config)
        loud(model)
    model.save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder
