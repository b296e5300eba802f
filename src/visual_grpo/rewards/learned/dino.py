"""Rewards over DINOv2 (Oquab et al. 2023, arXiv 2304.07193), and the diversity of a prompt's samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.rewards.learned.clip import LARGE, Clip
from visual_grpo.rewards.learned.pretrained import (
    CONFIG,
    IMAGE_PROCESSOR,
    WEIGHTS,
    Compute,
    Encoder,
    EncoderReward,
    Origin,
)
from visual_grpo.rewards.target import mean_squared_error

BASE = "facebook/dinov2-base"


class Dino(Encoder):
    """A ``Dinov2Model``."""

    model_class, processor_class = "Dinov2Model", "AutoImageProcessor"

    def __init__(self, compute: Compute, model: str, revision: str | None) -> None:
        needed = (CONFIG, WEIGHTS, IMAGE_PROCESSOR)
        origin = Origin(
            reward=compute.reward, option="model", path=model, revision=revision, model_type="dinov2", needed=needed
        )
        super().__init__(compute, origin)

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length: the class token of uint8 images [3, height, width] of any sizes."""
        return F.normalize(self.compute.rows(self._class_token, self.pixels(self.processor, samples)), dim=-1)

    def self_similarity(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, n, n] float32 in [-1, 1]: cosines between the keys of an image's n patches in the last layer."""
        return self.compute.rows(self._key_cosines, self.pixels(self.processor, samples))

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
        self.encoder = Dino(self.compute, self.model, self.revision)


class DinoIdentity(DinoReward):
    """Cosine of the DINOv2 class tokens of the sample and the image that is edited, in [-1, 1], as the identity metric
    DINO of DreamBooth (Ruiz et al. 2023, arXiv 2208.12242). Of several sources the nearest counts.

    As a reward alone it is raised by copying the source: add one for what is to change.
    """

    name = "dino_identity"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return to_references(prompts, samples, self.needs, self.encoder.images, lambda one, other: (one * other).sum())


class DinoStructure(DinoReward):
    """1 - the mean squared difference between the self-similarities of two images; 1 for the same structure.

    An image's self-similarity is the matrix of cosines between the keys of its patches in the last attention layer
    (Tumanyan et al. 2022, arXiv 2201.00424, who take them from DINO ViT-B/8). Of several sources the nearest counts.
    """

    name = "dino_structure"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return to_references(prompts, samples, self.needs, self.encoder.self_similarity, _similarity)


def _similarity(one: Tensor, other: Tensor) -> Tensor:
    """Scalar, of two images' [n, n]."""
    return 1 - mean_squared_error(one, other)


def to_references(
    prompts: Sequence[PromptRecord],
    samples: Sequence[Tensor],
    needs: Needs,
    features: Callable[[Sequence[Tensor]], Tensor],
    similarity: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[B] float32: ``similarity`` of a sample to its target, or to the nearest of its sources; NaN without one.

    Args:
        features: of images, [N, ...], row by row; of each reference once.
        similarity: scalar, of two images' features.
    """
    paths = [_references(record, needs) for record in prompts]
    unique = list(dict.fromkeys(path for references in paths for path in references))
    reference_features = dict(zip(unique, features([to_tensor(read_image(path)) for path in unique]), strict=True))
    values = torch.full((len(samples),), torch.nan)
    for row, (references, sample) in enumerate(zip(paths, features(samples), strict=True)):
        for path in references:
            values[row] = torch.fmax(values[row], similarity(sample, reference_features[path]))
    return values


def _references(record: PromptRecord, needs: Needs) -> Sequence[Path]:
    if needs.source:
        return record.source_images
    return () if record.target_image is None else (record.target_image,)


_FEATURES = ("pixels", "clip", "dino")
_SIDE = 16
"""Of the scaled images; small, so that noise is not taken for variety."""


@dataclass(kw_only=True, eq=False)
class GroupDiversity(EncoderReward):
    """A sample's mean distance to the other samples of its prompt, in [0, 1] of pixels and [0, 2] of a model's
    features; 0 where all are the same, unscored for a prompt with one sample.

    As a guard it shows a policy that draws the same image again and again; as a reward it works against that.

    Args:
        features: ``pixels``: the root mean square difference of the images scaled to 16 x 16 pixels;
            ``clip`` or ``dino``: 1 - the cosine of their embeddings.
        model: of ``clip`` or ``dino``: a folder or hub id; null is the default of the rewards of that model.
    """

    name = "group_diversity"
    needs = Needs(whole_groups=True)
    features: str = "pixels"
    encoder: Clip | Dino | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.features not in _FEATURES:
            raise UserError(f"group_diversity: features must be one of {', '.join(_FEATURES)}, got {self.features!r}")
        if self.features == "clip":
            self.encoder = Clip(self.compute, self.model or LARGE, self.revision)
        elif self.features == "dino":
            self.encoder = Dino(self.compute, self.model or BASE, self.revision)
        elif self.model is not None:
            raise UserError("group_diversity: a model needs features: clip or dino, got pixels")

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        groups = defaultdict(list)
        for row, record in enumerate(prompts):
            groups[record.id].append(row)
        values = torch.full((len(samples),), torch.nan)
        for rows in groups.values():
            if len(rows) > 1:
                values[rows] = self._distances([samples[row] for row in rows])
        return values

    def _distances(self, samples: Sequence[Tensor]) -> Tensor:
        """[G] float32, of one group."""
        if self.encoder is None:
            small = torch.stack([_small(sample) for sample in samples])
            apart = torch.stack([(small - row).square().mean(1).sqrt() for row in small])
        else:
            embedded = self.encoder.images(samples)
            # Not a matrix product, whose last bits may differ with its size.
            apart = torch.stack([1 - (embedded * row).sum(1) for row in embedded])
            apart.fill_diagonal_(0)
        # Sorted, so that the sum does not depend on the order of the samples.
        return apart.sort(1).values.sum(1) / (len(samples) - 1)


def _small(sample: Tensor) -> Tensor:
    scaled = F.interpolate(sample[None].cpu().float() / 255, (_SIDE, _SIDE), mode="area")
    return scaled.flatten()
