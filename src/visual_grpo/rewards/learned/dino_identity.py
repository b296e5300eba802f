"""Is the subject of the image that is edited still the same? By DINOv2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.dino import Dino
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.rewards.learned.references import Against, needs_of, to_references
from visual_grpo.types import PromptRecord


class DinoIdentity:
    """Cosine of the DINOv2 class tokens of the sample and the image that is edited, in [-1, 1], as the identity metric
    DINO of DreamBooth (Ruiz et al. 2023, arXiv 2208.12242). Of several sources the nearest counts.

    As a reward alone it is raised by copying the source: add one for what is to change.

    Args:
        model: a folder or hub id of a transformers ``Dinov2Model`` with its image processor.
        revision: branch, tag or commit of a hub id.
        against: ``source`` or ``target``: the image to compare with.
        device: ``auto`` is the accelerator if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator.
    """

    def __init__(
        self,
        model: str = "facebook/dinov2-base",
        revision: str | None = None,
        against: Against = "source",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.needs = needs_of("dino_identity", against)
        self.dino = Dino(Compute("dino_identity", device, dtype, batch_size), model, revision)

    def check_machine(self) -> None:
        self.dino.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.dino.origins

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return to_references(prompts, samples, self.needs, self.dino.images, _cosine)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Scalar, of two vectors of unit length."""
    return (one * other).sum()
