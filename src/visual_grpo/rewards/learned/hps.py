"""Which image people prefer for a prompt, by the Human Preference Score v2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visual_grpo.rewards.learned.clip import Clip
from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.saved_model import may_be_hub_id
from visual_grpo.types import PromptRecord

_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class Hps:
    """Human Preference Score v2, about 0.2 to 0.35 (Wu et al. 2023, arXiv 2306.09341).

    The cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was trained on people's choices; its
    weights in the format of transformers are needed, so that nothing of ``hpsv2`` is. Images are resized and cropped
    as the processor has it. The model reads the first 77 tokens of a prompt; a longer one is named in the log.

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
        model: str = "adams-story/HPSv2-hf",
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        processor = processor or (_PROCESSOR if may_be_hub_id(model) else None)
        compute = Compute("hps", device, dtype, batch_size)
        self.clip = Clip(compute, model, revision, processor, processor_revision)

    def check_machine(self) -> None:
        self.clip.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.clip.origins

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return self.clip.cosines([record.prompt for record in prompts], samples)
