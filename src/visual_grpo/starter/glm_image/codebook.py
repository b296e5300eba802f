"""The visual vocabulary of the small model: the codebook of patches of 32 x 32 pixels.

A code is a colour times an occupancy pattern (the covered share of each of the 4 x 4 cells of the patch); code 0 is
the background. The patterns are k-means centres of rendered patches, so a grid of codes represents the whole picture.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GlmImageProcessor, PreTrainedTokenizerFast
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from visual_grpo.config import Task
from visual_grpo.starter.shapes.render import BACKGROUND, COLORS, texts

PATCH = 32
"""Pixels per side of the patch that one image token of GLM-Image represents."""
CELLS = 4
"""Cells along each side of a patch."""
FEATURES = CELLS * CELLS * 3
PATTERNS = 40
"""Number of occupancy patterns of each colour."""
CODEBOOK_SIZE = 1 + len(COLORS) * PATTERNS
_KMEANS_STEPS = 25


def patch_features(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean colour of every cell of every patch.

    ``images``: [N, 3, H, W] in 0..1, of any size; ``grid``: rows and columns of patches.
    Returns [N, rows * columns, 48]: cells row by row, RGB innermost.
    """
    rows, columns = grid
    cells = F.adaptive_avg_pool2d(images, (rows * CELLS, columns * CELLS))
    cells = cells.view(len(images), 3, rows, CELLS, columns, CELLS).permute(0, 2, 4, 3, 5, 1)
    return cells.reshape(len(images), rows * columns, FEATURES)


def nearest_codes(images: Tensor, grid: tuple[int, int], codebook: Tensor) -> Tensor:
    """Image tokens, [N, rows * columns] int64: the code nearest to each patch in L2."""
    return torch.cdist(patch_features(images, grid), codebook).argmin(-1)


def fit_codebook(images: Tensor, grids: list[tuple[int, int]], seed: int) -> Tensor:
    """Fits the codebook, [CODEBOOK_SIZE, 48] in 0..1, to rendered images of every colour ([N, 3, H, W] in 0..1)."""
    occupancy = torch.cat([_occupancy(patch_features(images, grid)) for grid in grids])
    patterns = _kmeans(occupancy, PATTERNS, torch.Generator().manual_seed(seed))
    background = torch.tensor(BACKGROUND) / 255
    codes = [background.repeat(CELLS * CELLS)[None]]
    for color in COLORS.values():
        mixed = background + patterns[..., None] * (torch.tensor(color) / 255 - background)
        codes.append(mixed.flatten(1))
    return torch.cat(codes)


def standardised(codebook: Tensor) -> Tensor:
    """The codebook centred and scaled to unit variance, to initialise image-token embeddings."""
    centred = codebook - codebook.mean(0)
    return centred / centred.std()


def _occupancy(features: Tensor) -> Tensor:
    """Share of each cell that is covered by a shape, [M, 16], for the patches that are not background."""
    background = torch.tensor(BACKGROUND) / 255
    offset = features.reshape(-1, CELLS * CELLS, 3) - background
    full = torch.tensor(list(COLORS.values())) / 255 - background
    shares = torch.einsum("mcr,kr->mck", offset, full) / full.square().sum(-1)
    error = (offset[:, :, None] - shares[..., None] * full).square().sum((1, 3))
    best = error.argmin(-1)
    occupancy = shares[torch.arange(len(shares)), :, best].clamp(0, 1)
    return occupancy[occupancy.sum(-1) > 0.5]


def _kmeans(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm with k-means++ initialisation (Arthur and Vassilvitskii, 2007)."""
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    while len(centres) < count:
        distance = torch.cdist(points, centres).amin(1).square()
        chosen = torch.multinomial(distance + 1e-9, 1, generator=generator)
        centres = torch.cat([centres, points[chosen]])
    for _ in range(_KMEANS_STEPS):
        owner = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        counts = torch.bincount(owner, minlength=count)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


IMAGE_START = CODEBOOK_SIZE
IMAGE_END = CODEBOOK_SIZE + 1
VISION_VOCABULARY = CODEBOOK_SIZE + 2
PAD = VISION_VOCABULARY
_SPECIAL = ("<|endoftext|>", "<|image|>", "<sop>", "<eop>")
_TEXT_VOCABULARY = 400
VISION_PATCH = 16
"""Patch side of the vision tower; the image processor first halves images, so a patch covers 32 x 32 pixels."""

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}START<|image|>END"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def image_token(index: int) -> str:
    return f"<|dit_token_{index}|>"


def build_tokenizer(task: Task = "t2i") -> PreTrainedTokenizerFast:
    """Deterministic: every call for a task gives the same vocabulary. The text part is trained on the task's texts."""
    text_vocabulary, merges = _train_text_part(texts(task))
    vocabulary = {image_token(i): i for i in range(VISION_VOCABULARY)}
    for token in (*_SPECIAL, *text_vocabulary):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=image_token(IMAGE_START),
        eos_token=image_token(IMAGE_END),
        pad_token="<|endoftext|>",  # noqa: S106  # a text token, not a secret
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_processor(task: Task = "t2i") -> GlmImageProcessor:
    image_processor = GlmImageImageProcessorPil(
        patch_size=VISION_PATCH,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
    )
    template = _CHAT_TEMPLATE.replace("START", image_token(IMAGE_START)).replace("END", image_token(IMAGE_END))
    return GlmImageProcessor(image_processor=image_processor, tokenizer=build_tokenizer(task), chat_template=template)


def _train_text_part(texts: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*texts, "0 1 2 3 4 5 6 7 8 9"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].get)
    return by_id, [tuple(pair) for pair in model["merges"]]
