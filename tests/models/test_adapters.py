"""The adapters of a model of two modules, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import SIZE, stir
from tests.evaluation.painter import brightness
from visual_grpo.adapter_folder import FACTS
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GRPOConfig, LoraParams, SamplerConfig
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.lora_layers import compute_in_base_precision, fast_lora
from visual_grpo.models.model import AdapterSet
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.components import load_model, load_policy

SAMPLER = SamplerConfig(temperature=1.0, steps=4, guidance_scale=1.0)


def both(folder: Path, seed: int = 0) -> AdapterSet:
    return load_model(str(folder), size=SIZE, train=["ar", "dit"], device="cpu", seed=seed).adapters


def effects(adapters: AdapterSet) -> dict[str, torch.Tensor]:
    """What each LoRA adds to its layer's weight; the diffusers file has alpha in B."""
    return {
        f"{module}/{name}": layer.get_delta_weight("default")
        for module in adapters._adapters
        for name, layer in adapters[module].model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def draw_weights(adapters: AdapterSet) -> None:
    for number, module in enumerate(("ar", "dit")):
        for parameter in adapters[module].parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number + parameter.numel()))


def test_adapters_of_a_half_precision_model_stay_as_trained(pipeline_folder: Path, tmp_path: Path) -> None:
    trained = load_model(str(pipeline_folder), size=SIZE, train=["ar", "dit"], dtype="bfloat16", device="cpu").adapters
    draw_weights(trained)
    trained.save(tmp_path)
    loaded = load_model(str(pipeline_folder), size=SIZE, dtype="bfloat16", device="cpu").adapters
    loaded.load(tmp_path, ["ar", "dit"])
    assert {value.dtype for value in loaded.state().values()} == {torch.float32}
    expected, found = effects(trained), effects(loaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_state_has_a_copy_of_both_and_goes_back_to_each(pipeline_folder: Path) -> None:
    adapters = both(pipeline_folder)
    fresh = adapters.state()
    assert {name.split("/")[0] for name in fresh} == {"ar", "dit"}
    assert {name for name in fresh if name.startswith("ar/")} == {f"ar/{name}" for name in adapters["ar"].state()}
    assert len(fresh) == len(adapters["ar"].state()) + len(adapters["dit"].state())
    draw_weights(adapters)
    stirred = adapters.state()
    assert not [name for name in fresh if torch.equal(fresh[name], stirred[name])]
    adapters.load_state(fresh)
    assert all(torch.equal(value, fresh[name]) for name, value in adapters.state().items())
    other = both(pipeline_folder)
    other.load_state(stirred)
    assert all(torch.equal(value, stirred[name]) for name, value in other.state().items())
    with pytest.raises(UserError, match="does not fit this model"):
        other.load_state({name: value for name, value in stirred.items() if name.startswith("ar/")})


def test_saved_adapters_load_into_their_modules(pipeline_folder: Path, tmp_path: Path) -> None:
    adapters = both(pipeline_folder)
    draw_weights(adapters)
    adapters.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ar", "dit"]
    model = load_model(str(pipeline_folder), size=SIZE, train=["ar", "dit"], adapters=tmp_path, device="cpu")
    state, effect = adapters.state(), effects(adapters)
    assert all(torch.equal(value, effect[name]) for name, value in effects(model.adapters).items())
    one = load_model(str(pipeline_folder), size=SIZE, train=["dit"], adapters=tmp_path, device="cpu").adapters
    assert one.state().keys() == {name for name in state if name.startswith("dit/")}
    everything = load_model(str(pipeline_folder), size=SIZE, adapters=str(tmp_path), device="cpu").adapters
    assert everything.state().keys() == state.keys()
    (tmp_path / FACTS).write_text(json.dumps({"model_content": "of a different model"}))
    with pytest.raises(UserError, match="was trained on a base model whose files differ"):
        load_model(str(pipeline_folder), size=SIZE, adapters=tmp_path, device="cpu")


def test_an_adapter_replaces_the_one_before(pipeline_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(pipeline_folder), size=SIZE, train=["ar", "dit"], device="cpu")
    adapters, few = (
        model.adapters,
        {"ar": LoraParams(target_modules=["q_proj"]), "dit": LoraParams(target_modules=["to_q"])},
    )
    adapters.attach(few, 0)
    draw_weights(adapters)
    adapters.save(tmp_path)
    expected = effects(adapters)
    assert {name.rpartition(".")[2] for name in expected} == {"q_proj", "to_q"}
    for module in few:
        adapters.attach({module: LoraParams()}, 0)
    adapters.load(tmp_path)
    found = effects(adapters)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("module", ["ar", "dit"])
def test_what_a_policy_saves_is_loaded_again(pipeline_folder: Path, tmp_path: Path, module: str) -> None:
    policy = load_policy(str(pipeline_folder), module=module, size=SIZE, device="cpu")
    stir(policy)
    policy.save_adapter(tmp_path / "mine")
    (tmp_path / "mine/other").touch()
    assert len({file.stat().st_mode for file in (tmp_path / "mine").iterdir()}) == 1, "all follow the umask"
    model = load_model(str(pipeline_folder), size=SIZE, adapters=tmp_path / "mine", device="cpu")
    trained: Any = policy.adapter.model
    loaded = effects(model.adapters)
    assert {name.partition("/")[0] for name in loaded} == {module}
    for name, value in loaded.items():
        layer = trained.get_submodule(name.partition("/")[2])
        assert torch.equal(value, layer.get_delta_weight("default"))
    with pytest.raises(UserError, match=r"holds no adapter of the modules ar, dit\."):
        load_model(str(pipeline_folder), size=SIZE, adapters=tmp_path, device="cpu")


def test_a_size_that_would_be_rounded_and_prompts_that_are_no_records_are_refused(pipeline_folder: Path) -> None:
    with pytest.raises(UserError, match=r"size is \(60, 100\); expected .* multiples of 32 pixels, such as \(64, 96\)"):
        load_policy(str(pipeline_folder), size=(60, 100), device="cpu")
    model = load_model(str(pipeline_folder), size=SIZE, device="cpu")
    assert model.generate([], [], SAMPLER) == []
    with pytest.raises(
        UserError, match=r"each prompt must be a PromptRecord, got the str 'a circle'; make one of a text"
    ):
        model.generate(["a circle"], [0], SAMPLER)  # type: ignore[list-item]


def test_the_seed_decides_the_initial_values(pipeline_folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (both(pipeline_folder, seed).state() for seed in (3, 3, 4))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert all(torch.equal(value, other[name]) == ("lora_B" in name) for name, value in one.items())
    assert torch.equal(before, torch.random.get_rng_state())


def test_each_module_has_parameters_of_its_own(pipeline_folder: Path) -> None:
    adapters = load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters
    assert adapters.state() == {}
    adapters.attach({"ar": LoraParams(rank=2), "dit": LoraParams(rank=5)}, 0)
    for name, value in adapters.state().items():
        assert min(value.shape) == (2 if name.startswith("ar/") else 5)


NO_LAYERS: list[tuple[str, Any, str]] = [
    ("dit", ["to_q", "to_x"], r"target_modules .*: 'to_x' names no layer of GlmImageTr\w+; .* It has attn1\.to_k"),
    ("ar", ["embeddings"], r"'embeddings' names model\.visual\.embeddings \(\w+\) of GlmImageFor\w+; expected a list"),
    ("ar", ["q_proj", "lm_head"], r"'lm_head' names lm_head \(Linear\) .* in model\.language_model, or"),
    ("ar", r".*visual.*qkv", r"names model\.visual\.\S+qkv \(Linear\) .* It has mlp\.down_proj, .*v_proj\."),
    ("dit", ["all-linear"], "'all-linear' names no layer"),
    ("dit", "to_q", r"'to_q' names no layer .* or a regular expression of whole names\."),
    ("dit", "(", "'\\(' is not a valid regular expression: missing \\)"),
    ("dit", [], "'' names no layer"),
]


def test_target_modules_that_are_no_trained_linear_layers_are_refused(pipeline_folder: Path) -> None:
    adapters = load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters
    for module, targets, complaint in NO_LAYERS:
        with pytest.raises(UserError, match=complaint):
            adapters.attach({module: LoraParams(target_modules=targets)}, 0)
    adapters.attach({"dit": LoraParams(target_modules=["to_q", "ff.net.2"])}, 0)
    assert {name.split(".", 3)[-1].split(".lora_")[0] for name in adapters.state()} == {"to_q", "net.2"}


def test_a_module_without_an_adapter_is_named(pipeline_folder: Path) -> None:
    model = load_model(str(pipeline_folder), size=SIZE, train=["ar"], device="cpu")
    for ask in (lambda: model.adapters["dit"], lambda: model.policy("dit", rollout=SAMPLER, evaluation=SAMPLER)):
        with pytest.raises(
            UserError, match=r"module 'dit' has no adapter yet: call adapters\.attach or adapters\.load"
        ):
            ask()


NO_PLAIN_LORA: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "no adapter_model"),
    (lambda folder: configured(folder, peft_type="XLORA"), "'XLORA'; expected LORA"),
    (lambda folder: configured(folder, megatron_core="evil.core"), "its configuration sets megatron_core"),
    (lambda folder: configured(folder, alpha_pattern={"q_proj": 5}), "its configuration sets alpha_pattern"),
    (lambda folder: configured(folder, r="x"), "its r, lora_alpha and target_modules are 'x'"),
    (lambda folder: configured(folder, init_lora_weights="pissa"), "its configuration sets init_lora_weights"),
    (lambda folder: with_tensor(folder, "lm_head.lora_A.weight"), r"changes the output head .*lm_head\.lora_A"),
    (lambda folder: with_tensor(folder, "model.embed_tokens.lora_embedding_A"), r"or the embeddings .*embed_tokens"),
]


