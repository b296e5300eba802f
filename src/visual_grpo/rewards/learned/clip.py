"""Rewards over a CLIP model (Radford et al. 2021, arXiv 2103.00020): CLIP score, PickScore, HPS, LAION aesthetics."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from cachetools import LRUCache
from torch import Tensor

from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.learned.pretrained import (
    CONFIG,
    IMAGE_PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    Compute,
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
_HEAD_SUFFIXES = (".pth", ".pt", ".safetensors")


class Clip(Encoder):
    """A ``CLIPModel``. ``processor`` is a folder or hub id where it is not the model's own."""

    model_class, processor_class = "CLIPModel", "CLIPProcessor"

    def __init__(
        self,
        compute: Compute,
        model: str,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
    ) -> None:
        files = (IMAGE_PROCESSOR, TOKENIZER)
        needed = (CONFIG, WEIGHTS, *(() if processor else files))
        origin = Origin(
            reward=compute.reward, option="model", path=model, revision=revision, model_type="clip", needed=needed
        )
        processor_origin = processor and Origin(
            reward=compute.reward, option="processor", path=processor, revision=processor_revision, needed=files
        )
        super().__init__(compute, origin, processor_origin or None)
        self._texts: LRUCache[str, Tensor] = LRUCache(_CACHED_TEXTS)

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length, from uint8 images [3, height, width] of any sizes."""
        pixels = self.pixels(self.processor.image_processor, samples)
        return F.normalize(self.compute.rows(self._image_features, pixels), dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, d] float32 of unit length; a text is cut at the model's maximum length."""
        new = [text for text in dict.fromkeys(texts) if text not in self._texts]
        cut = [text for text in new if self._length(text) > self._longest]
        if cut:
            log.warning(
                "%s: the model reads the first %d tokens of a prompt; %d longer, the first of them %r",
                *(self.compute.reward, self._longest, len(cut), cut[0][:80]),
            )
        # Each text alone and without padding: nothing depends on the texts beside it.
        features = {text: self._texts[text] for text in texts if text in self._texts}
        features |= {text: self._text_features(text) for text in new}
        self._texts.update({text: features[text] for text in new})
        return F.normalize(torch.stack([features[text] for text in texts]), dim=-1) if texts else torch.zeros(0)

    def cosines(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        """[B] float32 in [-1, 1]: cosine of each image with its prompt."""
        return (self.images(samples) * self.texts([record.prompt for record in prompts])).sum(-1)

    def _image_features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(pixel_values=pixels).pooler_output
        return features

    def _text_features(self, text: str) -> Tensor:
        tokens = self.processor.tokenizer(text, truncation=True, max_length=self._longest, return_tensors="pt")
        with torch.no_grad():
            output = self.model.get_text_features(**tokens.to(self.compute.device))
        features: Tensor = output.pooler_output[0].float().cpu()
        return features

    def _length(self, text: str) -> int:
        return len(self.processor.tokenizer(text, verbose=False).input_ids)

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
        processor: a folder or hub id with the tokenizer and image processor; null is the model's own, or that of the
            released model.
        processor_revision: branch, tag or commit of the processor's hub id.
    """

    released: ClassVar[str] = LARGE
    """Hub id of the model where the option ``model`` names none."""
    released_processor: ClassVar[str | None] = None
    processor: str | None = None
    processor_revision: str | None = None
    encoder: Clip = field(init=False)

    def __post_init__(self) -> None:
        model = self.model or self.released
        processor = self.processor or (self.released_processor if may_be_hub_id(model) else None)
        self.encoder = Clip(self.compute, model, self.revision, processor, self.processor_revision)

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
    weights in the format of transformers are needed, so that nothing of ``hpsv2`` is. Images are resized and cropped
    as the processor has it.
    """

    name, released, released_processor = "hps", "adams-story/HPSv2-hf", _HUGE_PROCESSOR


@dataclass(kw_only=True, eq=False)
class Aesthetic(ClipReward):
    """LAION aesthetic score, about 1 to 10 as people gave marks, mostly 4 to 7.

    The improved aesthetic predictor (Schuhmann et al. 2022, arXiv 2210.08402; sac+logos+ava1-l14-linearMSE): five
    linear layers 768-1024-128-64-16-1 without activations on the CLIP ViT-L/14 embedding of unit length. It does not
    see the prompt: with it alone every prompt gets the same pretty picture.

    Args:
        head: a file with the layers' weights, or a folder with aesthetic-model.pth; null is the hub's
            trl-lib/ddpo-aesthetic-predictor.
        head_revision: branch, tag or commit of the head's hub id.
    """

    name = "aesthetic"
    head: str | None = None
    head_revision: str | None = None

    def check_machine(self) -> None:
        super().check_machine()
        if self._file is None:
            self._origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return [*super().origins, *([self._origin] if self._file is None else [])]

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        # One by one: a product may round differently with more rows.
        return torch.tensor([float(self._mark(embedding)) for embedding in self.encoder.images(samples)])

    def _mark(self, embedding: Tensor) -> Tensor:
        """[1] for one embedding [d]."""
        for weight, bias in self._layers:
            embedding = F.linear(embedding, weight, bias)
        return embedding

    @property
    def _file(self) -> Path | None:
        """The head if the option names a file."""
        path = Path(self.head or _HEAD_REPOSITORY).expanduser()
        if path.suffix not in _HEAD_SUFFIXES:
            return None
        if not path.is_file():
            raise UserError(f"aesthetic: its head is {self.head!r}, which is not a file on this machine")
        return path

    @property
    def _origin(self) -> Origin:
        return Origin(
            reward="aesthetic",
            option="head",
            path=self.head or _HEAD_REPOSITORY,
            revision=self.head_revision,
            needed=((_HEAD_FILE,),),
            patterns=(_HEAD_FILE,),
        )

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight [out, in] and bias [out] of each layer, float32 on the CPU."""
        file = self._file or self._origin.folder() / _HEAD_FILE
        weights = read_weights("aesthetic", file)
        numbers = sorted(int(match[1]) for name in weights if (match := re.fullmatch(r"layers\.(\d+)\.weight", name)))
        try:
            layers = [(weights[f"layers.{n}.weight"].float(), weights[f"layers.{n}.bias"].float()) for n in numbers]
        except KeyError as error:
            raise UserError(f"aesthetic: {file} lacks {error.args[0]}") from error
        _check_layers(file, [weight.shape for weight, _ in layers], self.encoder.model.config.projection_dim)
        return layers


def _check_layers(file: Path, shapes: Sequence[torch.Size], width: int) -> None:
    """Raises UserError unless the layers lead from an embedding to one number."""
    sizes = [shape[1] for shape in shapes] + [shape[0] for shape in shapes[-1:]]
    chained = all(one[0] == other[1] for one, other in itertools.pairwise(shapes))
    if not shapes or not chained or sizes[0] != width or sizes[-1] != 1:
        layout = "-".join(map(str, sizes)) or "none"
        raise UserError(
            f"aesthetic: the head {file} must have linear layers layers.N from {width}, the width of the model's"
            f" embedding, to 1, such as {width}-1024-128-64-16-1; got {layout}"
        )
