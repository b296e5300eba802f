"""Trains a small Sam2Model in about a minute to leave out the part of an object that has a negative point.

Two touching discs in two colours are one object. A positive anywhere in it means all of it; a negative in a disc
takes that disc out, and one on the ground takes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.segmentation.small_sam2 import build_processor, sam2_config, tie_places

if TYPE_CHECKING:
    from transformers import Sam2Model

SIDE = 32
_SCENES = 16
_LEARNING_RATE = 3e-3
_WARMUP = 30
_NEGATIVES_ONLY = 140
"""Steps in which every prompt has a negative in one of the discs. Prompts without negatives are learnt in a few steps,
but a model that learns them first keeps ignoring negatives."""
_STEPS = 300


class Discs(NamedTuple):
    """N scenes."""

    images: Tensor
    """uint8 [N, 3, SIDE, SIDE]."""
    small: Tensor
    """bool [N, SIDE, SIDE]: the smaller disc, like ``large``."""
    large: Tensor


def draw_discs(count: int, generator: torch.Generator) -> Discs:
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    small_radius, large_radius, angle = uniform(4.5, 6), uniform(6, 8), uniform(0, 6.283)
    middle_x, middle_y = uniform(SIDE / 2 - 3, SIDE / 2 + 3), uniform(SIDE / 2 - 3, SIDE / 2 + 3)
    step_x, step_y = (0.46 * (small_radius + large_radius) * part for part in (angle.cos(), angle.sin()))
    large = (x - middle_x - step_x) ** 2 + (y - middle_y - step_y) ** 2 <= large_radius**2
    small = ((x - middle_x + step_x) ** 2 + (y - middle_y + step_y) ** 2 <= small_radius**2) & ~large
    red_is_small = torch.rand(count, 1, 1, generator=generator) < 0.5
    red, both = torch.where(red_is_small, small, large), small | large
    images = torch.stack([0.05 + 0.8 * red, 0.05 + 0.4 * both, 0.05 + 0.8 * (both & ~red)], 1)
    images = images + 0.02 * torch.randn(images.shape, generator=generator)
    return Discs((images.clamp(0, 1) * 255).to(torch.uint8), small, large)


def pick(masks: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[N, count, 2] random pixels (x, y) of N masks [N, SIDE, SIDE]."""
    pixels = torch.multinomial(masks.flatten(1).float(), count, replacement=True, generator=generator)
    return torch.stack([pixels % SIDE, pixels // SIDE], -1).float()


def save_trained_sam2(folder: Path, seed: int = 0) -> Path:
    model, processor, generator = _fresh(seed), build_processor(SIDE), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, betas=(0.9, 0.98))
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min((step + 1) / _WARMUP, 1 - 0.97 * step / _STEPS)
        scenes = draw_discs(_SCENES, generator)
        points, labels, targets = _lesson(scenes, step, generator)
        pixels = processor(images=list(scenes.images), return_tensors="pt")["pixel_values"]
        # Not by get_image_embeddings: it keeps no gradient.
        output = model(pixel_values=pixels, input_points=points, input_labels=labels, multimask_output=False)
        loss = _loss(output.pred_masks[:, :, 0], targets.float())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _fresh(seed: int) -> Sam2Model:
    from transformers import Sam2Model

    torch.manual_seed(seed)
    model = Sam2Model(sam2_config(SIDE, stride=1, stages=(16, 24, 32, 48), width=32)).float()
    codes = ("point_embed", "iou_token", "mask_tokens")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # Initial weights are so small that prompts hardly matter.
                is_code = any(code in name for code in codes)
                parameter.normal_(std=1.0 if is_code else parameter[0].numel() ** -0.5)
        model.shared_image_embedding.positional_embedding.mul_(0.5)
    tie_places(model)
    return model


def _lesson(scenes: Discs, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Points [N, K, P, 2], labels [N, K, P] and targets [N, K, SIDE, SIDE] of K prompts of one or two points."""
    _, small, large = scenes
    both = small | large
    if step >= _NEGATIVES_ONLY and step % 5 == 4:
        points = pick(both, 3, generator)[:, :, None]
        targets = both[:, None].expand(-1, 3, -1, -1)
    else:
        without = {"large": (large, small), "small": (small, large)}
        if step >= _NEGATIVES_ONLY:
            without["ground"] = (~both, both)
        negatives = torch.cat([pick(where, 4, generator) for where, _ in without.values()], 1)
        points = torch.stack([pick(both, negatives.shape[1], generator), negatives], 2)
        targets = torch.stack([left for _, left in without.values()], 1).repeat_interleave(4, 1)
    labels = torch.tensor([1, 0])[: points.shape[2]].expand(points.shape[:3])
    return points, labels, targets


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, by which pixels of the object count most, and Dice."""
    weight = 1 + 3 * targets.amax(1, keepdim=True)
    entropy = (weight * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")).mean()
    shares = logits.sigmoid()
    overlap, area = (shares * targets).sum((-1, -2)), (shares + targets).sum((-1, -2))
    return entropy + 0.5 * (1 - (2 * overlap + 1) / (area + 1)).mean()
