"""FLUX.1 Kontext: FLUX.1 that edits one image; a test checks that its ODE matches the pipeline's.

Shapes: C x h x w latents of one image.
"""

from __future__ import annotations

from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL.Image import Image
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from visual_grpo.models.families.flux import MODULES, Flux, FluxOptions
from visual_grpo.models.family import Family
from visual_grpo.models.flow.references import encoded
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model


class FluxKontextOptions(FluxOptions):
    auto_resize: bool = Field(
        True,
        description="bring every source to about a million pixels, as the pipeline does; false = leave it as prepared,"
        " for fewer tokens (the pipeline's _auto_resize)",
    )


class FluxKontext(Flux):
    options: FluxKontextOptions
    sources = range(1, 2)

    def _source(self, image: Image) -> Tensor:
        """[1, 4 C, rows, columns]."""
        processor, vae, cell = self.pipeline.image_processor, self.pipeline.vae, 2 * self.pipeline.vae_scale_factor
        height, width = processor.get_default_height_width(image)  # Rounded down, as the pipeline does.
        if self.options.auto_resize:
            sizes = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
            _, width, height = min((abs(width / height - w / h), w, h) for w, h in sizes)
        width, height = width // cell * cell, height // cell * cell
        pixels = processor.preprocess(processor.resize(image, height, width), height, width)
        latents = (encoded(vae, pixels) - vae.config.shift_factor) * vae.config.scaling_factor
        return pixel_unshuffle(latents, 2)


FAMILY = Family(
    name="flux_kontext",
    modules=MODULES,
    tasks=("i2i",),
    sources=FluxKontext.sources,
    saved_as=("FluxKontextPipeline",),
    load=lambda path, config: load_pipeline("FluxKontextPipeline", path, config),
    build=Model.builder(FluxKontext, MODULES),
    options=FluxKontextOptions,
)
