"""Pretrains the small Qwen2.5-VL on rendered scenes.

By next-token prediction it learns to find the queried part, and to place a negative point anywhere around it: where one
helps is left to GRPO. Two auxiliary heads, discarded afterwards, speed this up: one predicts the parts from the vision
tower's output, one the row and column of each image token from the output of the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from examples.scenes.scenes import (
    ANSWER_LENGTH,
    COLORS,
    NUMBER_PLACES,
    PARTS,
    Scenes,
    answer_tokens,
    boxes,
    centers,
    draw_scenes,
    number_ids,
    query_of,
)
from examples.scenes.small_qwen2_5_vl import MERGE, PATCH, build_model, build_processor
from visual_grpo.common.geometry import ring
from visual_grpo.starter.pretraining import Advance, Job, minimise

POOL = 6000
"""Number of training scenes, each used in four mirrored forms."""
_BATCH = 64
_VISION_SHARE = 0.12
"""Share of the steps, at the start, that train only the vision tower."""
_HEADS_WEIGHT = 0.5
_SOFTNESS = 2.0
"""Standard deviation in pixels of the soft target of a coordinate, so that near misses cost little."""
_NEGATIVES = 4
_MARGIN = 0.5
"""Margin around the box for negative points, as a share of the image's shorter side."""
_FINE = 4
"""Pixels per side of the cells that the vision tower's head classifies."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    images: Tensor
    """[n, 3, H, W] uint8."""
    labels: Tensor
    """[n, H, W] int64: 0 for the ground, else 1 + 2 * colour + part."""
    queries: Tensor
    """[n, P] int64: prompt tokens."""
    numbers: Tensor
    """[n, 6] int64: box and positive point."""
    negatives: Tensor
    """[n, k, 2] int64: points around the queried part; one of them is sampled for each batch."""
    types: Tensor
    """[P] int64: 1 for image tokens of the prompt."""
    grid: Tensor
    """[1, 3] int64: the processor's image_grid_thw."""


def build_pool(processor: Qwen2_5_VLProcessor, height: int, width: int, seed: int, count: int) -> Pool:
    """``count`` scenes from a random stream other than the dataset's, so that pretraining sees none of its scenes."""
    scenes = draw_scenes(count, height, width, np.random.default_rng([seed, 1]))
    label = np.where(scenes.parts < 0, 0, 1 + len(PARTS) * scenes.colors[:, None, None] + scenes.parts)
    one = processor(
        text=[prompt_of(processor, query_of(*query)) for query in dict.fromkeys(scenes.queries)],
        images=list(torch.from_numpy(scenes.images[: len(set(scenes.queries))]).permute(0, 3, 1, 2)),
        return_tensors="pt",
    )
    row = {query: i for i, query in enumerate(dict.fromkeys(scenes.queries))}
    return Pool(
        images=torch.from_numpy(scenes.images).permute(0, 3, 1, 2).contiguous(),
        labels=torch.from_numpy(label.astype(np.int64)),
        queries=one["input_ids"][[row[query] for query in scenes.queries]],
        numbers=torch.from_numpy(np.concatenate([boxes(scenes.truths), centers(scenes.truths)], 1)),
        negatives=_negatives(scenes, torch.Generator().manual_seed(seed)),
        types=one["mm_token_type_ids"][0],
        grid=one["image_grid_thw"][:1],
    )


def _negatives(scenes: Scenes, generator: torch.Generator) -> Tensor:
    truths = scenes.truths
    margin = _MARGIN * min(truths.shape[1:])
    points = [
        ring(torch.from_numpy(truth), tuple(box), _NEGATIVES, generator, margin=margin, spacing=0)
        for truth, box in zip(truths, boxes(truths).tolist(), strict=True)
    ]
    return torch.tensor(points)


def prompt_of(processor: Qwen2_5_VLProcessor, text: str) -> str:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    prompt: str = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt


def pretrain_vl(job: Job, advance: Advance) -> None:
    size, steps = (job.height, job.width), job.steps["vl"]
    processor = build_processor(*size)
    model = build_model(processor, job.seed)
    torch.manual_seed(job.seed)
    pool = build_pool(processor, *size, job.seed, min(POOL, steps * _BATCH))  # not more than the steps can use
    lesson = _Lesson(model, processor, pool, size, torch.Generator().manual_seed(job.seed))
    is_answered = iter([False] * round(steps * _VISION_SHARE) + [True] * steps)
    weights = [*model.parameters(), *lesson.heads.parameters()]

    def backward() -> None:
        lesson.loss(with_answers=next(is_answered)).backward()

    minimise(backward, weights, job, "vl", advance, peak_learning_rate=2e-3, warmup=100)
    lesson.hook.remove()
    model.eval().save_pretrained(job.folder)
    processor.save_pretrained(job.folder)


