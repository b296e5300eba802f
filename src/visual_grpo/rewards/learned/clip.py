"""Rewards over a CLIP model (Radford et al. 2021, arXiv 2103.00020): CLIP score, PickScore, HPS, LAION aesthetics."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cachetools import LRUCache
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.learned.pretrained import (
    CONFIG,
    IMAGE_PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    Compute,
    Origin,
    load_model,
    load_processor,
    read_weights,
)
from visual_grpo.saved_model import may_be_hub_id
from visual_grpo.types import PromptRecord

log = logging.getLogger(__name__)

LARGE = "openai/clip-vit-large-patch14"
_HUGE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_CACHED_TEXTS = 4096
_PICK_SCALE = 26.0
"""Flow-GRPO (arXiv 2505.05470) and others divide by it, which brings good images to about 1."""
_HEAD_REPOSITORY, _HEAD_FILE = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
_HEAD_SUFFIXES = (".pth", ".pt", ".safetensors")


class Clip:
    """A transformers ``CLIPModel`` with its processor, loaded at the first use.

    ``processor`` is a folder or hub id where it is not the model's own, at ``processor_revision``.
    """

    def __init__(
        self,
        compute: Compute,
        model: str,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
    ) -> None:
        files = (IMAGE_PROCESSOR, TOKENIZER)
        self.compute = compute
        self.origin = Origin(
            reward=compute.reward,
            option="model",
            path=model,
            revision=revision,
            model_type="clip",
            needed=(CONFIG, WEIGHTS, *(() if processor else files)),
        )
        self.processing = self.origin
        if processor:
            self.processing = Origin(
                reward=compute.reward, option="processor", path=processor, revision=processor_revision, needed=files
            )
        self._texts: LRUCache[str, Tensor] = LRUCache(_CACHED_TEXTS)

    def check_machine(self) -> None:
        """Raises UserError if the device or a file is not there."""
        _ = self.compute.device
        for origin in self.origins:
            origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return list(dict.fromkeys([self.origin, self.processing]))

    @cached_property
    def model(self) -> Any:
        return load_model(self.origin, self.compute, "CLIPModel")

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.processing, "CLIPProcessor")

    def images(self, samples: Sequence[Tensor]) -> Tensor:
        """[B, d] float32 of unit length, from uint8 images [3, height, width] of any sizes."""
        return F.normalize(self.compute.rows(self._image_features, [self._pixels(each) for each in samples]), dim=-1)

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

    def _pixels(self, sample: Tensor) -> Tensor:
        """[3, s, s] float32, resized, cropped and normalised by the model's processor."""
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


class _ClipReward:
    clip: Clip

    def check_machine(self) -> None:
        self.clip.check_machine()

    @property
    def origins(self) -> Sequence[Origin]:
        return self.clip.origins


class ClipScore(_ClipReward):
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
        model: str = LARGE,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.clip = Clip(Compute("clip_score", device, dtype, batch_size), model, revision)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return self.clip.cosines(prompts, samples)


