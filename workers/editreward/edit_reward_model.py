"""EditReward on Qwen2.5-VL: two heads that read the last layer where ``<|Reward|>`` stands.

The weights are one file, model.safetensors or model.pth, with Qwen2.5-VL's tensors under the names of transformers
4.52 and later (``model.visual.``, ``model.language_model.``; the older ones are understood too) and the heads as
``rm_heads.head_N.0``, ``.3`` and ``.5``: three linear layers, with ReLU after the first two. Its vocabulary is that of
the tokenizer with ``<|Reward|>`` added. Configuration, tokenizer and image processor are those of the base model.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from edit_wording import ASPECTS, SCORE_TOKEN, asked
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

FILES = ("model.pth", "model.safetensors")
"""The first one that is there."""
PATCHES = 256
"""Of each image, after the tower has merged them: both are scaled to this size, also small ones."""
_HEAD = re.compile(r"rm_heads\.head_(\d+)\.(\d+)\.(weight|bias)")
_LAYERS = (0, 3, 5)
"""Places of the linear layers in a head; between them are ReLU and dropout."""
Tensors = dict[str, Tensor]


def weights_file(folder: str) -> Path:
    """The file in a folder, or downloaded from the hub.

    Raises:
        ValueError: there is none.
    """
    if not Path(folder).is_dir():
        from huggingface_hub import snapshot_download

        folder = snapshot_download(folder, allow_patterns=list(FILES))
    for name in FILES:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise ValueError(f"{folder} has none of {', '.join(FILES)}")


def read(file: Path) -> Tensors:
    """Tensors and nothing else: a file that would run code is refused."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return loaded.get("model", loaded)


def split(tensors: Tensors) -> tuple[Tensors, list[Tensors]]:
    """Qwen2.5-VL's tensors under the names of ``Qwen2_5_VLModel``, and those of each head.

    ``lm_head`` is left out: nothing is written.

    Raises:
        ValueError: the heads are others.
    """
    heads: list[Tensors] = [{} for _ in ASPECTS]
    body: Tensors = {}
    for name, value in tensors.items():
        if (own := _HEAD.fullmatch(name)) and int(own[1]) < len(heads):
            heads[int(own[1])][f"{own[2]}.{own[3]}"] = value
        elif name != "lm_head.weight":
            body[_renamed(name)] = value
    expected = {f"{layer}.{kind}" for layer in _LAYERS for kind in ("weight", "bias")}
    if any(set(head) != expected for head in heads):
        raise ValueError("the weights must have two heads of three layers, rm_heads.head_0.0 to rm_heads.head_1.5")
    return body, heads


def _renamed(name: str) -> str:
    """Without ``model.``, which the language model's tensors had for themselves before transformers 4.52."""
    if not name.startswith("model."):
        return name
    rest = name.removeprefix("model.")
    return rest if rest.startswith(("visual.", "language_model.")) else f"language_model.{rest}"


def head_of(tensors: Tensors) -> nn.Module:
    """A head in float32."""
    layers: list[nn.Module] = []
    for place in _LAYERS:
        linear = nn.Linear(*reversed(tensors[f"{place}.weight"].shape))
        linear.load_state_dict({kind: tensors[f"{place}.{kind}"].float() for kind in ("weight", "bias")})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class EditReward:
    """Scores an edit.

    Args:
        folder: of the weights, or their id on the hub.
        base: the model that they were made of, for its configuration, tokenizer and image processor.
        wording: of each aspect.

    Raises:
        ValueError: the weights are of another model.
    """

    def __init__(self, folder: str, base: str, wording: dict[str, str], device: str) -> None:
        self.wording = wording
        self.device = device
        self.processor = AutoProcessor.from_pretrained(base)
        self.processor.tokenizer.add_tokens([SCORE_TOKEN], special_tokens=True)
        self.score_token = self.processor.tokenizer.convert_tokens_to_ids(SCORE_TOKEN)
        body, heads = split(read(weights_file(folder)))
        self.model = _model(folder, base, body, len(self.processor.tokenizer)).to(device).eval()
        self.heads = [head_of(own).to(device).eval() for own in heads]

    @torch.inference_mode()
    def __call__(self, source: Image.Image, edited: Image.Image, instruction: str) -> dict[str, tuple[float, float]]:
        """For each aspect the score, and the logarithm of its spread."""
        images = [self._scaled(source), self._scaled(edited)]
        found = {}
        for head, (aspect, wording) in zip(self.heads, self.wording.items(), strict=True):
            state = self._state(images, asked(wording, instruction))
            score, log_spread = head(state.float()).tolist()
            found[aspect] = (score, log_spread)
        return found

    def _state(self, images: list[Image.Image], question: str) -> Tensor:
        """The last layer at the score token, [hidden size]."""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self.processor(text=[text], images=images, return_tensors="pt").to(self.device)
        ids = inputs["input_ids"]
        # The weights were trained with positions counted through, not in the images' rows and columns.
        positions = torch.arange(ids.shape[1], device=self.device).expand(3, 1, -1)
        states = self.model(
            input_ids=ids,
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state[0]
        # An instruction may hold the token's text too; the wording's own comes last.
        return states[(ids[0] == self.score_token).nonzero()[-1, 0]]

    def _scaled(self, image: Image.Image) -> Image.Image:
        settings = self.processor.image_processor
        side = settings.patch_size * settings.merge_size
        height, width = smart_resize(image.height, image.width, side, PATCHES * side**2, PATCHES * side**2)
        return image.resize((width, height), Image.Resampling.BICUBIC)


def _model(folder: str, base: str, body: Tensors, tokens: int) -> nn.Module:
    config = AutoConfig.from_pretrained(base)
    embedded = len(body.get("language_model.embed_tokens.weight", ()))
    if embedded < tokens:
        raise ValueError(f"{folder} has {embedded} tokens, {base} and {SCORE_TOKEN} need {tokens}")
    config.text_config.vocab_size = embedded
    model, told = Qwen2_5_VLModel.from_pretrained(
        None, config=config, state_dict=body, dtype=torch.bfloat16, output_loading_info=True
    )
    wrong = {kind: sorted(told[kind])[:3] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")}
    if any(wrong.values()):
        raise ValueError(
            f"{folder} does not hold EditReward on {base}: missing {wrong['missing_keys']}, of another size"
            f" {wrong['mismatched_keys']}, not of it {wrong['unexpected_keys']}"
        )
    # The rotary frequencies too, which transformers leaves in float32: the authors train and score with rounded ones.
    return model.to(torch.bfloat16)
