"""Rewards over DINOv2 (Oquab et al. 2023, arXiv 2304.07193)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.rewards.learned.pretrained import CONFIG, IMAGE_PROCESSOR, WEIGHTS, Encoder, EncoderReward, Origin
from visual_grpo.rewards.target import mean_squared_error

BASE = "facebook/dinov2-base"


class Dino(Encoder):
    """A ``Dinov2Model``."""

    model_class, processor_class = "Dinov2Model", "AutoImageProcessor"

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length: the class token of uint8 images [3, height, width] of any sizes."""
        pixels = self.pixels(self.processor, samples)
        return F.normalize(self.rows(lambda rows: self.model(pixel_values=rows).pooler_output, pixels), dim=-1)

    def self_similarity(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, n, n] float32 in [-1, 1]: cosines between the keys of an image's n patches in the last layer."""
        return self.rows(self._key_cosines, self.pixels(self.processor, samples))

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


@dataclass(kw_only=True, eq=False)
class DinoReward(EncoderReward):
    """Similarity to the image that is edited, of several the nearest; unscored without one.

    Args:
        model: a folder or hub id of a transformers ``Dinov2Model`` with its image processor.
        against: ``source`` or ``target``: the image to compare with.
    """

    model: str = BASE
    against: Literal["source", "target"] = "source"
    encoder: Dino = field(init=False)

    def __post_init__(self) -> None:
        if self.against not in ("source", "target"):
            raise UserError(f"{self.name}: against must be source or target, got {self.against!r}")
        self.needs = Needs(source=self.against == "source", target=self.against == "target")
        origin = Origin(
            reward=self.name,
            option="model",
            path=self.model,
            revision=self.revision,
            model_type="dinov2",
            needed=(CONFIG, WEIGHTS, IMAGE_PROCESSOR),
        )
        self.encoder = Dino(origin, self.device, self.dtype, self.batch_size)

    def features(self, images: Sequence[Tensor]) -> Tensor:
        """[B, ...], row by row."""
        raise NotImplementedError

    def similarity(self, one: Tensor, other: Tensor) -> Tensor:
        """Scalar, of two images' features."""
        raise NotImplementedError

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        targets = [[record.target_image] if record.target_image else [] for record in prompts]
        paths = [record.source_images for record in prompts] if self.needs.source else targets
        unique = list(dict.fromkeys(itertools.chain(*paths)))
        references = dict(zip(unique, self.features([to_tensor(read_image(path)) for path in unique]), strict=True))
        values = torch.full((len(samples),), torch.nan)
        for row, sample in enumerate(self.features(samples)):
            for path in paths[row]:
                values[row] = torch.fmax(values[row], self.similarity(sample, references[path]))
        return values


class DinoIdentity(DinoReward):
    """Cosine of the DINOv2 class tokens of the sample and the image that is edited, in [-1, 1], as the identity metric
    DINO of DreamBooth (Ruiz et al. 2023, arXiv 2208.12242). Of several sources the nearest counts.

    As a reward alone it is raised by copying the source: add one for what is to change.
    """

    name = "dino_identity"

    def features(self, images: Sequence[Tensor]) -> Tensor:
        return self.encoder.images(images)

    def similarity(self, one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum()


class DinoStructure(DinoReward):
    """1 - the mean squared difference between the self-similarities of two images; 1 for the same structure.

    An image's self-similarity is the matrix of cosines between the keys of its patches in the last attention layer
    (Tumanyan et al. 2022, arXiv 2201.00424, who take them from DINO ViT-B/8). Of several sources the nearest counts.
    """

    name = "dino_structure"

    def features(self, images: Sequence[Tensor]) -> Tensor:
        return self.encoder.self_similarity(images)

    def similarity(self, one: Tensor, other: Tensor) -> Tensor:
        return 1 - mean_squared_error(one, other)
