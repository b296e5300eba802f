"""Loading saved pipelines: nothing is made up, and a fault is told with the tensor or file that it is about."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler
from safetensors.torch import load_file, save_file

from tests.hub import hub
from tests.models.families.sd3 import tiny
from tests.models.families.wan import tiny as tiny_wan
from visual_grpo.common.errors import UserError
from visual_grpo.config import ModelConfig
from visual_grpo.models.families import sd3, wan
from visual_grpo.training.components import load_model, load_policy

NAME = "acme/sd3"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny.pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def changed(saved: Path, folder: Path, part: str, change: Callable[[Weights], object]) -> str:
    shutil.copytree(saved, folder)
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


def load(path: str) -> Any:
    return sd3.load(path, ModelConfig(path=path, device="cpu"))


def drop(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def cut(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: weights[name][:-1].clone()})


def add(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: torch.zeros(2)})


FAULTS: list[tuple[str, Callable[[Weights], object], str]] = [
    ("text_encoder", drop("text_model.final_layer_norm.weight"), "it lacks text_model.final_layer_norm.weight"),
    ("text_encoder_3", drop("encoder.final_layer_norm.weight"), "it lacks encoder.final_layer_norm.weight"),
    ("transformer", drop("norm_out.linear.weight"), "SD3Transformer2DModel .* lacks norm_out.linear.weight"),
    ("vae", drop("decoder.conv_norm_out.weight"), "AutoencoderKL .* it lacks decoder.conv_norm_out.weight"),
    ("text_encoder_3", cut("shared.weight"), r"different shape shared.weight \(\[383, 64\] for \[384, 64\]\)"),
    ("transformer", cut("context_embedder.weight"), r"shape context_embedder.weight \(\[31, 64\] for \[32, 64\]\)"),
    ("transformer", add("transformer_blocks.3.a"), "it has in addition transformer_blocks.3.a"),
    ("text_encoder", add("text_model.encoder.layers.3.a"), "it has in addition text_model.encoder.layers.3.a"),
]


@pytest.mark.parametrize(("part", "change", "said"), FAULTS)
def test_weights_that_are_not_those_of_the_network_are_named(
    saved: Path, part: str, change: Callable[[Weights], object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        load(changed(saved, tmp_path / "model", part, change))


def edit(file: str, **values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        place = folder / file
        place.write_text(json.dumps((json.loads(place.read_text()) if place.is_file() else {}) | values))

    return change


def split_without_a_map(folder: Path) -> None:
    for file in (folder / "transformer").glob("*.safetensors"):
        file.rename(file.with_name("diffusion_pytorch_model-00001-of-00001.safetensors"))
    edit("transformer/diffusion_pytorch_model.safetensors.index.json", metadata={})(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (edit("model_index.json", transformer=["no_such_library", "Net"]), "No module named 'no_such_library'"),
        (edit("transformer/config.json", num_layers="3"), "TypeError 'str' object cannot be interpreted"),
        (split_without_a_map, "KeyError 'weight_map'"),
    ],
)
def test_a_folder_that_its_library_cannot_read_is_named(
    saved: Path, damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(UserError, match=f"The model '{folder}' cannot be loaded: .*{said}"):
        load(str(folder))


def test_weights_that_are_quantised_already_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "model")
    file = tmp_path / "model/text_encoder_2/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match=r"text_encoder_2 are quantised already \(awq\)"):
        load(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("family", "build", "scheduler", "said"),
    [
        (sd3, tiny.pipeline, FlowMatchLCMScheduler(), "FlowMatchLCMScheduler;"),
        (sd3, tiny.pipeline, FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), "with stochastic_sampling;"),
        (wan, tiny_wan.pipeline, FlowMatchHeunDiscreteScheduler(), "FlowMatchHeunDiscreteScheduler;"),
        (wan, tiny_wan.pipeline, FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "with invert_sigmas;"),
    ],
)
def test_steps_that_are_not_eulers_are_refused(
    family: Any, build: Callable[[], Any], scheduler: Any, said: str, tmp_path: Path
) -> None:
    pipeline = build()
    pipeline.scheduler = scheduler
    pipeline.save_pretrained(tmp_path)
    options = {"shift": 3.0} if family is wan else {}
    with pytest.raises(UserError, match=said):
        family.load(str(tmp_path), ModelConfig(path=str(tmp_path), device="cpu", options=options))


def test_a_head_of_a_different_class_beside_an_encoder_does_no_harm(saved: Path, tmp_path: Path) -> None:
    load(changed(saved, tmp_path / "model", "text_encoder_3", add("lm_head.weight")))


@pytest.mark.parametrize(
    ("lacks", "said"), [("tokenizer.json", "vocab.json and merges.txt"), (".", "lacks tokenizer.")]
)
def test_no_vocabulary_is_made_up(saved: Path, lacks: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "model")
    place = tmp_path / "model/tokenizer" / lacks
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(UserError, match=re.escape(said)):
        load(str(tmp_path / "model"))
    with hub(NAME, tmp_path / "model"), pytest.raises(UserError, match=re.escape(said)):
        load(NAME)


def test_t5_is_left_out_of_the_download_and_of_the_model(saved: Path) -> None:
    """In a script as on the command line, whose options are texts too."""
    for length in (0, "0"):
        with hub(NAME, saved) as asked:
            model = load_model(NAME, size=tiny.SIZE, options={"max_sequence_length": length}, device="cpu").model
        assert model.pipeline.text_encoder_3 is None
        assert not any("_3/" in file for file in asked)
    policy: Any = load_policy(str(saved), size=tiny.SIZE, options={"max_sequence_length": 0}, device="cpu")
    assert policy.model.pipeline.text_encoder_3 is None


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("https://huggingface.co/acme/sd3", "acme/sd3"),
        ("https://huggingface.co/acme/sd3/", "acme/sd3"),
        ("hf://acme/sd3", "acme/sd3"),
        ("~/models/sd3", str(Path.home() / "models/sd3")),
        ("models/a/b/c", "models/a/b/c"),
    ],
)
def test_a_model_is_named_as_elsewhere(written: str, path: str) -> None:
    assert ModelConfig(path=written).path == path


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("https://huggingface.co/acme/sd3/tree/v2", "expected OWNER/NAME, here acme/sd3 and model.revision=v2"),
        ("https://huggingface.co/acme/sd3/blob/main/sd3.safetensors", "expected OWNER/NAME, here acme/sd3$"),
        ("hf://datasets/acme/pictures", "is not the address of a model's page"),
        ("models/flux1-dev-Q4_K_S.gguf", "a single file of weights, which is not read"),
        ("acme/sd3/sd3-fp8.safetensors", "a single file of weights, which is not read"),
    ],
)
def test_a_file_and_an_address_inside_a_repository_are_no_model(written: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said).replace(r"\$", ".*")):
        ModelConfig(path=written)
