"""Compiled blocks compute what the plain ones do, and all their graphs are made in the first step.

By the backend aot_eager, which runs a graph by torch's own kernels and needs no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.models.families.test_flow_families import CASES as FLOW_CASES
from tests.models.families.test_flow_families import CPU, FRAMES, SIZE
from tests.models.token_policies import CapturedOnCpu
from tests.pretend import conftest
from tests.pretend.test_policies import CASES, case
from tests.pretend.trained import config_of, rewards_of
from tests.training.few_steps import resolved
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.config import LoraParams
from visual_grpo.models import execution
from visual_grpo.models.execution import compile_blocks
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import check_family
from visual_grpo.models.lora import PeftAdapter
from visual_grpo.models.lora_layers import fast_lora, is_compiled
from visual_grpo.models.offload import _STATE, _OffloadState, move_to_host
from visual_grpo.models.tokens import generation
from visual_grpo.training import components

for folder in {folder for folder, _ in CASES.values()} & set(vars(conftest)):
    globals()[folder] = getattr(conftest, folder)
globals()["case"] = case

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Of dynamo, which looks at a block's inputs.
    pytest.mark.usefixtures("small_sources"),
]
GRPO = {"steps": 3, "prompts_per_step": 3, "group_size": 2, "updates_per_rollout": 1, "micro_batch_size": 4}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Counts those compiled since it was asked before."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def count() -> int:
        found: int = counters["stats"]["unique_graphs"]
        counters.clear()
        return found

    yield count
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLOW_CASES if "," not in name])
def test_a_family_draws_and_replays_as_without(name: str, tmp_path: Path, graphs: Any) -> None:
    build, options = FLOW_CASES[name]
    build().save_pretrained(tmp_path)
    family, config = find_family("auto", str(tmp_path)), CPU.model_copy(update={"compile": True})
    findings = check_family(family, str(tmp_path), config, SIZE, family.options(**options), 4.0, FRAMES.get(name))
    assert [finding for finding in findings if not finding.passed] == []
    assert graphs() > 1


def trained(
    folder: Path, records: Any, changes: Mapping[str, Any], graphs: Any, place: Path, *, compiled: bool
) -> tuple[list[int], list[dict[str, float]], dict[str, torch.Tensor]]:
    """Graphs and metrics of each step, and the adapters.

    Weights come and go as with offloading, and adapters are loaded, as by a resumed training, after every step.
    """
    model = {**changes.get("model", {}), "compile": compiled}
    config = config_of(place, "cpu", **{**changes, "model": model, "grpo": GRPO})
    spec = resolved(config, folder)
    built = components.build_model(spec)
    trainer = components.build_trainer(spec, built, rewards_of(config))
    networks: list[Any] = [built.adapters.networks[module] for module in spec.modules]
    resident: list[_OffloadState] = []
    for network in networks:
        vars(network)[_STATE] = state = _OffloadState(network, torch.device("cpu"), resident)
        state.places = [place for place in state.places if not place[2].requires_grad]  # A LoRA stays on the device.
    counts, values = [], []
    for step in trainer.fit(records):
        counts.append(graphs())
        values.append(dict(step.values))
        built.adapters.load_state(built.adapters.state())
        move_to_host(*networks)
    assert all(is_compiled(network) for network in networks) == compiled
    return counts, values, built.adapters.state()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_training_compiles_in_its_first_step_only(
    name: str, case: Any, tmp_path: Path, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens with the cache that a GPU has."""
    monkeypatch.setattr(generation, "TokenSteps", CapturedOnCpu)
    folder, changes, records = case(name)
    counts, values, state = trained(folder, records, changes, graphs, tmp_path, compiled=True)
    assert counts[0] > 1
    assert counts[1:] == [0, 0]
    none, expected, plain = trained(folder, records, changes, graphs, tmp_path, compiled=False)
    assert none == [0, 0, 0]
    seconds, plain_seconds = ([f"{step['seconds/cpu']:.1f}" for step in steps] for steps in (values, expected))
    console.note(f"{name}: graphs compiled in each step: {counts}; CPU seconds: {seconds}, without: {plain_seconds}")
    same = [name for name in expected[0] if name.endswith(("reward/total", "grad_norm"))]
    assert {name: values[0][name] for name in same} == pytest.approx({name: expected[0][name] for name in same}, 1e-5)
    assert max(value for step in values for name, value in step.items() if "first_max_abs_log" in name) < 1e-4
    # In whole, since AdamW takes a step of full size by the sign of a gradient that is nothing but rounding.
    learned, plainly = (
        torch.cat([each[name].flatten() for name in plain if "lora_B" in name]) for each in (state, plain)
    )
    assert float((learned - plainly).norm()) < 0.1 * float(plainly.norm())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.to_out(self.to_q(x).tanh())


class Network(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def adapted(dtype: torch.dtype) -> tuple[Any, PeftAdapter]:
    network = Network(dtype)
    adapter = PeftAdapter.attach(network, LoraParams(rank=2, alpha=4), ["to_q"], 0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.3)
    return network, adapter


def outputs(network: Any, adapter: PeftAdapter, rows: int) -> list[torch.Tensor]:
    """Sampled, of the reference, and replayed, with the gradients of the adapter."""
    x = torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(rows)).to(network.blocks[0].to_q.weight.dtype)
    with torch.no_grad():
        with fast_lora(network):
            sampled = network(x)
        with adapter.disabled():
            reference = network(x)
    replayed = network(x)
    gradients = torch.autograd.grad(replayed.float().square().sum(), adapter.parameters())
    return [sampled, reference, replayed.detach(), *gradients]


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 0.05, marks=pytest.mark.slow)]
)
def test_blocks_with_an_adapter_are_compiled_once_for_every_batch(dtype: torch.dtype, near: float, graphs: Any) -> None:
    network, adapter = adapted(dtype)
    expected = {rows: outputs(network, adapter, rows) for rows in (4, 6, 3)}
    compile_blocks(network)
    counts = []
    for rows, wanted in expected.items():
        for found, want in zip(outputs(network, adapter, rows), wanted, strict=True):
            assert float((found - want).abs().max() / want.abs().max()) < near
        counts.append(graphs())
    assert counts[0] in (4, 5), "sampled, reference, replayed in the first block and in the others"
    assert counts[1:] == [0, 0]
    assert is_compiled(network)


@pytest.mark.parametrize("fault", ["backend", "limit"])
def test_blocks_that_cannot_be_compiled_all_go_on_as_they_are_after_one_line(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], graphs: Any
) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    network, adapter = adapted(torch.float32)
    expected = outputs(network, adapter, 4)
    if fault == "backend":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    else:
        monkeypatch.setattr(execution, "VARIANTS", 1)
    compile_blocks(network)
    for _ in range(2):
        for found, want in zip(outputs(network, adapter, 4), expected, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Warning: Block cannot be compiled here, so model.compile has no effect: ")
    assert ("no compiler here" in line) == (fault == "backend")
    assert not is_compiled(network)


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"but Linear names no repeated blocks .* Leave model\.compile out"):
        compile_blocks(nn.Linear(2, 2))
