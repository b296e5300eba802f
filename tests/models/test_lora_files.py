"""LoRA files of other programs: read as diffusers reads them, trained on, and refused with one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import brightness
from tests.hub import COMMIT, counted, hub
from tests.models.families.qwen2_5_vl.tiny import save_qwen2_5_vl
from tests.models.families.test_flow_families import CASES, SIZE
from visual_grpo import provenance
from visual_grpo.adapter_folder import FACTS
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GRPOConfig, LoraParams, Parameters, PolicyConfig, SamplerConfig
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.data.datasets import FolderDataset
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.hooks.parameters import RUN_SPEC, ParameterHooks
from visual_grpo.models.family import find_family
from visual_grpo.models.lora_files import read_lora, require_layers, start_from
from visual_grpo.models.lora_fit import require_startable
from visual_grpo.models.model import Model
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.operations.preflight.check import check_model, pinned
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.starter import build
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.adapter_lookup import find_start, start_digest, start_of_training
from visual_grpo.training import made_with
from visual_grpo.training.components import build_model, check_unchanged, load_model

RANK, ALPHA = 4, 2.0
SAMPLER = SamplerConfig(steps=3, guidance_scale=4.0)
RECORDS = [PromptRecord(id=str(number), prompt=f"a thing {number}") for number in range(3)]


def wan() -> Iterator[tuple[str, str]]:
    """Layers of the transformer, and what Wan's authors call them."""
    attention = (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    for block in ("blocks.0", "blocks.1"):
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            yield from ((f"{block}.{ours}.{name}", f"{block}.{theirs}.{part}") for name, part in attention)
        yield from ((f"{block}.ffn.{name}", f"{block}.ffn.{part}") for name, part in (("net.0.proj", 0), ("net.2", 2)))


def flux(of_flux_2: bool) -> Iterator[tuple[str, str]]:
    """What FLUX's authors fuse stands beside the layers that it is split into."""
    names = ("ff.linear_in", "ff.linear_out") if of_flux_2 else ("ff.net.0.proj", "ff.net.2")
    for number in range(2):
        block, theirs = f"transformer_blocks.{number}", f"double_blocks.{number}"
        yield f"{block}.attn.to_q {block}.attn.to_k {block}.attn.to_v", f"{theirs}.img_attn.qkv"
        yield f"{block}.attn.to_out.0", f"{theirs}.img_attn.proj"
        yield from ((f"{block}.{name}", f"{theirs}.img_mlp.{layer}") for layer, name in zip((0, 2), names, strict=True))
    if of_flux_2:
        yield "single_transformer_blocks.0.attn.to_qkv_mlp_proj", "single_blocks.0.linear1"
        yield "single_transformer_blocks.0.attn.to_out", "single_blocks.0.linear2"


def same(*names: str) -> Iterator[tuple[str, str]]:
    yield from ((name, name) for name in names)


QWEN = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_out.0", "add_k_proj", "to_add_out")]
QWEN += [f"transformer_blocks.0.{mlp}_mlp.net.{layer}" for mlp in ("img", "txt") for layer in ("0.proj", "2")]
Z_IMAGE = ["layers.0.attention.to_q", "layers.1.feed_forward.w2", "noise_refiner.0.attention.to_v"]
LTX = ["transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn2.to_out.0", "transformer_blocks.1.ff.net.2"]
FILES: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "kohya wan": wan,
    "kohya qwen_image": lambda: same(*QWEN),
    "kohya z_image": lambda: same(*Z_IMAGE, "layers.0.attention.to_out.0"),
    "kohya flux": lambda: flux(of_flux_2=False),
    "ai-toolkit wan": wan,
    "ai-toolkit z_image": lambda: same(*Z_IMAGE),
    "ai-toolkit ltx": lambda: same(*LTX),
    "ai-toolkit flux2_klein": lambda: flux(of_flux_2=True),
    "diffusers sd3": lambda: same(*(name.replace("txt_mlp", "ff_context").replace("img_mlp", "ff") for name in QWEN)),
    "diffusers ltx": lambda: same(*LTX),
}
"""Program and family -> layers, with their names in the program's files.

kohya: ``lora_unet_`` and underscores, lora_down, lora_up and alpha (github.com/kohya-ss/sd-scripts and musubi-tuner).
ai-toolkit: ``diffusion_model.`` and the names of the model's authors (github.com/ostris/ai-toolkit).
"""


