"""Sets the weights of the vision tower and the VQ codebook in closed form.

The tower then computes the cell means of a patch (`codebook.patch_features`) and the quantiser selects the nearest
code, all with GLM-Image's own modules. So tokens from the tower and tokens from the AR module mean the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor
from transformers.models.glm_image.modeling_glm_image import GlmImageVisionModel, GlmImageVQVAE

from visual_grpo.starter.glm_image.codebook import CELLS, FEATURES
from visual_grpo.starter.glm_image.tokenizer import VISION_PATCH

_SHIFT = 0.5
"""Subtracted from both features and codes: distances do not change, norms become smaller."""


@torch.no_grad()
def set_vision_tower(model: GlmImageForConditionalGeneration, processor: GlmImageProcessor, codebook: Tensor) -> None:
    """Sets the weights of tower and quantiser in place and freezes them. ``codebook``: [K, 48] in 0..1."""
    _set_patch_means(model.model.visual, processor.image_processor.image_mean, processor.image_processor.image_std)
    _set_nearest_code(model.model.vqmodel, codebook)
    model.model.visual.requires_grad_(False)
    model.model.vqmodel.requires_grad_(False)


def _set_patch_means(tower: GlmImageVisionModel, mean: list[float], std: list[float]) -> None:
    """Channel (cell, colour) = mean of that cell with the normalisation undone; channel 48 is the constant 1."""
    for block in tower.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):  # makes every residual branch output 0
            layer.weight.zero_()
            layer.bias.zero_()
    tower.embeddings.position_embedding.weight.zero_()
    weight, bias = tower.patch_embed.proj.weight.zero_(), tower.patch_embed.proj.bias.zero_()
    side = VISION_PATCH // CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            for color in range(3):
                channel = (row * CELLS + column) * 3 + color
                cell = weight[channel, color, row * side : (row + 1) * side, column * side : (column + 1) * side]
                cell.fill_(std[color] / side**2)
                bias[channel] = mean[color] - _SHIFT
    bias[FEATURES] = 1.0


def _set_nearest_code(vqmodel: GlmImageVQVAE, codebook: Tensor) -> None:
    """Makes the argmax of the quantiser's cosine similarity equal the argmin of the L2 distance ``|f - c|^2``.

    The quantiser normalises features and codes. With f' = (f, 1) and c' = (c, (m - |c|^2) / 2, r), where r gives all
    c' the same norm, the cosine of f' and c' increases with f.c - |c|^2 / 2, that is, decreases with the distance.
    """
    vqmodel.quant_conv.weight.zero_()
    vqmodel.quant_conv.bias.zero_()
    for channel in range(FEATURES + 1):
        vqmodel.quant_conv.weight[channel, channel] = 1.0
    codes = codebook - _SHIFT
    square = codes.square().sum(1)
    embedding = vqmodel.quantize.embedding.weight.zero_()
    embedding[:, :FEATURES] = codes
    embedding[:, FEATURES] = (square.max() - square) / 2
    norm = embedding.square().sum(1)
    embedding[:, FEATURES + 1] = (norm.max() - norm).sqrt()
