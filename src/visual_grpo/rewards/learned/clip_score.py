"""How well an image fits its prompt, by CLIP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visual_grpo.rewards.learned.clip import Clip
from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.types import PromptRecord


class ClipScore:
    """Cosine of the CLIP embeddings of image and prompt, in [-1, 1] (Hessel et al. 2021, arXiv 2104.08718).

    The published CLIPScore is 2.5 * max(cosine, 0). The model reads the first 77 tokens of a prompt; a longer one is
    named in the log.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel`` with its processor.
        revision: branch, tag or commit of a hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator. Scores do not depend on which
            images are in a batch.
    """

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.clip = Clip(Compute("clip_score", device, dtype, batch_size), model, revision)

    def check_machine(self) -> None:
        self.clip.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.clip.origins

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return self.clip.cosines([record.prompt for record in prompts], samples)