class _HugeClipReward(_ClipReward):
    """A reward over a CLIP ViT-H/14 that was trained on people's choices."""

    name: str
    hub_id: str

    def __init__(
        self,
        model: str | None = None,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        model = model or self.hub_id
        processor = processor or (_HUGE_PROCESSOR if may_be_hub_id(model) else None)
        self.clip = Clip(Compute(self.name, device, dtype, batch_size), model, revision, processor, processor_revision)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return self.clip.cosines(prompts, samples)


class PickScore(_HugeClipReward):
    """PickScore divided by 26, about 0.7 to 1 (Kirstain et al. 2023, arXiv 2305.01569).

    The score is exp(logit_scale) times the cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was
    trained on people's choices. The model reads the first 77 tokens of a prompt; a longer one is named in the log.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel``; null is yuvalkirstain/PickScore_v1.
        revision: branch, tag or commit of a hub id.
        processor: a folder or hub id with its tokenizer and image processor; null is the model's own where that is a
            folder, else laion/CLIP-ViT-H-14-laion2B-s32B-b79K.
        processor_revision: branch, tag or commit of the processor's hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator.
    """

    name, hub_id = "pick_score", "yuvalkirstain/PickScore_v1"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return super().__call__(prompts, samples) * self.clip.model.logit_scale.float().exp().cpu() / _PICK_SCALE


class Hps(_HugeClipReward):
    """Human Preference Score v2, about 0.2 to 0.35 (Wu et al. 2023, arXiv 2306.09341).

    The cosine of the embeddings of image and prompt, by a CLIP ViT-H/14 that was trained on people's choices; its
    weights in the format of transformers are needed, so that nothing of ``hpsv2`` is. Images are resized and cropped
    as the processor has it. The model reads the first 77 tokens of a prompt; a longer one is named in the log.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel``; null is adams-story/HPSv2-hf.
        revision, processor, processor_revision, device, dtype, batch_size: as of ``pick_score``.
    """

    name, hub_id = "hps", "adams-story/HPSv2-hf"


class Aesthetic(_ClipReward):
    """LAION aesthetic score, about 1 to 10 as people gave marks, mostly 4 to 7.

    The improved aesthetic predictor (Schuhmann et al. 2022, arXiv 2210.08402; sac+logos+ava1-l14-linearMSE): five
    linear layers 768-1024-128-64-16-1 without activations on the CLIP ViT-L/14 embedding of unit length. It does not
    see the prompt: with it alone every prompt gets the same pretty picture.

    Args:
        model: a folder or hub id of a transformers ``CLIPModel`` with its processor.
        revision: branch, tag or commit of a hub id.
        head: a file with the layers' weights, or a folder with aesthetic-model.pth; null is the hub's
            trl-lib/ddpo-aesthetic-predictor.
        head_revision: branch, tag or commit of the head's hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: of the CLIP model: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator.
    """

    def __init__(
        self,
        model: str = LARGE,
        revision: str | None = None,
        head: str | None = None,
        head_revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.clip = Clip(Compute("aesthetic", device, dtype, batch_size), model, revision)
        self.head = head or _HEAD_REPOSITORY
        self._head_revision = head_revision

    def check_machine(self) -> None:
        super().check_machine()
        if self._file is None:
            self._origin.check()

    @property
    def origins(self) -> Sequence[Origin]:
        return [*self.clip.origins, *([self._origin] if self._file is None else [])]

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [float(self._mark(embedding)) for embedding in self.clip.images(samples)]

    def _mark(self, embedding: Tensor) -> Tensor:
        """[1] for one embedding [d]: a product may round differently with more rows."""
        for weight, bias in self._layers:
            embedding = F.linear(embedding, weight, bias)
        return embedding

    @property
    def _file(self) -> Path | None:
        """The head if the option names a file."""
        path = Path(self.head).expanduser()
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
            path=self.head,
            revision=self._head_revision,
            needed=((_HEAD_FILE,),),
            patterns=(_HEAD_FILE,),
        )

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight [out, in] and bias [out] of each layer, float32 on the CPU."""
        file = self._file or self._origin.folder() / _HEAD_FILE
        weights = read_weights("aesthetic", file)
        numbers = sorted(int(found[1]) for name in weights if (found := re.fullmatch(r"layers\.(\d+)\.weight", name)))
        try:
            layers = [(weights[f"layers.{n}.weight"].float(), weights[f"layers.{n}.bias"].float()) for n in numbers]
        except KeyError as error:
            raise UserError(f"aesthetic: {file} lacks {error.args[0]}") from error
        _check_layers(file, [weight.shape for weight, _ in layers], self.clip.model.config.projection_dim)
        return layers


def _check_layers(file: Path, shapes: Sequence[torch.Size], width: int) -> None:
    """Raises UserError unless the layers lead from an embedding to one number."""
    sizes = [shape[1] for shape in shapes] + [shape[0] for shape in shapes[-1:]]
    chained = all(one[0] == other[1] for one, other in itertools.pairwise(shapes))
    if not shapes or not chained or sizes[0] != width or sizes[-1] != 1:
        found = "-".join(map(str, sizes)) or "none"
        raise UserError(
            f"aesthetic: the head {file} must have linear layers layers.N from {width}, the width of the model's"
            f" embedding, to 1, such as {width}-1024-128-64-16-1; got {found}"
        )