def write(name: str, pipeline: Any, file: Path) -> Path:
    """Writes a file as the program does, of random matrices."""
    program = name.split()[0]
    transformer, generator = pipeline.transformer, torch.Generator().manual_seed(2)
    if program == "diffusers":
        layers = [layer for layer, _ in FILES[name]()]
        config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=layers, init_lora_weights="gaussian")
        transformer.add_adapter(config)  # As diffusers' training scripts do.
        for parameter in (p for p in transformer.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.25, generator=generator)
        stated = transformer.peft_config["default"].to_dict() | {"target_modules": sorted(layers)}
        told = {key: value for key, value in stated.items() if isinstance(value, int | float | str | list | bool)}
        pipeline.save_lora_weights(
            file.parent,
            transformer_lora_layers=get_peft_model_state_dict(transformer),
            weight_name=file.name,
            transformer_lora_adapter_metadata=told,
        )
        transformer.delete_adapters("default")
        return file
    tensors: dict[str, Tensor] = {}
    for ours, original in FILES[name]():
        parts = [transformer.get_submodule(layer) for layer in ours.split()]
        inputs, outputs = parts[0].in_features, sum(part.out_features for part in parts)
        down, up = (torch.randn(*shape, generator=generator) / 4 for shape in ((RANK, inputs), (outputs, RANK)))
        if program == "kohya":
            start = f"lora_unet_{original.replace('.', '_')}"
            pair = {f"{start}.lora_down.weight": down, f"{start}.lora_up.weight": up}
            tensors |= pair | {f"{start}.alpha": torch.tensor(ALPHA)}
        else:
            start = f"diffusion_model.{original}"
            tensors |= {f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up}
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_effect_that_diffusers_gives_it(name: str, tmp_path: Path) -> None:
    family, pipeline = find_family(name.split()[1]), CASES[name.split()[1]][0]()
    file = write(name, pipeline, tmp_path / "theirs.safetensors")
    lora = read_lora(family.saved_as[0], file)
    pipeline.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="theirs")
    layers = {n: layer for n, layer in pipeline.transformer.named_modules() if isinstance(layer, LoraLayer)}
    assert set(layers) == set(lora.layers) == {each for names, _ in FILES[name]() for each in names.split()}
    for layer, (down, up) in lora.layers.items():
        torch.testing.assert_close(up @ down, layers[layer].get_delta_weight("theirs"), rtol=1e-5, atol=1e-7)
    assert lora.rank == RANK


