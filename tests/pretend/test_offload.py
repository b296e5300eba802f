"""`model.offload`: networks that take turns on a pretend GPU train as those that are all there do, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.token_policies import CapturedOnCpu
from tests.pretend.accelerator import DEVICE, Accelerator, OnDevice
from tests.pretend.test_policies import CASES
from tests.pretend.trained import assert_equal, config_of, networks_of, records_of, score, train
from tests.replacing import replaced
from tests.training.few_steps import resolved
from visual_grpo.common.errors import UserError
from visual_grpo.models import offload
from visual_grpo.models.offload import device_tensors, enable_offload, move_to_host, on_device, pinned_bytes
from visual_grpo.models.tokens import generation
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

FAST = ["qwen_image"]
SLOW = ["ar", "dit", "alternating", "joint", "checkpointed", "sd3", "flux", "flux2_klein", "z_image", "wan_i2v", "ltx"]


def offloaded(folder: Path, changes: Any) -> Any:
    return config_of(folder, "cuda:0", **{**changes, "model": {**changes.get("model", {}), "offload": "phases"}})


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yields the number of networks on the device after each copy to it."""
    together: list[int] = []

    def counting(real: Callable[..., None]) -> Callable[..., None]:
        def to_device(self: Any) -> None:
            real(self)
            together.append(len(self._resident))

        return to_device

    with replaced(offload._OffloadState, "to_device", counting):
        yield together


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_networks_that_take_turns_train_the_same(
    request: pytest.FixtureRequest, tmp_path: Path, source_images: list[Path], name: str
) -> None:
    fixture, changes = CASES[name]
    if name in FAST:
        changes = {**changes, "grpo": {"updates_per_rollout": 1}}
    folder = request.getfixturevalue(fixture)
    records = records_of(source_images if "task" in changes.get("data", {}) else ())
    with replaced(generation, "TokenSteps", lambda _: CapturedOnCpu):
        expected = train(config_of(tmp_path, "cpu", **changes), folder, records)
    with Accelerator() as gpu, watched() as together:
        found = train(offloaded(tmp_path, changes), folder, records)
    assert_equal(expected, found)
    assert max(together) == 1
    assert gpu.pinned > 0


@pytest.mark.slow
def test_edits_are_drawn_as_if_all_were_there(pipeline_folder: Path, tmp_path: Path, source_images: list[Path]) -> None:
    changes = {**CASES["joint"][1], "data": {"task": "i2i"}}
    records = records_of(source_images)
    with replaced(generation, "TokenSteps", lambda _: CapturedOnCpu):
        expected = train(config_of(tmp_path, "cpu", **changes), pipeline_folder, records)
    with Accelerator(), watched() as together:
        found = train(offloaded(tmp_path, changes), pipeline_folder, records)
    assert_equal(expected, found)
    assert max(together) == 2, "where the first stage reads a source, the VAE encodes it meanwhile"


def small(**sizes: int) -> dict[str, nn.Sequential]:
    """Frozen networks of one layer, of which the second half shares its weight with the first."""
    made = {}
    for name, width in sizes.items():
        network = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        network[1].weight = network[0].weight
        network[0].register_buffer("counted", torch.arange(width))
        made[name] = network.requires_grad_(False)
    return made


def where(network: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*network.parameters(), *network.buffers())}


def test_one_network_is_there_at_a_time_and_those_that_are_needed_together() -> None:
    with Accelerator():
        networks = small(first=2, second=3, third=4)
        first, second, third = networks.values()
        enable_offload(networks, DEVICE)
        host = {torch.device("cpu")}
        assert where(first) == where(second) == host
        with on_device(first):
            assert first(torch.ones(1, 2, device=DEVICE)).device == DEVICE
            second(torch.ones(1, 3, device=DEVICE))
            assert where(first) == where(second) == {DEVICE}
        with pytest.raises(ZeroDivisionError), on_device(second):
            raise ZeroDivisionError
        third(torch.ones(1, 4, device=DEVICE))
        assert where(first) == where(second) == host, "nobody is needed after an error"
        assert where(third) == {DEVICE}
        move_to_host(third)
        assert where(third) == host