class _Lesson:
    """Computes the loss of a batch; owns the auxiliary heads."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        processor: Qwen2_5_VLProcessor,
        pool: Pool,
        size: tuple[int, int],
        generator: torch.Generator,
    ) -> None:
        self.model, self.processor, self.pool, self.size, self.generator = model, processor, pool, size, generator
        side, width = PATCH * MERGE, model.config.text_config.hidden_size
        self.cells = (size[0] // side, size[1] // side)
        classes = 1 + len(COLORS) * len(PARTS)
        self.heads = nn.ModuleDict(
            {"parts": nn.Linear(width, (side // _FINE) ** 2 * classes), "place": nn.Linear(width, sum(self.cells))}
        )
        self.number_ids = number_ids(processor.tokenizer, max(size))
        values = torch.arange(len(self.number_ids)).float()
        self.soft = torch.softmax(-((values[:, None] - values) ** 2) / (2 * _SOFTNESS**2), 1)
        self.positions = self._positions()
        self._first_layer: list[Tensor] = []
        self.hook = model.model.language_model.layers[0].register_forward_hook(
            lambda module, args, output: self._first_layer.append(output[0] if isinstance(output, tuple) else output)
        )

    def loss(self, *, with_answers: bool) -> Tensor:
        images, labels, numbers, queries = self._batch()
        features = self._encode_images(images)
        heads = self._parts_loss(features, labels)
        if not with_answers:
            return heads
        log_probs, targets = self._answer_log_probs(queries, features, numbers)
        return self._answer_loss(log_probs, targets, numbers) + _HEADS_WEIGHT * (heads + self._place_loss())

    def _batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Images, labels [b, H, W], all eight numbers [b, 8] and queries; mirrored at random in x and in y."""
        pool, draw = self.pool, self.generator
        rows = torch.randint(len(pool.images), (_BATCH,), generator=draw)
        images, labels = pool.images[rows], pool.labels[rows]
        chosen = torch.randint(pool.negatives.shape[1], (_BATCH,), generator=draw)
        numbers = torch.cat([pool.numbers[rows], pool.negatives[rows, chosen]], 1)
        for axis in (0, 1):  # x, y
            turned = torch.rand(_BATCH, generator=draw) < 0.5
            images = torch.where(turned[:, None, None, None], images.flip(3 - axis), images)
            labels = torch.where(turned[:, None, None], labels.flip(2 - axis), labels)
            numbers = torch.where(turned[:, None], _mirrored(numbers, axis, self.size[1 - axis]), numbers)
        return images, labels, numbers, pool.queries[rows]

    def _encode_images(self, images: Tensor) -> Tensor:
        """Output of the vision tower, [b, tokens, width]."""
        patches = self.processor.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        grid = self.pool.grid.repeat(len(images), 1)
        features: Tensor = self.model.model.visual(patches, grid_thw=grid).pooler_output
        return features.view(len(images), -1, features.shape[-1])

    def _answer_log_probs(self, queries: Tensor, features: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [b, LENGTH, V] of the answers and their tokens [b, LENGTH]."""
        targets = answer_tokens(self.processor.tokenizer, numbers)
        embed = self.model.model.get_input_embeddings()
        prompt = embed(queries)
        prompt = prompt.masked_scatter((self.pool.types == 1)[None, :, None].expand_as(prompt), features)
        self._first_layer.clear()
        hidden = self.model.model.language_model(
            inputs_embeds=torch.cat([prompt, embed(targets[:, :-1])], 1),
            position_ids=self.positions.expand(3, len(queries), -1),
            use_cache=False,
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, queries.shape[1] - 1 :])
        return logits.log_softmax(-1), targets

    def _answer_loss(self, log_probs: Tensor, targets: Tensor, numbers: Tensor) -> Tensor:
        losses = -log_probs.gather(2, targets[..., None])[..., 0]
        places = NUMBER_PLACES[:6]
        soft = self.soft[numbers[:, :6]]
        losses[:, places] = -(soft * log_probs[:, places][..., self.number_ids]).sum(-1)
        return losses.mean()

    def _parts_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        (rows, columns), fine = self.cells, PATCH * MERGE // _FINE
        middle = labels[:, _FINE // 2 :: _FINE, _FINE // 2 :: _FINE]
        cells = middle.unflatten(1, (rows, fine)).unflatten(3, (columns, fine)).transpose(2, 3).reshape(-1)
        return F.cross_entropy(self.heads["parts"](features).view(len(cells), -1), cells)

    def _place_loss(self) -> Tensor:
        hidden = self._first_layer[0][:, : len(self.pool.types)][:, self.pool.types == 1]
        rows, columns = self.heads["place"](hidden).split(self.cells, -1)
        places = torch.cartesian_prod(*map(torch.arange, self.cells)).expand(len(hidden), -1, -1)
        loss = F.cross_entropy(rows.flatten(0, 1), places[..., 0].flatten())
        return (loss + F.cross_entropy(columns.flatten(0, 1), places[..., 1].flatten())) / 2

    def _positions(self) -> Tensor:
        """[3, 1, P + LENGTH - 1] for all prompts, which have the same length."""
        pool = self.pool
        prompt, _ = self.model.model.get_rope_index(
            pool.queries[:1], mm_token_type_ids=pool.types[None], image_grid_thw=pool.grid
        )
        after = prompt.max() + 1 + torch.arange(ANSWER_LENGTH - 1)
        return torch.cat([prompt, after.expand(3, 1, -1)], 2)


def _mirrored(numbers: Tensor, axis: int, side: int) -> Tensor:
    """Mirrors boxes and two points [b, 8] along ``axis`` (0 = x) of an image with ``side`` pixels along it."""
    low, high, points = axis, axis + 2, [axis + 4, axis + 6]
    mirrored = numbers.clone()
    mirrored[:, [low, high, *points]] = side - 1 - numbers[:, [high, low, *points]]
    return mirrored
