"""Features of images by a DINOv2 model (Oquab et al. 2023, arXiv 2304.07193)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.loading import load_model, load_processor
from visual_grpo.rewards.learned.origin import CONFIG, IMAGE_PROCESSOR, WEIGHTS, Origin


class Dino:
    """A transformers ``Dinov2Model`` with its image processor, loaded at the first use."""

    def __init__(self, compute: Compute, model: str, revision: str | None) -> None:
        self.compute = compute
        needed = (CONFIG, WEIGHTS, IMAGE_PROCESSOR)
        self.origin = Origin(
            reward=compute.reward, option="model", path=model, revision=revision, model_type="dinov2", needed=needed
        )

    def check_machine(self) -> None:
        """Raises UserError if the device or a file is not there."""
        _ = self.compute.device
        self.origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return [self.origin]

    @cached_property
    def model(self) -> Any:
        return load_model(self.origin, self.compute, "Dinov2Model")

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.origin, "AutoImageProcessor")

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length: the class token of uint8 images [3, height, width] of any sizes."""
        return F.normalize(self.compute.rows(self._class_token, self._pixels(samples)), dim=-1)

    def self_similarity(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, n, n] float32 in [-1, 1]: cosines between the keys of an image's n patches in the last layer."""
        return self.compute.rows(self._key_cosines, self._pixels(samples))

    def _pixels(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """Each [3, s, s] float32, resized, cropped and normalised as the model's processor has it."""
        processed = [
            self._processor(sample.cpu(), return_tensors="pt", input_data_format="channels_first") for sample in samples
        ]
        return [each["pixel_values"][0] for each in processed]

    def _class_token(self, pixels: Tensor) -> Tensor:
        token: Tensor = self.model(pixel_values=pixels).pooler_output
        return token

    def _key_cosines(self, pixels: Tensor) -> Tensor:
        keys: list[Tensor] = []
        projection = self.model.encoder.layer[-1].attention.k_proj
        hook = projection.register_forward_hook(lambda module, inputs, output: keys.append(output))
        try:
            self.model(pixel_values=pixels)
        finally:
            hook.remove()
        unit = F.normalize(keys[0][:, 1:].float(), dim=-1)  # Without the class token; all heads of a patch as one.
        return torch.matmul(unit, unit.transpose(1, 2))
