"""Small models of the real classes in the file layouts of released repositories.

The layouts' sources: file lists that public programs pin for these repositories, by commit and checksum or for an exact
download, such as mlx-gen's for stable-diffusion-3.5 (ceddf0a7), modiff's studio_execution_spec.py (FLUX.1-dev, Kontext,
FLUX.2 klein, GLM-Image, Wan 2.1), Z-Image.swift's (Z-Image), NewGenAI's for LTX-Video, a ComfyUI node's for
Qwen3-VL-2B-Instruct (89644892), and the model cards.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.models.families.flux import tiny as flux
from tests.models.families.flux2_klein import tiny as flux2_klein
from tests.models.families.glm_image import tiny as glm_image
from tests.models.families.ltx import tiny as ltx
from tests.models.families.qwen2_5_vl import tiny as qwen2_5_vl
from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.wan import tiny as wan
from tests.models.families.z_image import tiny as z_image

_CLIP = ("CLIPTokenizer", ("merges.txt", "special_tokens_map.json", "tokenizer_config.json", "vocab.json"))
T5_FAST = (
    "T5TokenizerFast",
    ("special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer_config.json"),
)
T5 = ("T5Tokenizer", ("added_tokens.json", "special_tokens_map.json", "spiece.model", "tokenizer_config.json"))
_QWEN = (
    "Qwen2Tokenizer",
    (
        *("added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json"),
        *("tokenizer_config.json", "vocab.json"),
    ),
)
_QWEN_FAST = ("Qwen2TokenizerFast", (*_QWEN[1], "tokenizer.json"))
_QWEN_SHORT = ("Qwen2Tokenizer", ("merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"))
_QWEN_VL = (
    "Qwen2VLProcessor",
    (*_QWEN_FAST[1], "preprocessor_config.json", "video_preprocessor_config.json"),
)
_BYTES = ("ByT5Tokenizer", ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"))
_GLM = (
    "GlmImageProcessor",
    ("chat_template.jinja", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
)
_VL = (
    "Qwen2_5_VLProcessor",
    (
        *("chat_template.json", "merges.txt", "preprocessor_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "vocab.json"),
    ),
)

_VL_3 = ("Qwen3VLProcessor", (*_VL[1], "video_preprocessor_config.json"))

Reader = tuple[str, tuple[str, ...]]
"""The class that model_index.json names, and the files."""


class Released(NamedTuple):
    family: str
    save: Callable[[Path], object]
    readers: Mapping[str, Reader]
    """Folder -> the layout of its tokenizer or processor."""
    beside: tuple[str, ...] = ()
    """Further files, which no model is loaded from."""


RELEASED = {
    "stabilityai/stable-diffusion-3.5-medium": Released(
        "sd3",
        lambda folder: _saved(sd3.pipeline(), folder),
        {"tokenizer": _CLIP, "tokenizer_2": _CLIP, "tokenizer_3": T5_FAST},
        ("sd3.5_medium.safetensors", "text_encoders/t5xxl_fp16.safetensors", "text_encoder/model.fp16.safetensors"),
    ),
    "black-forest-labs/FLUX.1-dev": Released(
        "flux",
        lambda folder: _saved(flux.pipeline(), folder),
        {"tokenizer": _CLIP, "tokenizer_2": T5_FAST},
        ("flux1-dev.safetensors", "ae.safetensors"),
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": Released(
        "flux_kontext",
        lambda folder: _saved(flux.pipeline(kontext=True), folder),
        {"tokenizer": _CLIP, "tokenizer_2": T5_FAST},
        ("flux1-kontext-dev.safetensors", "ae.safetensors"),
    ),
    "black-forest-labs/FLUX.2-klein-base-4B": Released(
        "flux2_klein",
        lambda folder: _saved(flux2_klein.pipeline(), folder),
        {"tokenizer": _QWEN_FAST},
        ("flux-2-klein-base-4b.safetensors",),
    ),
    "Tongyi-MAI/Z-Image": Released(
        "z_image", lambda folder: _saved(z_image.pipeline(), folder), {"tokenizer": _QWEN_SHORT}
    ),
    "Qwen/Qwen-Image": Released(
        "qwen_image", lambda folder: _saved(qwen_image.pipeline(), folder), {"tokenizer": _QWEN}
    ),
    "Qwen/Qwen-Image-Edit-2511": Released(
        "qwen_image_edit_plus",
        lambda folder: _saved(qwen_image.pipeline(plus=True, zero_cond_t=True), folder),
        {"tokenizer": _QWEN, "processor": _QWEN_VL},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Released(
        "wan", lambda folder: _saved(wan.pipeline(), folder), {"tokenizer": T5_FAST}
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Released(
        "wan_i2v", lambda folder: _saved(wan.pipeline(i2v=True), folder), {"tokenizer": T5_FAST}
    ),
    "Lightricks/LTX-Video": Released(
        "ltx",
        lambda folder: _saved(ltx.pipeline(), folder),
        {"tokenizer": T5},
        ("ltx-video-2b-v0.9.safetensors", "ltxv-13b-0.9.8-dev.safetensors"),
    ),
    "zai-org/GLM-Image": Released(
        "glm_image", lambda folder: _saved(glm_image.pipeline(), folder), {"tokenizer": _BYTES, "processor": _GLM}
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": Released("qwen2_5_vl", qwen2_5_vl.save_qwen2_5_vl, {".": _VL}),
    "Qwen/Qwen3-VL-8B-Instruct": Released("qwen2_5_vl", qwen2_5_vl.save_qwen3_vl, {".": _VL_3}),
}


def save(name: str, folder: Path) -> Path:
    """A repository of this name: weights in shards, tokenizers in the released files, twins beside them."""
    released = RELEASED[name]
    released.save(folder)
    for place, (kind, files) in released.readers.items():
        rewrite(folder / place, kind, files)
    index = folder / "model_index.json"
    if index.is_file():
        facts = json.loads(index.read_text())
        facts |= {place: ["transformers", kind] for place, (kind, _) in released.readers.items()}
        index.write_text(json.dumps(facts))
    for file in ("README.md", ".gitattributes", *released.beside):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"not read")
    return folder


def _saved(pipeline: Any, folder: Path) -> None:
    pipeline.save_pretrained(folder, max_shard_size="200KB")


def rewrite(folder: Path, kind: str, files: tuple[str, ...]) -> None:
    """Writes a folder's tokenizer anew as ``files``."""
    if kind.startswith("T5"):
        shutil.rmtree(folder, ignore_errors=True)
        _save_t5(folder)
    else:
        _split(folder, kind, files)
    if kind in ("ByT5Tokenizer", "T5Tokenizer"):
        (folder / "added_tokens.json").write_text("{}")
    if kind in ("Qwen2_5_VLProcessor", "Qwen3VLProcessor"):
        template = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    weights = {file for file in folder.iterdir() if file.suffix == ".safetensors" or "model." in file.name}
    kept = {folder / name for name in (*files, "config.json", "generation_config.json")} | weights
    for file in set(folder.iterdir()) - kept:
        file.unlink() if file.is_file() and folder.name != "." else None
    assert not [name for name in files if not (folder / name).is_file()], sorted(folder.iterdir())