@pytest.mark.parametrize("name", ["kohya qwen_image", pytest.param("diffusers sd3", marks=pytest.mark.slow)])
def test_a_file_is_trained_on_from_the_pictures_that_it_gives_when_it_is_merged(name: str, tmp_path: Path) -> None:
    family = find_family(name.split()[1])
    pipeline = CASES[family.name][0]()
    pipeline.save_pretrained(tmp_path / "base")
    file = write(name, pipeline, tmp_path / "theirs.safetensors")
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    pipeline.load_lora_weights(str(tmp_path), weight_name=file.name)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.transformer.save_pretrained(tmp_path / "merged/transformer")

    config = PolicyConfig(lora=LoraParams(rank=6, alpha=12))
    models = {
        which: load_model(str(tmp_path / base), size=SIZE, train=["dit"], policy=config, lora=lora, device="cpu")
        for which, base, lora in (
            ("base", "base", None),
            ("by diffusers", "merged", None),
            ("merged", "base", str(file)),
        )
    }
    without = models["base"].generate(RECORDS, [0, 1, 2], SAMPLER)
    lora = read_lora(family.saved_as[0], file)
    start_from(models["base"].adapters["dit"], lora)
    started, theirs, merged = (model.generate(RECORDS, [0, 1, 2], SAMPLER) for model in models.values())
    for one, *same, before in zip(started, theirs, merged, without, strict=True):
        assert all(int((one.int() - other.int()).abs().max()) <= 1 for other in same), "rounding"
        assert int((one.int() - before.int()).abs().max()) > 3

    policy = models["base"].policy("dit", rollout=SAMPLER, evaluation=SAMPLER, kl_reference=True)
    before = policy.adapter_state_dict()
    grpo = GRPOConfig(steps=1, prompts_per_step=2, group_size=2, learning_rate=1e-3, kl_weight=0.01)
    [step] = GRPOTrainer(policy, RewardSet({"brightness": (brightness, 1.0)}), grpo).fit(RECORDS)
    assert step.values["ratio/first_max_abs_log"] < 1e-4
    assert step.values["kl"] > 1e-6, "the reference is the base model without the LoRA"
    after = policy.adapter_state_dict()
    assert not any(torch.equal(after[key], before[key]) for layer in lora.layers for key in after if layer in key)

    policy = models["merged"].policy("dit", rollout=SAMPLER, evaluation=SAMPLER, kl_reference=True)
    [step] = GRPOTrainer(policy, RewardSet({"brightness": (brightness, 1.0)}), grpo).fit(RECORDS)
    assert step.values["kl"] < 1e-6, "the reference is the model with the LoRA"


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a model, and a LoRA of it."""
    folder = tmp_path_factory.mktemp("sd3")
    pipeline = CASES["sd3"][0]()
    pipeline.save_pretrained(folder / "base")
    return folder / "base", write("diffusers sd3", pipeline, folder / "theirs.safetensors")


def spec_of(base: Path, merged: Path | str | None = None, **lora: Any) -> RunSpec:
    sampling = {name: {"temperature": None} for name in ("rollout", "eval")}
    return resolve(
        parameters(
            model={"path": str(base), "device": "cpu", "lora": merged if merged is None else str(merged)},
            modules={"dit": None},
            sampling=sampling,
            evaluation={"controls": []},
            policy={"lora": lora},
        )
    )


def changed(**renamed: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Replaces a part of the names of the first tensor."""
    ((old, new),) = renamed.items()

    def change(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = next(name for name in tensors if old in name)
        return {name.replace(old, new) if key == name else key: value for key, value in tensors.items()}

    return change


ADDED = torch.ones(1)
REFUSED: list[tuple[str, Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], str]] = [
    ("a checkpoint", lambda _: {"model.weight": ADDED}, "is not a LoRA: no tensor .*such as model.weight"),
    ("nothing", lambda _: {}, r"is not a LoRA: .*\(none\)"),
    ("a text encoder's", lambda t: {**t, "text_encoder.a.lora_A.weight": ADDED}, "changes the text encoder too"),
    ("kohya's text encoder", lambda t: {**t, "lora_te1_a.lora_down.weight": ADDED}, r"too \(lora_te1_a"),
    ("DoRA", lambda t: {**t, "transformer.a.dora_scale": ADDED}, r"is a DoRA \(transformer.a.dora_scale\)"),
    ("LoKr", lambda _: {"lycoris_a.lokr_w1": ADDED}, "is a LoKr"),
    ("biases", lambda t: {**t, "transformer.a.lora_B.bias": ADDED}, "is a LoRA with biases"),
    ("whole weights", lambda t: {**t, "transformer.a.diff": ADDED}, "is a LoRA with whole weights"),
    (
        "one more prefix",
        lambda t: {f"model.diffusion_model.{n}": v for n, v in t.items()},
        "is not a LoRA of a StableDiffusion3P.* in",
    ),
    (
        "SDXL",
        changed(transformer="unet"),
        "not a LoRA of a Stable.* in names that diffusers converts .unknown tensor unet",
    ),
    ("half a pair", changed(lora_B="lora_X"), "unknown tensor .*lora_X"),
    ("without B", lambda t: {k: v for k, v in t.items() if "lora_A" in k}, "half of a pair is missing: transf"),
    ("another depth", changed(_blocks="_blocks.9"), "half of a pair"),
    ("other layers", lambda t: {k.replace("blocks.0", "blocks.40"): v for k, v in t.items()}, "has no layer .*40"),
    (
        "other sizes",
        lambda t: {k: v[..., :8].contiguous() if "lora_A" in k else v for k, v in t.items()},
        "has 8 inputs and .* outputs, that of SD3T",
    ),
]


