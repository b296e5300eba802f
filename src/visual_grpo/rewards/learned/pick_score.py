"""Which image people would pick for a prompt, by PickScore."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visual_grpo.rewards.learned.clip import Clip
from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.saved_model import may_be_hub_id
from visual_grpo.types import PromptRecord

_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_USUAL = 26.0
"""Flow-GRPO (arXiv 2505.05470) and others divide by it, which brings good images to about 1."""


class PickScore:
    """PickScore divided by 26, about 0.7 to 1 (Kirstain et al. 2023, arXiv 2305.01569).

    The score is exp(logit_scale) times the cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was
    trained on people's choices. The model reads the first 77 tokens of a prompt; a longer one is named in the log.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel``.
        revision: branch, tag or commit of a hub id.
        processor: a folder or hub id with its tokenizer and image processor; null is the model's own where that is a
            folder, else laion/CLIP-ViT-H-14-laion2B-s32B-b79K.
        processor_revision: branch, tag or commit of the processor's hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator.
    """

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        processor = processor or (_PROCESSOR if may_be_hub_id(model) else None)
        compute = Compute("pick_score", device, dtype, batch_size)
        self.clip = Clip(compute, model, revision, processor, processor_revision)

    def check_machine(self) -> None:
        self.clip.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.clip.origins

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        cosines = self.clip.cosines([record.prompt for record in prompts], samples)
        return cosines * self.clip.model.logit_scale.float().exp().cpu() / _USUAL