def _split(folder: Path, kind: str, files: tuple[str, ...]) -> None:
    """Writes what transformers 4 wrote of a tokenizer and a processor beside what transformers 5 writes."""
    tokenizer_file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = {
        "Qwen2TokenizerFast": "Qwen2Tokenizer",
        "Qwen2VLProcessor": "Qwen2Tokenizer",
        "Qwen2_5_VLProcessor": "Qwen2Tokenizer",
        "Qwen3VLProcessor": "Qwen2Tokenizer",
        "GlmImageProcessor": "PreTrainedTokenizerFast",
    }.get(kind, kind)
    config.pop("backend", None)
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    if tokenizer_file.is_file():
        facts = json.loads(tokenizer_file.read_text())
        added = {str(entry["id"]): {key: entry[key] for key in entry if key != "id"} for entry in facts["added_tokens"]}
        config["added_tokens_decoder"] = added
        if kind != "CLIPTokenizer":
            (folder / "added_tokens.json").write_text(json.dumps({e["content"]: int(i) for i, e in added.items()}))
        merges = [entry if isinstance(entry, str) else " ".join(entry) for entry in facts["model"].get("merges", [])]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        (folder / "vocab.json").write_text(json.dumps(facts["model"]["vocab"]))
    template = folder / "chat_template.jinja"
    if not template.is_file():
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    if "chat_template.jinja" not in files:
        config["chat_template"] = template.read_text()
    config_file.write_text(json.dumps(config))
    processor = folder / "processor_config.json"
    if processor.is_file():
        facts = json.loads(processor.read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(facts["image_processor"]))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(facts.get("video_processor", {})))


def _save_t5(folder: Path) -> None:
    """A vocabulary of letters, and what transformers makes of it."""
    import sentencepiece
    from transformers import T5Tokenizer

    folder.mkdir(parents=True)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["a red circle", "a blue square on a table", "the quick brown fox jumps over lazy dogs"]
        ),
        model_writer=written,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(written.getvalue())
    T5Tokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "spiece.model").write_bytes(written.getvalue())
    marks = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    extra = [f"<extra_id_{number}>" for number in range(100)]
    (folder / "special_tokens_map.json").write_text(json.dumps(marks | {"additional_special_tokens": extra}))
    config = marks | {"extra_ids": 100, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"additional_special_tokens": extra}))
