"""SAM 2 (arXiv 2408.00714), and SAM 3 (arXiv 2511.16719) by its points, as segmenters of transformers' classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.geometry import Point
from visual_grpo.common.images import require_image
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import Dtype
from visual_grpo.rewards.segmentation import PointPrompt

if TYPE_CHECKING:
    from transformers import Sam2Model, Sam2Processor

NEGATIVE, POSITIVE, TOP_LEFT, BOTTOM_RIGHT = range(4)
"""SAM's point labels; the corners of a box are encoded as points."""


@dataclass(frozen=True, kw_only=True)
class Sam2Embedding:
    """Image features, on the model's device."""

    features: list[Tensor]
    """[1, C, h, w] each, from fine to coarse."""
    size: tuple[int, int]
    """(height, width) of the image."""


class Sam2Segmenter:
    """Predicts masks with SAM 2 from points and optional boxes. The weights are loaded at first use.

    Args:
        path: folder or hub id that `Sam2Model` and `Sam2Processor` load, for example facebook/sam2.1-hiera-large.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the weights; with less precision than float32, points are located less precisely.
        batch: number of prompts decoded at once.

    Raises:
        UserError: there is no SAM 2 at ``path``, or no such device or dtype.
    """

    kind: ClassVar[str] = "sam2"
    classes: ClassVar[tuple[str, str]] = ("Sam2Model", "Sam2Processor")
    """Model and processor in transformers."""

    def __init__(self, path: str, *, device: str = "auto", dtype: Dtype = "float32", batch: int = 64) -> None:
        if dtype not in get_args(Dtype):
            raise UserError(f"segmenter {self.kind}: dtype must be one of {', '.join(get_args(Dtype))}, got {dtype!r}")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise UserError(
                f"segmenter {self.kind}: batch must be a whole number of prompts, at least 1, got {batch!r}"
            )
        if not isinstance(path, str) or not (may_be_hub_id(path) or Path(path, "config.json").is_file()):
            raise UserError(
                f"segmenter {self.kind}: {path} contains no config.json; expected a folder saved by"
                f" {self.classes[0]}.save_pretrained and {self.classes[1]}.save_pretrained, or a hub id."
            )
        self.path, self.dtype, self.batch = path, dtype, batch
        self.device = resolve_device(device, f"segmenter {self.kind}: device")

    @property
    def model(self) -> Sam2Model:
        return self._loaded[0]

    @property
    def processor(self) -> Sam2Processor:
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[Sam2Model, Sam2Processor]:
        """Loaded lazily, so that validating a configuration does not start a download."""
        model, processor = self._load()
        return model.to(self.device), processor

    def _load(self) -> tuple[Sam2Model, Sam2Processor]:
        """Loads with ``from_pretrained``, frozen and in evaluation mode."""
        import transformers
        from safetensors import SafetensorError

        model_class, processor_class = (getattr(transformers, name) for name in self.classes)
        # A local folder loads quickly; a download shows its progress bars.
        with hidden_progress_bars() if Path(self.path).exists() else nullcontext():
            try:
                model, report = model_class.from_pretrained(
                    self.path, dtype=getattr(torch, self.dtype), use_safetensors=True, output_loading_info=True
                )
                processor = processor_class.from_pretrained(self.path)
            except (OSError, ValueError, SafetensorError) as error:  # Missing or damaged files.
                raise UserError(
                    f"segmenter {self.kind}: {self.path!r} cannot be loaded: {error}\n"
                    "A hub id needs network access or an earlier download; a folder must be complete."
                ) from error
        if missing := report["missing_keys"]:  # They would be random, so that even another model's folder would load.
            raise UserError(
                f"segmenter {self.kind}: {self.path!r} is not a complete {self.classes[0]}: {len(missing)} of its"
                f" weights are missing, for example {min(missing)}."
            )
        return model.eval().requires_grad_(False), processor

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

        Padding points (label -10) would allow one call for all prompts, but the decoder does not mask them in its
        attention: a mask would depend on the other prompts of its batch.
        """
        rows_of: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(len(_points(prompt)), []).append(row)
        for rows in rows_of.values():
            yield from (rows[start : start + self.batch] for start in range(0, len(rows), self.batch))

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
    """A prompt's points with their labels."""
    corners = [] if prompt.box is None else [(prompt.box[:2], TOP_LEFT), (prompt.box[2:], BOTTOM_RIGHT)]
    labelled = ((prompt.positives, POSITIVE), (prompt.negatives, NEGATIVE))
    return [*corners, *((point, label) for points, label in labelled for point in points)]


class Sam3Segmenter(Sam2Segmenter):
    """SAM 3's tracker, which takes points and boxes as SAM 2 does, for example facebook/sam3."""

    kind = "sam3"
    classes = ("Sam3TrackerModel", "Sam3TrackerProcessor")
