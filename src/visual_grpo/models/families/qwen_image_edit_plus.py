"""Qwen-Image-Edit-Plus (2509, 2511): up to three images, to edit or to refer to; a test compares it with its pipeline.

The text encoder reads smaller copies of them. The pipeline takes one prompt at a time, this family any number.
"""

from __future__ import annotations

from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL.Image import Image

from visual_grpo.models.families.qwen_image import MODULES, QwenImageEditOptions, plain_guidance
from visual_grpo.models.families.qwen_image_edit import QwenImageEdit
from visual_grpo.models.family import Family
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model


class QwenImageEditPlus(QwenImageEdit):
    sources = range(1, 4)
    """One to three source images, according to the model card."""

    def _read(self, image: Image) -> Image:
        return self._resized(image, pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE)


FAMILY = Family(
    name="qwen_image_edit_plus",
    modules=MODULES,
    tasks=("i2i",),
    sources=QwenImageEditPlus.sources,
    saved_as=("QwenImageEditPlusPipeline",),
    load=lambda path, config: load_pipeline("QwenImageEditPlusPipeline", path, config),
    build=Model.builder(QwenImageEditPlus, MODULES),
    options=QwenImageEditOptions,
    plain_guidance=plain_guidance,
)
