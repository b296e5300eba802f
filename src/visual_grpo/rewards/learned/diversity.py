"""Do the samples of a prompt differ from each other?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.rewards.learned.clip import LARGE, Clip
from visual_grpo.rewards.learned.dino import BASE, Dino
from visual_grpo.rewards.learned.pretrained import EncoderReward

_FEATURES = ("pixels", "clip", "dino")


@dataclass(kw_only=True, eq=False)
class GroupDiversity(EncoderReward):
    """A sample's mean distance to the other samples of its prompt, in [0, 1] of pixels and [0, 2] of a model's
    features; 0 where all are the same, unscored for a prompt with one sample.

    As a guard it shows a policy that draws the same image again and again; as a reward it works against that.

    Args:
        features: ``pixels``: the root mean square difference of the images scaled to ``side`` x ``side`` pixels;
            ``clip`` or ``dino``: 1 - the cosine of their embeddings.
        side: of the scaled images; small, so that noise is not taken for variety.
        model: of ``clip`` or ``dino``: a folder or hub id; null is the default of the rewards of that model.
    """

    name = "group_diversity"
    needs = Needs(whole_groups=True)
    features: str = "pixels"
    side: int = 16
    encoder: Clip | Dino | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.features not in _FEATURES:
            raise UserError(f"group_diversity: features must be one of {', '.join(_FEATURES)}, got {self.features!r}")
        if self.side < 1:
            raise UserError(f"group_diversity: side must be at least 1 pixel, got {self.side}")
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
            small = torch.stack([self._small(sample) for sample in samples])
            apart = torch.stack([(small - own).square().mean(1).sqrt() for own in small])
        else:
            embedded = self.encoder.images(samples)
            # Not a matrix product, whose last bits may differ with its size.
            apart = torch.stack([1 - (embedded * own).sum(1) for own in embedded])
            apart.fill_diagonal_(0)
        # Sorted, so that the sum does not depend on the order of the samples.
        return apart.sort(1).values.sum(1) / (len(samples) - 1)

    def _small(self, sample: Tensor) -> Tensor:
        scaled = F.interpolate(sample[None].cpu().float() / 255, (self.side, self.side), mode="area")
        return scaled.flatten()
