"""The colour of an object by CLIP, without training: which of ten sentences fits its pixels best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from geneval_rules import COLOURS, Found
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

SENTENCES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
"""A colour's direction is the mean of its sentences' (GenEval's templates)."""
BACKGROUND = "#999"
"""In place of everything in the box that is not the object."""


def cut_out(image: Image.Image, found: Found) -> Image.Image:
    """The object's box, with `BACKGROUND` around its mask."""
    mask = Image.fromarray(found.mask)
    return Image.composite(image, Image.new("RGB", image.size, BACKGROUND), mask).crop(found.box)


class Colours:
    """Names the colour of objects.

    Raises:
        ValueError: the folder lacks weights.
    """

    def __init__(self, folder: str, device: str) -> None:
        from transformers import CLIPModel, CLIPProcessor

        model, told = CLIPModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if told["missing_keys"]:
            raise ValueError(f"{folder} lacks weights: {', '.join(sorted(told['missing_keys'])[:3])}")
        self.model = model.to(device).eval()
        self.processor = CLIPProcessor.from_pretrained(folder)
        self.directions: dict[str, Tensor] = {}

    @torch.inference_mode()
    def __call__(self, image: Image.Image, name: str, objects: Sequence[Found]) -> list[str]:
        """One of `COLOURS` for each object; each is looked at by itself."""
        if name not in self.directions:
            self.directions[name] = torch.stack([self._direction(colour, name) for colour in COLOURS])
        return [COLOURS[int((self.directions[name] @ self._seen(cut_out(image, one))).argmax())] for one in objects]

    def _direction(self, colour: str, name: str) -> Tensor:
        sentences = [sentence.format(colour=colour, name=name) for sentence in SENTENCES]
        inputs = self.processor(text=sentences, padding=True, return_tensors="pt").to(self.model.device)
        each = normalize(self.model.get_text_features(**inputs).pooler_output, dim=-1)
        return normalize(each.mean(0), dim=-1)

    def _seen(self, image: Image.Image) -> Tensor:
        inputs = self.processor(images=image, return_tensors="pt").to(self.model.device)
        return self.model.get_image_features(**inputs).pooler_output[0]
