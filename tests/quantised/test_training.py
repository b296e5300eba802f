"""Adapters are trained on a base of few bits, which stays as it is; they fit every base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_adapters import effects
from tests.pretend.accelerator import Accelerator
from tests.pretend.test_policies import CASES
from tests.pretend.trained import assert_equal, networks_of, records_of, train
from tests.quantised.making import FAMILIES, assert_same, base_tensors, few_bits, loaded, trainer_of
from visual_grpo.models.quantized import quantized_layers

pytest.importorskip("bitsandbytes", reason="make quantised")
BITS = ("8bit", "4bit")


@pytest.fixture
def folder_of(request: pytest.FixtureRequest) -> Any:
    return lambda case: request.getfixturevalue(CASES[case][0])


def records(case: str, pictures: list[Path]) -> Any:
    return records_of(pictures if case == "qwen2_5_vl" else ())


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("bits", BITS)
def test_a_family_trains(folder_of: Any, tmp_path: Path, source_images: list[Path], case: str, bits: str) -> None:
    config = few_bits(tmp_path, case, bits)
    model = loaded(config, folder_of(case))
    networks = networks_of(model)
    before = base_tensors(networks)
    trainer = trainer_of(config, folder_of(case), model)
    fresh = {name: value.clone() for name, value in model.adapters.state().items()}
    steps = list(trainer.fit(records(case, source_images)))
    assert all(quantized_layers(network) for network in model.adapters.networks.values())
    # The sampler's three kernels and the replay round otherwise, in the last bits of float32.
    assert all(step.values["ratio/first_max_abs_log"] < 1e-4 for step in steps)
    trained = model.adapters.state()
    assert all(value.isfinite().all() for value in trained.values())
    moved = [name for name, value in trained.items() if not torch.equal(value, fresh[name])]
    assert len(moved) > 0.8 * len(trained), "all but what the last block of an MMDiT leaves unused"
    after = base_tensors(networks)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_ratio_is_exactly_one(sd3_folder: Path, tmp_path: Path, dtype: str) -> None:
    config = few_bits(tmp_path, "sd3", "4bit", model={"dtype": dtype}, grpo={"old_log_probs": "replay"})
    model = loaded(config, sd3_folder)
    assert {layer.weight.dtype for layer in quantized_layers(model.adapters.networks["dit"])} == {getattr(torch, dtype)}
    trainer = trainer_of(config, sd3_folder, model)
    assert [step.values["update_1/ratio"] for step in trainer.fit(records_of())] == [1.0, 1.0]


def test_bases_differ_and_the_reference_is_the_quantised_one(pipeline_folder: Path, tmp_path: Path) -> None:
    records, drawn = records_of(), {}
    for bits in ("full", *BITS):
        config = few_bits(tmp_path, "dit", bits)
        model = loaded(config, pipeline_folder)
        plain = model.generate(records, [1, 2, 3], config.sampling.eval)
        model.adapters.attach({"dit": config.lora_of("dit")}, 0)
        with torch.no_grad():
            for parameter in model.adapters["dit"].parameters():
                parameter.add_(0.02)
        assert not torch.equal(model.generate(records, [1, 2, 3], config.sampling.eval)[0], plain[0])
        if bits != "full":  # A full base is sampled with the adapter folded into it.
            with model.adapters["dit"].disabled():
                again = model.generate(records, [1, 2, 3], config.sampling.eval)
            assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
        drawn[bits] = torch.stack(list(plain)).float()
    apart = {bits: float((drawn[bits] - drawn["full"]).square().mean()) for bits in BITS}
    assert 0 < apart["8bit"] < apart["4bit"]


@pytest.mark.parametrize("case", ["dit", "ar", "qwen_image"])
def test_saved_adapters_load_on_every_base_and_by_the_libraries(folder_of: Any, tmp_path: Path, case: str) -> None:
    from diffusers import GlmImagePipeline
    from peft import PeftModel

    config = few_bits(tmp_path, case, "4bit")
    model = loaded(config, folder_of(case))
    next(iter(trainer_of(config, folder_of(case), model).fit(records_of())))
    model.adapters.save(tmp_path / "adapters")
    module = "ar" if case == "ar" else "dit"
    for bits in ("full", "8bit", "4bit"):
        other = loaded(few_bits(tmp_path, case, bits), folder_of(case))
        other.adapters.load(tmp_path / "adapters", [module])
        assert_same(effects(other.adapters), effects(model.adapters))
        other.generate(records_of(), [1, 2, 3], config.sampling.eval)
    if case == "qwen_image":
        return
    pipeline = GlmImagePipeline.from_pretrained(folder_of(case), use_safetensors=True)
    if case == "ar":
        PeftModel.from_pretrained(pipeline.vision_language_encoder, tmp_path / "adapters/ar")
    else:
        pipeline.transformer.load_lora_adapter(tmp_path / "adapters/dit", prefix=None, use_safetensors=True)
        assert len(pipeline.transformer.peft_config) == 1


@pytest.mark.parametrize("case", ["qwen_image", pytest.param("joint", marks=pytest.mark.slow)])
def test_networks_that_take_turns_train_the_same(folder_of: Any, tmp_path: Path, case: str) -> None:
    expected = train(few_bits(tmp_path, case, "4bit"), folder_of(case), records_of())
    with Accelerator() as gpu:
        offloaded = few_bits(tmp_path, case, "4bit", "cuda:0", model={"offload": "phases"})
        found = train(offloaded, folder_of(case), records_of())
        there = train(few_bits(tmp_path, case, "4bit", "cuda:0"), folder_of(case), records_of())
    assert gpu.pinned > 0
    assert_equal(expected, found)
    assert_equal(expected, there)
