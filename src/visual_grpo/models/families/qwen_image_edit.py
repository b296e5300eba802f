"""Qwen-Image-Edit: one image to edit, which the text encoder reads as well; a test compares it with its pipeline."""

from __future__ import annotations

from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from visual_grpo.common.images import read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.families.qwen_image import MODULES, QwenImage, QwenImageEditOptions, plain_guidance
from visual_grpo.models.family import Family
from visual_grpo.models.flow.references import encoded
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model

_SOURCE_AREA = 1024 * 1024
"""Pixels that the pipeline brings every source to, whatever the size of the edited image."""


class QwenImageEdit(QwenImage):
    sources = range(1, 2)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        """Returns a prompt's tokens twice: an edit's text is not cut."""
        return (count := self._token_count(prompt)), count

    def _encode(self, prompt: str, record: PromptRecord) -> Tensor:
        images = [self._read(image) for image in map(read_image, record.source_images)]
        return self.pipeline.encode_prompt(prompt, image=images)[0][0]

    def _read(self, image: Image) -> Image:
        """The image as the text encoder gets it."""
        return self._resized(image, _SOURCE_AREA)

    def _source(self, image: Image) -> Tensor:
        """[1, 4 C, rows, columns]."""
        pixels = self.pipeline.image_processor.preprocess(self._resized(image, _SOURCE_AREA))
        latents = encoded(self.pipeline.vae, pixels.unsqueeze(2))
        mean, std = self.statistics(latents.device)
        return pixel_unshuffle(((latents - mean) / std)[:, :, 0], 2)

    def _resized(self, image: Image, area: int) -> Image:
        width, height, *_ = pipeline_qwenimage_edit.calculate_dimensions(area, image.width / image.height)
        return self.pipeline.image_processor.resize(image, height, width)


FAMILY = Family(
    name="qwen_image_edit",
    modules=MODULES,
    tasks=("i2i",),
    sources=QwenImageEdit.sources,
    saved_as=("QwenImageEditPipeline",),
    load=lambda path, config: load_pipeline("QwenImageEditPipeline", path, config),
    build=Model.builder(QwenImageEdit, MODULES),
    options=QwenImageEditOptions,
    plain_guidance=plain_guidance,
)
