"""SAM 2 (arXiv 2408.00714), and SAM 3 (arXiv 2511.16719) by its points, as segmenters of transformers' classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from visual_grpo.common.geometry import Point
from visual_grpo.common.images import require_image
from visual_grpo.rewards.learned.pretrained import CONFIG, IMAGE_PROCESSOR, WEIGHTS, Encoder, Origin
from visual_grpo.rewards.segmentation import PointPrompt

_BATCH = 64
"""Prompts that are decoded at once."""
NEGATIVE, POSITIVE, TOP_LEFT, BOTTOM_RIGHT = range(4)
"""SAM's point labels; the corners of a box are encoded as points."""


@dataclass(frozen=True, kw_only=True)
class Sam2Embedding:
    """Image features, on the model's device."""

    features: list[Tensor]
    """[1, C, h, w] each, from fine to coarse."""
    size: tuple[int, int]
    """(height, width) of the image."""


class Sam2Segmenter(Encoder):
    """Predicts masks with SAM 2 from points and optional boxes. The weights are loaded at first use.

    Args:
        path: folder or hub id that `Sam2Model` and `Sam2Processor` load, for example facebook/sam2.1-hiera-large.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the weights; with less precision than float32, points are located less precisely.
    """

    model_class, processor_class = "Sam2Model", "Sam2Processor"

    def __init__(self, path: str, *, device: str = "auto", dtype: str = "float32") -> None:
        needed = (CONFIG, WEIGHTS, IMAGE_PROCESSOR)
        origin = Origin(reward="negative_points", option="segmenter.path", path=path, needed=needed)
        super().__init__(origin, device, dtype)

    def check_machine(self) -> None:
        _ = self.device
        self.origin.check()

    @torch.inference_mode()
    def embed(self, image: Tensor) -> Sam2Embedding:
        """``image``: uint8 [3, H, W], RGB; it is stretched to the model's square input."""
        require_image(image)
        inputs = self.processor(images=image.cpu(), input_data_format="channels_first", return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.device, self.model.dtype)
        features = self.model.get_image_embeddings(pixels)
        return Sam2Embedding(features=features, size=(image.shape[1], image.shape[2]))

    @torch.inference_mode()
    def masks(self, embedding: Sam2Embedding, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W] on the CPU: SAM 2's single-mask output, logits above 0."""
        masks = torch.zeros(len(prompts), *embedding.size, dtype=torch.bool)
        for rows in self._batches(prompts):
            logits, _ = self._decode(embedding, [prompts[row] for row in rows], multimask=False)
            masks[rows] = (logits[:, 0] > 0).cpu()
        return masks

    @torch.inference_mode()
    def multimasks(self, embedding: Sam2Embedding, prompt: PointPrompt) -> tuple[Tensor, Tensor]:
        """Three alternative masks of an ambiguous prompt, bool [3, H, W], and their predicted IoUs [3]."""
        logits, scores = self._decode(embedding, [prompt], multimask=True)
        return (logits[0] > 0).cpu(), scores[0].float().cpu()

    def _batches(self, prompts: Sequence[PointPrompt]) -> Iterator[list[int]]:
        """Groups the indices of prompts with the same number of points into batches.

        Padding points (label -10) are not masked in the decoder's attention: a mask would depend on its batch.
        """
        rows_of: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(len(_points(prompt)), []).append(row)
        for rows in rows_of.values():
            yield from (rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH))

    def _decode(
        self, embedding: Sam2Embedding, prompts: Sequence[PointPrompt], *, multimask: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits, float32 [k, 1 or 3, H, W], and scores, [k, 1 or 3], of prompts with the same number of points."""
        height, width = embedding.size
        labelled = [_points(prompt) for prompt in prompts]
        points = torch.tensor([[point for point, _ in row] for row in labelled], dtype=torch.float32)
        labels = torch.tensor([[label for _, label in row] for row in labelled])
        # Scaled as in Sam2Processor; the model itself adds half a pixel at its input resolution.
        scale = self.processor.target_size / torch.tensor([width, height])
        output = self.model(
            image_embeddings=list(embedding.features),
            input_points=(points * scale)[None].to(self.device),
            input_labels=labels[None].to(self.device),
            multimask_output=multimask,
        )
        # Logits are interpolated rather than masks, so that edges are not confined to the coarse output grid.
        logits = F.interpolate(output.pred_masks[0].float(), embedding.size, mode="bilinear", align_corners=False)
        return logits, output.iou_scores[0]


def _points(prompt: PointPrompt) -> list[tuple[Point, int]]:
    corners = [] if prompt.box is None else [(prompt.box[:2], TOP_LEFT), (prompt.box[2:], BOTTOM_RIGHT)]
    labelled = ((prompt.positives, POSITIVE), (prompt.negatives, NEGATIVE))
    return [*corners, *((point, label) for points, label in labelled for point in points)]


class Sam3Segmenter(Sam2Segmenter):
    """SAM 3's tracker, which takes points and boxes as SAM 2 does, for example facebook/sam3."""

    model_class, processor_class = "Sam3TrackerModel", "Sam3TrackerProcessor"