@pytest.mark.parametrize(("change", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_no_lora_of_this_model_is_refused(
    change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], said: str, sd3: tuple[Path, Path], tmp_path: Path
) -> None:
    base, theirs = sd3
    save_file(dict(change(load_file(theirs))), tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=said) as told:
        require_startable(spec_of(base, rank=8), tmp_path / "other.safetensors")
    assert "\n" not in str(told.value)


def test_names_that_diffusers_does_not_convert_are_not_taken_for_a_different_model(tmp_path: Path) -> None:
    """OneTrainer's of FLUX.1, which diffusers does not read either: it makes one layer of all that it does not know."""
    transformer, tensors = CASES["flux"][0]().transformer, {}
    for name in ("attn.to_q", "ff.net.0.proj"):
        layer = transformer.get_submodule(f"transformer_blocks.0.{name}")
        start = f"lora_transformer_transformer_blocks_0_{name.replace('.', '_')}"
        tensors[f"{start}.lora_down.weight"] = torch.ones(RANK, layer.in_features)
        tensors[f"{start}.lora_up.weight"] = torch.ones(layer.out_features, RANK)
        tensors[f"{start}.alpha"] = torch.tensor(ALPHA)
    save_file(tensors, tmp_path / "theirs.safetensors")
    lora = read_lora("FluxPipeline", tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match=r"names that diffusers does not convert: transformer_blocks\.0 is a Flux"):
        require_layers(transformer, lora)


def test_a_damaged_file_a_pattern_of_scales_and_a_family_without_files_are_refused(
    sd3: tuple[Path, Path], pipeline_folder: Path, tmp_path: Path
) -> None:
    _, theirs = sd3
    (tmp_path / "cut.safetensors").write_bytes(theirs.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not an intact file in safetensors"):
        read_lora("StableDiffusion3Pipeline", tmp_path / "cut.safetensors")
    told = {f"transformer.{key}": value for key, value in {"r": 4, "lora_alpha": 8, "target_modules": ["a"]}.items()}
    metadata = json.dumps(told | {"transformer.alpha_pattern": {"a": 3}})
    save_file(load_file(theirs), tmp_path / "own.safetensors", metadata={"lora_adapter_metadata": metadata})
    with pytest.raises(UserError, match="its configuration sets alpha_pattern"):
        read_lora("StableDiffusion3Pipeline", tmp_path / "own.safetensors")
    with pytest.raises(UserError, match="diffusers reads no LoRA files for a GlmImagePipeline"):
        read_lora("GlmImagePipeline", theirs)


def test_a_file_that_is_larger_than_the_trained_adapter_names_what_to_set(sd3: tuple[Path, Path]) -> None:
    base, theirs = sd3
    require_startable(spec_of(base, rank=RANK), theirs)
    with pytest.raises(UserError, match=r"Set policy\.lora\.rank=4 \(now 2\)\, or the same"):
        require_startable(spec_of(base, rank=2), theirs)
    with pytest.raises(UserError, match=r"policy\.lora\.target_modules=\[(.*)\], which adds transformer_bl") as told:
        require_startable(spec_of(base, rank=RANK, target_modules=["attn.to_q"]), theirs)
    named = str(told.value).partition("target_modules=[")[2].partition("]")[0].split(",")
    require_startable(spec_of(base, rank=RANK, target_modules=named), theirs)


def test_a_merged_file_is_a_part_of_the_base_model_in_every_record(sd3: tuple[Path, Path], tmp_path: Path) -> None:
    base, theirs = sd3
    specs = spec_of(base), spec_of(base, merged=shutil.copy(theirs, tmp_path))
    made = [build(spec.config.starter, spec.config.data, spec.config.model, 0) for spec in specs]
    without, merged = (made_with.of(spec, model, "data") for spec, model in zip(specs, made, strict=True))
    for pipeline in ("baseline", "train"):
        found = provenance.differences(without, merged, DEPENDS_ON[pipeline])
        assert provenance.described(found) == ["base model", "LoRA in the base model"]
    digest = file_digest(theirs)
    with pytest.raises(UserError, match=f"has no LoRA merged into it, and had the LoRA with the sha256 {digest[:12]}"):
        check_unchanged(made[1], specs[0])

    load_model(str(base), size=SIZE, train=["dit"], lora=str(theirs), device="cpu").adapters.save(tmp_path / "adapters")
    (tmp_path / "adapters" / FACTS).write_text(json.dumps(merged))
    build_model(specs[1], tmp_path / "adapters")
    for used in (lambda: build_model(specs[0], tmp_path / "adapters"), lambda: load(base, tmp_path / "adapters")):
        with pytest.raises(UserError, match=f"LoRA with the sha256 {digest[:12]} merged .*Set model.lora to the file"):
            used()

    check_unchanged(made[1], specs[1])
    save_file({name: tensor * 2 for name, tensor in load_file(theirs).items()}, tmp_path / theirs.name)
    with pytest.raises(UserError, match=f"has the LoRA .* and had the LoRA with the sha256 {digest[:12]}"):
        check_unchanged(made[1], specs[1])


def load(base: Path, adapters: Path) -> Model:
    return load_model(str(base), size=SIZE, adapters=adapters, device="cpu")


def test_a_file_on_the_hub_is_merged_as_it_was_at_the_start_of_the_command(
    sd3: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, theirs = sd3
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repository").mkdir()
    shutil.copy(theirs, tmp_path / "repository")
    with hub("someone/lora", tmp_path / "repository"):
        config, _ = pinned(spec_of(base, merged="someone/lora").config)
    assert config.model.lora == f"hf://someone/lora@{COMMIT}/{theirs.name}"
    with counted() as requests:
        assert build(config.starter, config.data, config.model, 0)["lora"] == file_digest(theirs)
    assert requests == []


def test_a_training_starts_from_what_the_hub_has_when_it_is_started(
    sd3: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, theirs = sd3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repository").mkdir()
    file = Path(shutil.copy(theirs, tmp_path / "repository"))
    tree = spec_of(base, rank=RANK).config.model_dump()
    tree |= {"train": {"start": "someone/lora"}, "rewards": {"edge_density": {}}, "reward": "listed"}
    hooks = ParameterHooks()
    hooks._parameters, hooks._runtime = Parameters.model_validate(tree), {}
    hooks._taken, hooks._kept = {}, {}
    catalog = DataCatalog({"records": MemoryDataset(RECORDS)})
    catalog["adapters"] = FolderDataset(filepath=str(tmp_path / "adapters"))
    hooks.after_catalog_created(catalog)
    with hub("someone/lora", tmp_path / "repository"):
        hooks.before_pipeline_run(register_pipelines()["train"], catalog)
    start = catalog.load(RUN_SPEC).config.train.start
    assert start == f"hf://someone/lora@{COMMIT}/{file.name}"
    assert catalog.load("parameters").train.start == start
    file.write_bytes(b"later")
    with hub("someone/lora", tmp_path / "repository", commit="f" * 40):
        assert start_digest(Path(str(start_of_training(f"someone/lora/{file.name}", Path())))) != file_digest(theirs)
    with counted() as requests:
        assert find_start(start, file_digest(theirs), Path()).read_bytes() == theirs.read_bytes()
    assert requests == []


def test_a_merged_file_that_does_not_fit_is_told_before_weights_are_loaded(
    sd3: tuple[Path, Path], tmp_path: Path
) -> None:
    base, theirs = sd3
    check_model(spec_of(base, merged=theirs).config)
    save_file(changed(blocks="blocks.4")(load_file(theirs)), tmp_path / "cut.safetensors")
    with pytest.raises(UserError, match="half of a pair is missing"):
        check_model(spec_of(base, merged=tmp_path / "cut.safetensors").config)
    with pytest.raises(UserError, match=r"model\.lora is latest, which names no LoRA: expected FILE"):
        check_model(spec_of(base, merged="latest").config)


def test_a_family_that_merges_nothing_says_so(tmp_path: Path) -> None:
    save_qwen2_5_vl(tmp_path)
    with pytest.raises(UserError, match=r"model\.lora is a\.safetensors, and this family has not merged it"):
        load_model(str(tmp_path), size=SIZE, lora="a.safetensors", device="cpu")