def test_peft_reads_nothing_but_a_plain_lora_in_safetensors(pipeline_folder: Path, tmp_path: Path) -> None:
    both(pipeline_folder).save(tmp_path / "saved")
    adapters = load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters
    for number, (change, said) in enumerate(NO_PLAIN_LORA):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / str(number))
        change(folder / "ar")
        with pytest.raises(UserError, match=said):
            adapters.load(folder, ["ar"])


def test_a_trained_adapter_is_the_same_however_it_began(pipeline_folder: Path, tmp_path: Path) -> None:
    adapters = both(pipeline_folder)
    draw_weights(adapters)
    adapters.save(tmp_path)
    expected = {name: value for name, value in effects(adapters).items() if name.startswith("ar/")}
    loaded = load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters
    for start in (False, "gaussian", "orthogonal", "mica", "eva"):
        configured(tmp_path / "ar", init_lora_weights=start, eva_config={"rho": 1.0} if start == "eva" else None)
        loaded.load(tmp_path, ["ar"])
        found = effects(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), start


def with_tensor(folder: Path, name: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.ones(1)}, file)


def configured(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_base_model_that_an_adapter_names_is_not_looked_up(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda name, *_: asked.append(name))
    adapters = both(pipeline_folder)
    adapters.save(tmp_path)
    configured(tmp_path / "ar", base_model_name_or_path="attacker/repository")
    file = tmp_path / "dit/pytorch_lora_weights.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    stated = json.loads(metadata["lora_adapter_metadata"])
    assert stated.keys() == {"r", "lora_alpha", "target_modules"}, "what every version of peft reads"
    stated = LoraConfig().to_dict() | stated | {"base_model_name_or_path": "attacker/repository"}
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": json.dumps(stated)})
    loaded = load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters
    loaded.load(tmp_path, ["ar", "dit"])
    loaded.state()
    assert asked == []
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": json.dumps(stated | {"use_dora": True})})
    with pytest.raises(UserError, match="its configuration sets use_dora"):
        load_model(str(pipeline_folder), size=SIZE, device="cpu").adapters.load(tmp_path, ["dit"])


def test_training_can_start_from_saved_adapters(pipeline_folder: Path, tmp_path: Path) -> None:
    adapters = both(pipeline_folder)
    draw_weights(adapters)
    adapters.save(tmp_path)
    started = both(pipeline_folder, seed=5)
    started.start_from(tmp_path)
    state = adapters.state()
    assert all(torch.equal(value, state[name]) for name, value in started.state().items())
    assert all(parameter.requires_grad for module in ("ar", "dit") for parameter in started[module].parameters())
    started.save(tmp_path / "again")
    for file in tmp_path.glob("*/*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize(
    ("module", "network"), [("ar", "network"), pytest.param("dit", "transformer", marks=pytest.mark.slow)]
)
def test_a_training_moves_the_adapter_and_nothing_else(pipeline_folder: Path, module: str, network: str) -> None:
    policy: Any = load_policy(str(pipeline_folder), module=module, size=SIZE, kl_reference=True, device="cpu")
    base = {
        name: value.clone()
        for name, value in getattr(policy.model, network).state_dict().items()
        if "lora_" not in name
    }
    adapter = policy.adapter_state_dict()
    config = GRPOConfig(
        steps=2, prompts_per_step=3, group_size=4, learning_rate=1e-2, kl_weight=0.01, updates_per_rollout=2
    )
    records = [PromptRecord(id=str(i), prompt=text) for i, text in enumerate(["a red circle", "a square", "一只猫"])]
    metrics = list(GRPOTrainer(policy, RewardSet({"brightness": (brightness, 1.0)}), config).fit(records))
    assert metrics[0].values["ratio/first_max_abs_log"] < 1e-4
    assert metrics[1].values["kl"] > 0
    moved = policy.adapter_state_dict()
    assert not [name for name in adapter if torch.equal(adapter[name], moved[name])]
    after = getattr(policy.model, network).state_dict()
    assert all(torch.equal(after[name], value) for name, value in base.items())


@pytest.fixture(params=["ar", "dit"])
def network(request: pytest.FixtureRequest, pipeline_folder: Path) -> Any:
    policy: Any = load_policy(str(pipeline_folder), module=request.param, size=SIZE, device="cpu")
    stir(policy)
    return policy.model.network if request.param == "ar" else policy.model.transformer


def outputs(network: Any) -> list[torch.Tensor]:
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    generator = torch.Generator().manual_seed(1)
    return [layer(torch.randn(2, 5, layer.in_features, generator=generator)) for layer in layers]


def test_fast_lora_computes_what_the_layers_do_and_leaves_nothing_behind(network: Any) -> None:
    before = outputs(network)
    with fast_lora(network), torch.no_grad():
        during = outputs(network)
    for mixed, apart in zip(during, before, strict=True):
        torch.testing.assert_close(mixed, apart.detach(), rtol=1e-5, atol=1e-4)
    after = outputs(network)
    assert all(value.requires_grad and torch.equal(value, old) for value, old in zip(after, before, strict=True))


def test_fast_lora_leaves_an_adapter_off(network: Any) -> None:
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    with_adapter = [value.detach() for value in outputs(network)]
    for layer in layers:
        layer.enable_adapters(False)
    plain = outputs(network)
    with fast_lora(network), torch.no_grad():
        during = outputs(network)
    for value, expected, other in zip(during, plain, with_adapter, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
        assert not torch.allclose(value, other, rtol=1e-3, atol=1e-3)


def test_in_half_precision_an_adapter_that_is_off_adds_nothing(network: Any) -> None:
    """The reference of the KL penalty is computed so."""
    network.to(torch.bfloat16)
    compute_in_base_precision(network)
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    inputs = [torch.ones(1, 2, layer.in_features, dtype=torch.bfloat16) for layer in layers]
    for layer, given in zip(layers, inputs, strict=True):
        plain = layer.get_base_layer()(given)
        assert not torch.equal(layer(given), plain)
        layer.enable_adapters(False)
        assert torch.equal(layer(given), plain)


def test_an_error_within_fast_lora_leaves_the_layers(network: Any) -> None:
    before = outputs(network)
    with pytest.raises(ValueError, match="in between"), fast_lora(network):
        raise ValueError("in between")
    assert all(torch.equal(value, old) for value, old in zip(outputs(network), before, strict=True))