def test_a_weight_that_two_layers_share_is_copied_once_and_stays_the_same_on_the_host() -> None:
    with Accelerator() as gpu:
        networks = small(only=3)
        network: Any = networks["only"]
        values = network[0].weight.detach().clone()
        enable_offload(networks, DEVICE)
        host, before = network[0].weight, gpu.count()
        with on_device(network):
            assert network[0].weight is network[1].weight
            assert isinstance(network[0].weight, OnDevice)
            assert gpu.count() - before == len([*network.parameters(), *network.buffers()]) == 4
        move_to_host(network)
        assert network[0].weight is network[1].weight is host
        assert torch.equal(host, values)


def test_a_host_keeps_each_tensor_in_a_power_of_two_once() -> None:
    with Accelerator():
        networks = small(first=3, second=5)
        assert pinned_bytes(*networks.values()) == 0, "nobody takes turns yet"
        enable_offload(networks, DEVICE)
        # Of each: the weight that two layers share, two biases, and the buffer of int64.
        assert pinned_bytes(networks["first"]) == 64 + 16 + 16 + 32, "36 + 12 + 12 + 24 bytes"
        assert pinned_bytes(*networks.values()) == 128 + (128 + 32 + 32 + 64), "100 + 20 + 20 + 40 bytes more"


def test_what_is_trained_keeps_its_identity_and_its_place(sd3_folder: Path, tmp_path: Path) -> None:
    components.build_model(resolved(config_of(tmp_path, "cpu", **CASES["sd3"][1]), sd3_folder))  # Imports.
    few = {"steps": 2, "updates_per_rollout": 1, "prompts_per_step": 1, "kl_weight": 0.0}
    spec = resolved(offloaded(tmp_path, {**CASES["sd3"][1], "grpo": few}), sd3_folder)
    with Accelerator():
        model: Any = components.build_model(spec)
        scorer = RewardSet({"brightness": (score, 1.0)})
        trainer: Any = components.build_trainer(spec, model, scorer)
        before = [id(parameter) for parameter in trainer.parameters]
        next(iter(trainer.fit(records_of())))
        transformer = model.model.transformer
        move_to_host(*networks_of(model))
        trained = [p for p in transformer.parameters() if p.requires_grad]
        assert [id(parameter) for parameter in trained] == before
        assert {parameter.device for parameter in trained} == {DEVICE}
        assert {state["exp_avg"].device for state in trainer.optimizer.adamw.state.values()} == {DEVICE}
        assert {t.device for t in device_tensors(transformer)} == {DEVICE}
        assert sum(t.nbytes for t in device_tensors(transformer)) == sum(parameter.nbytes for parameter in trained)
        tensors, facts = trainer.state()
        resumed: Any = components.build_trainer(spec, components.build_model(spec), scorer)
        resumed.load_state({name: value.cpu().clone() for name, value in tensors.items()}, facts)
        expected, found = next(iter(trainer.fit(records_of()))), next(iter(resumed.fit(records_of())))
        assert expected.values["reward/total"] == found.values["reward/total"]
        after = zip(trainer.parameters, resumed.parameters, strict=True)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in after)


def test_saved_adapters_draw_as_if_all_were_there(sd3_folder: Path, tmp_path: Path) -> None:
    changes = CASES["sd3"][1]
    here = config_of(tmp_path, "cpu", **changes)
    trained: Any = components.build_model(resolved(here, sd3_folder))
    trained.adapters.attach({"dit": here.lora_of("dit")}, 0)
    with torch.no_grad():
        for parameter in trained.adapters["dit"].parameters():
            parameter.fill_(0.05)
    trained.adapters.save(tmp_path / "adapters")

    def drawn(config: Any) -> Any:
        model = components.build_model(resolved(config, sd3_folder))
        model.adapters.load(tmp_path / "adapters", ["dit"])
        return model.generate(records_of(), [1, 2, 3], config.sampling.eval)

    with Accelerator():
        all_there = drawn(config_of(tmp_path, "cuda:0", **changes))
        turns_taken = drawn(offloaded(tmp_path, changes))
    assert all(torch.equal(one, other) for one, other in zip(all_there, turns_taken, strict=True))


def test_a_model_of_one_network_is_refused_and_on_a_cpu_all_stays_where_it_computes(
    vl_folder: Path, sd3_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"model\.offload is phases, but qwen2_5_vl is one network"):
        resolved(offloaded(tmp_path, CASES["qwen2_5_vl"][1]), vl_folder)
    config = config_of(tmp_path, "cpu", **{**CASES["sd3"][1], "model": {"offload": "phases"}})
    model = components.build_model(resolved(config, sd3_folder))
    assert not any(hasattr(network, "_hf_hook") for network in networks_of(model))
