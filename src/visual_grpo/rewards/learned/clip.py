"""Rewards over a CLIP model (Radford et al. 2021, arXiv 2103.00020): CLIP score, PickScore, HPS, LAION aesthetics."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

import torch
import torch.nn.functional as F
from cachetools import LRUCache, cachedmethod
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.learned.pretrained import (
    CONFIG,
    IMAGE_PROCESSOR,
    PROCESSING,
    TOKENIZER,
    WEIGHTS,
    Encoder,
    EncoderReward,
    Origin,
    read_weights,
)

log = logging.getLogger(__name__)

LARGE = "openai/clip-vit-large-patch14"
_HUGE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_CACHED_TEXTS = 4096
_PICK_SCALE = 26.0
"""Flow-GRPO (arXiv 2505.05470) and others divide by it, which brings good images to about 1."""
_HEAD_REPOSITORY, _HEAD_FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
_HIDDEN = (1024, 128, 64, 16)
"""Widths of the head between the embedding and the mark."""


class ClipEncoder(Encoder):
    """A ``CLIPModel``."""

    model_class, processor_class = "CLIPModel", "CLIPProcessor"

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length, from uint8 images [3, height, width] of any sizes."""
        pixels = self.pixels(self.processor.image_processor, samples)
        features = self.rows(lambda rows: self.model.get_image_features(pixel_values=rows).pooler_output, pixels)
        return F.normalize(features, dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, d] float32 of unit length; a text is cut at the model's maximum length."""
        tokenizer, longest = self.processor.tokenizer, self._longest
        new = [text for text in dict.fromkeys(texts) if text not in self._texts]
        if cut := [text for text in new if len(tokenizer(text, verbose=False).input_ids) > longest]:
            log.warning(
                "%s: the model reads the first %d tokens of a prompt; %d longer, the first of them %r",
                *(self.origin.reward, longest, len(cut), cut[0][:80]),
            )
        features = [self._text_features(text) for text in texts]
        return F.normalize(torch.stack(features), dim=-1) if texts else torch.zeros(0)

    def cosines(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        """[B] float32 in [-1, 1]: cosine of each image with its prompt."""
        return (self.images(samples) * self.texts([record.prompt for record in prompts])).sum(-1)

    @cached_property
    def _texts(self) -> LRUCache[str, Tensor]:
        return LRUCache(_CACHED_TEXTS)

    @cachedmethod(attrgetter("_texts"), key=lambda _, text: text)
    def _text_features(self, text: str) -> Tensor:
        """[d] float32. Each text alone and without padding: nothing depends on the neighbouring texts."""
        tokens = self.processor.tokenizer(text, truncation=True, max_length=self._longest, return_tensors="pt")
        with torch.no_grad():
            output = self.model.get_text_features(**tokens.to(self.device))
        features: Tensor = output.pooler_output[0].float().cpu()
        return features

    @property
    def _longest(self) -> int:
        longest: int = self.model.config.text_config.max_position_embeddings
        return longest


@dataclass(kw_only=True, eq=False)
class ClipReward(EncoderReward):
    """The cosine of the CLIP embeddings of image and prompt.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel``; null is the released one. It reads the first tokens
            of a prompt, 77 in those that are released; a longer prompt is named in the log.
        processor: a folder or hub id with the tokenizer and image processor; null is the model's own, or the one of the
            released model.
    """

    released: ClassVar[str] = LARGE
    """Hub id of the model where the option ``model`` names none."""
    released_processor: ClassVar[str | None] = None
    processor: str | None = None
    encoder: ClipEncoder = field(init=False)

    def __post_init__(self) -> None:
        model = self.model or self.released
        processor = self.processor or (self.released_processor if may_be_hub_id(model) else None)
        files = (IMAGE_PROCESSOR, TOKENIZER)
        needed = (CONFIG, WEIGHTS, *(() if processor else files))
        origin = Origin(
            reward=self.name, option="model", path=model, revision=self.revision, model_type="clip", needed=needed
        )
        apart = None
        if processor:  # Its repository may hold gigabytes of weights too.
            apart = Origin(reward=self.name, option="processor", path=processor, needed=files, patterns=PROCESSING)
        self.encoder = ClipEncoder(origin, self.device, self.dtype, self.batch_size, apart)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return self.encoder.cosines(prompts, samples)


class ClipScore(ClipReward):
    """Cosine of the CLIP embeddings of image and prompt, in [-1, 1] (Hessel et al. 2021, arXiv 2104.08718).

    The published CLIPScore is 2.5 * max(cosine, 0).
    """

    name = "clip_score"


class PickScore(ClipReward):
    """PickScore divided by 26, about 0.7 to 1 (Kirstain et al. 2023, arXiv 2305.01569).

    The score is exp(logit_scale) times the cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was
    trained on people's choices.
    """

    name, released, released_processor = "pick_score", "yuvalkirstain/PickScore_v1", _HUGE_PROCESSOR

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        cosines = self.encoder.cosines(prompts, samples)
        return cosines * self.encoder.model.logit_scale.float().exp().cpu() / _PICK_SCALE


class Hps(ClipReward):
    """Human Preference Score v2, about 0.2 to 0.35 (Wu et al. 2023, arXiv 2306.09341).

    The cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was trained on people's choices; its
    weights in the format of transformers are needed, so that nothing of ``hpsv2`` is. As there, images that are not
    square are not cropped: the longer side is scaled to the model's, and the rest is black.
    """

    name, released, released_processor = "hps", "adams-story/HPSv2-hf", _HUGE_PROCESSOR

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        side = self.encoder.model.config.vision_config.image_size
        return super().__call__(prompts, [_padded(sample, side) for sample in samples])


def _padded(image: Tensor, side: int) -> Tensor:
    """Scales uint8 [3, height, width] to ``side`` pixels and pads it to a square, if it is none."""
    longer = max(image.shape[1:])
    height, width = (max(1, round(pixels * side / longer)) for pixels in image.shape[1:])
    if height == width:
        return image
    above, left = (side - height) // 2, (side - width) // 2
    scaled = resize(image, [height, width], InterpolationMode.BICUBIC)
    return F.pad(scaled, (left, side - width - left, above, side - height - above))


@dataclass(kw_only=True, eq=False)
class Aesthetic(ClipReward):
    """LAION aesthetic score, about 1 to 10 as people gave marks, mostly 4 to 7.

    The improved aesthetic predictor (Schuhmann et al. 2022, arXiv 2210.08402; sac+logos+ava1-l14-linearMSE): five
    linear layers 768-1024-128-64-16-1 without activations on the CLIP ViT-L/14 embedding of unit length. It does not
    see the prompt: with it alone every prompt gets the same pretty picture.

    Args:
        head: a folder or hub id with aesthetic-model.pth; null is trl-lib/ddpo-aesthetic-predictor.
    """

    name = "aesthetic"
    head: str | None = None

    @property
    def origins(self) -> Sequence[Origin]:
        return [*super().origins, self._origin]

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        # One by one: a product may round differently with more rows.
        return torch.tensor([float(self._layers(embedding)) for embedding in self.encoder.images(samples)])

    @property
    def _origin(self) -> Origin:
        path, needed = self.head or _HEAD_REPOSITORY, ((_HEAD_FILE,),)
        return Origin(reward="aesthetic", option="head", path=path, needed=needed, patterns=(_HEAD_FILE,))

    @cached_property
    def _layers(self) -> nn.Module:
        file = self._origin.folder() / _HEAD_FILE
        widths = (self.encoder.model.config.projection_dim, *_HIDDEN, 1)
        with torch.device("meta"):
            linear = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        # Numbered as in training, where dropout stood between the first ones.
        layers = nn.ModuleDict(dict(zip("02467", linear, strict=True)))
        try:
            nn.ModuleDict({"layers": layers}).load_state_dict(read_weights("aesthetic", file), assign=True)
        except RuntimeError as error:
            raise UserError(f"aesthetic: {file} is not a head for embeddings of width {widths[0]}: {error}") from error
        return nn.Sequential(*linear).float().requires_grad_(False)
