"""Is the layout of the image that is edited kept, whatever its colours and textures? By DINOv2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.dino import Dino
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.rewards.learned.references import Against, needs_of, to_references
from visual_grpo.rewards.target import mean_squared_error
from visual_grpo.types import PromptRecord


class DinoStructure:
    """1 - the mean squared difference between the self-similarities of two images; 1 for the same structure.

    An image's self-similarity is the matrix of cosines between the keys of its patches in the last attention layer
    (Tumanyan et al. 2022, arXiv 2201.00424, who take them from DINO ViT-B/8). Of several sources the nearest counts.

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
        self.needs = needs_of("dino_structure", against)
        self.dino = Dino(Compute("dino_structure", device, dtype, batch_size), model, revision)

    def check_machine(self) -> None:
        self.dino.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.dino.origins

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return to_references(prompts, samples, self.needs, self.dino.self_similarity, _similarity)


def _similarity(one: Tensor, other: Tensor) -> Tensor:
    """Scalar, of two images' [n, n]."""
    return 1 - mean_squared_error(one, other)
