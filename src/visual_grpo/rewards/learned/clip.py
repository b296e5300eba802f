"""Embeddings of images and texts by a CLIP model (Radford et al. 2021, arXiv 2103.00020)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from cachetools import LRUCache
from torch import Tensor

from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.loading import load_model, load_processor
from visual_grpo.rewards.learned.origin import CONFIG, IMAGE_PROCESSOR, TOKENIZER, WEIGHTS, Origin

log = logging.getLogger(__name__)

_KEPT_TEXTS = 4096
"""Embeddings of prompts that are kept."""


class Clip:
    """A transformers ``CLIPModel`` with its processor, loaded at the first use.

    ``processor`` is a folder or hub id where it is not the model's own, of ``processor_revision``.
    """

    def __init__(
        self,
        compute: Compute,
        model: str,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
    ) -> None:
        own = () if processor else (IMAGE_PROCESSOR, TOKENIZER)
        self.compute = compute
        self.origin = Origin(
            reward=compute.reward,
            option="model",
            path=model,
            revision=revision,
            model_type="clip",
            needed=(CONFIG, WEIGHTS, *own),
        )
        self.processing = (
            Origin(
                reward=compute.reward,
                option="processor",
                path=processor,
                revision=processor_revision,
                needed=(IMAGE_PROCESSOR, TOKENIZER),
            )
            if processor
            else self.origin
        )
        self._texts: LRUCache[str, Tensor] = LRUCache(_KEPT_TEXTS)

    def check_machine(self) -> None:
        """Raises UserError if the device or a file is not there."""
        _ = self.compute.device
        for origin in self.origins:
            origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return [self.origin] if self.processing is self.origin else [self.origin, self.processing]

    @cached_property
    def model(self) -> Any:
        return load_model(self.origin, self.compute, "CLIPModel")

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.processing, "CLIPProcessor")

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length, of uint8 images [3, height, width] of any sizes."""
        return F.normalize(
            self.compute.rows(self._image_features, [self._pixels(sample) for sample in samples]), dim=-1
        )

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, d] float32 of unit length. What a text has beyond the model's greatest length is not read."""
        new = [text for text in dict.fromkeys(texts) if text not in self._texts]
        cut = [text for text in new if self._length(text) > self._longest]
        if cut:
            log.warning(
                "%s: the model reads the first %d tokens of a prompt; %d longer, the first of them %r",
                *(self.compute.reward, self._longest, len(cut), cut[0][:80]),
            )
        # Each text alone and without padding: nothing depends on the texts beside it.
        own = {text: self._text_features(text) for text in new} | {
            text: self._texts[text] for text in texts if text in self._texts
        }
        self._texts.update({text: own[text] for text in new})
        return F.normalize(torch.stack([own[text] for text in texts]), dim=-1) if own else torch.zeros(0)

    def cosines(self, texts: Sequence[str], samples: Sequence[Tensor]) -> Tensor:
        """[B] float32 in [-1, 1]: of each image with its text."""
        return (self.images(samples) * self.texts(texts)).sum(-1)

    def _pixels(self, sample: Tensor) -> Tensor:
        """[3, s, s] float32, resized, cropped and normalised as the model's processor has it."""
        found = self._processor.image_processor(sample.cpu(), return_tensors="pt", input_data_format="channels_first")
        pixels: Tensor = found["pixel_values"][0]
        return pixels

    def _image_features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(pixel_values=pixels).pooler_output
        return features

    def _text_features(self, text: str) -> Tensor:
        tokens = self._processor.tokenizer(text, truncation=True, max_length=self._longest, return_tensors="pt")
        with torch.no_grad():
            found = self.model.get_text_features(**tokens.to(self.compute.device))
        features: Tensor = found.pooler_output[0].float().cpu()
        return features

    def _length(self, text: str) -> int:
        return len(self._processor.tokenizer(text, verbose=False).input_ids)

    @property
    def _longest(self) -> int:
        longest: int = self.model.config.text_config.max_position_embeddings
        return longest
