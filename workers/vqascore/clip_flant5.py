"""CLIP-FlanT5: Flan-T5 that reads the patches of CLIP ViT-L/14 at 336 pixels in place of an image token.

The folder is that of zhiqiulin/clip-flant5-xxl: T5's tensors under T5's names, the projector as ``mm_projector.0`` and
``mm_projector.2``, and, in config.json beside T5's keys, ``mm_vision_tower``, ``mm_vision_select_layer``,
``mm_vision_select_feature`` and ``mm_projector_type``. Tensors of the tower (``vision_tower.``) are left out: it was
frozen, and is loaded from where ``mm_vision_tower`` says, as the authors do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, T5Config, T5ForConditionalGeneration
from transformers.utils import cached_file
from vqa_question import ANSWER, around_the_picture

ELSEWHERE = re.compile(r"^(vision_tower\.|embed_tokens\.weight$)")
"""Tensors that are not read: the tower's, and T5's embedding by a second name."""


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a folder or of the hub; the model type it names is not of transformers, so it is read as it is."""
    settings: dict[str, Any] = json.loads(Path(cached_file(folder, "config.json")).read_text(encoding="utf-8"))
    if "mm_projector_type" not in settings:
        raise ValueError(f"{folder} is no CLIP-FlanT5: config.json has no mm_projector_type")
    if (feature := settings.get("mm_vision_select_feature", "patch")) != "patch":
        raise ValueError(f"{folder}: mm_vision_select_feature must be patch, got {feature!r}")
    return settings


def projector(kind: str, seen: int, hidden: int) -> nn.Module:
    """``linear``, or ``mlpNx_gelu`` with N layers.

    Raises:
        ValueError: another kind.
    """
    if kind == "linear":
        return nn.Linear(seen, hidden)
    if (layers := re.fullmatch(r"mlp(\d+)x_gelu", kind)) is None:
        raise ValueError(f"mm_projector_type must be linear or mlpNx_gelu, got {kind!r}")
    modules: list[nn.Module] = [nn.Linear(seen, hidden)]
    for _ in range(1, int(layers[1])):
        modules += [nn.GELU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*modules)


class FlanT5WithProjector(T5ForConditionalGeneration):
    """T5 with the projector as CLIP-FlanT5 names it, so that transformers loads both, in any of its files."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.mm_projector = projector(config.mm_projector_type, config.mm_hidden_size, config.d_model)


def flan_t5(folder: str, settings: dict[str, Any]) -> FlanT5WithProjector:
    """With the weights of the folder.

    Raises:
        ValueError: some are missing, or belong to something else.
    """
    config = T5Config(**{key: value for key, value in settings.items() if key not in ("model_type", "architectures")})
    model, told = FlanT5WithProjector.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, output_loading_info=True
    )
    others = sorted(name for name in told["unexpected_keys"] if not ELSEWHERE.match(name))
    if told["missing_keys"] or told["mismatched_keys"] or others:
        raise ValueError(
            f"{folder} does not hold the weights of CLIP-FlanT5: missing {sorted(told['missing_keys'])[:3]}, of another"
            f" size {sorted(told['mismatched_keys'])[:3]}, not of it {others[:3]}"
        )
    if model.lm_head.weight is model.shared.weight:  # transformers 5 lets T5 speak with its embedding where it must.
        raise ValueError(f"{folder} does not hold the weights of CLIP-FlanT5: missing ['lm_head.weight']")
    return model


def square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square, whose rest has the colour."""
    side = max(image.size)
    filled = Image.new("RGB", (side, side), colour)
    filled.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return filled


class ClipFlanT5:
    """Asked about a picture and a text.

    Args:
        folder: the weights, or their id on the hub.
        tokenizer: Flan-T5's.
        tower: a CLIP model's folder or id; None is what the weights name.
    """

    def __init__(self, folder: str, tokenizer: str, tower: str | None, device: str) -> None:
        settings = read_config(folder)
        tower = tower or settings["mm_vision_tower"]
        self.layer = settings.get("mm_vision_select_layer", -2)
        self.device = device
        self.language = flan_t5(folder, settings).to(device).eval()
        vision, told = CLIPVisionModel.from_pretrained(tower, dtype=torch.bfloat16, output_loading_info=True)
        if told["missing_keys"] or vision.config.hidden_size != settings["mm_hidden_size"]:
            raise ValueError(f"{tower} is not the CLIP that {folder} was trained with")
        self.vision = vision.to(device).eval()
        self.pictures = CLIPImageProcessor.from_pretrained(tower)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    @torch.inference_mode()
    def answer(self, image: Image.Image, text: str) -> list[float]:
        """Log-probabilities of the tokens of "Yes" and of the end after them."""
        before, after = (self._embedded(part) for part in around_the_picture(text))
        read = torch.cat([before, self._seen(image), after], dim=1)
        expected = self._tokens(ANSWER)
        said = torch.cat([torch.full_like(expected[:, :1], self.tokenizer.pad_token_id), expected[:, :-1]], dim=1)
        logits = self.language(inputs_embeds=read, decoder_input_ids=said).logits[0].float()
        # The authors cut the vocabulary to the tokenizer's: what T5 has beyond it is never said.
        spoken = logits[:, : len(self.tokenizer)].log_softmax(-1)
        return spoken.gather(1, expected[0][:, None])[:, 0].tolist()

    def _tokens(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt").input_ids.to(self.device)

    def _embedded(self, text: str) -> Tensor:
        return self.language.get_input_embeddings()(self._tokens(text))

    def _seen(self, image: Image.Image) -> Tensor:
        """[1, patches, hidden size of T5]."""
        whole = square(image, tuple(int(level * 255) for level in self.pictures.image_mean))
        pixels = self.pictures(images=whole, return_tensors="pt").pixel_values.to(self.device, self.vision.dtype)
        layers = self.vision(pixels, output_hidden_states=True).hidden_states
        return self.language.mm_projector(layers[self.layer][:, 1:])
