"""A step of every policy on a pretend GPU: no mix of devices, nothing copied token by token, the CPU's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.models.token_policies import CapturedOnCpu
from tests.pretend.accelerator import Accelerator, DeviceMixError
from tests.pretend.trained import TOKENS, assert_equal, config_of, records_of, train
from tests.replacing import replaced
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.tokens import generation
from visual_grpo.models.tokens.generation import EOS_CHECK_INTERVAL

FLOW: Mapping[str, Any] = {"kinds": ["flow"]}
SD3: Mapping[str, Any] = {**FLOW, "model": {"options": {"max_sequence_length": 32}}}
EDITS: Mapping[str, Any] = {**FLOW, "data": {"task": "i2i"}}
VL: Mapping[str, Any] = {
    "kinds": ["tokens"],
    "data": {"task": "segmentation"},
    "model": {"options": {"max_tokens": TOKENS}},
}
NFT: Mapping[str, Any] = {
    "policy": {"flow": {"window_steps": 2}},
    "grpo": {"loss": "nft", "average_decay": 0, "target_kl": 1e-5},
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ar": ("pipeline_folder", {"policy": {"train": "ar"}}),
    "dit": ("pipeline_folder", {"policy": {"train": "dit"}}),
    "alternating": ("pipeline_folder", {}),
    "joint": ("pipeline_folder", {"policy": {"stages": "joint"}}),
    "checkpointed": ("pipeline_folder", {"policy": {"stages": "joint", "gradient_checkpointing": True}}),
    "sd3": ("sd3_folder", SD3),
    "nft": ("sd3_folder", {**SD3, **NFT}),
    "qwen_image": ("qwen_image_folder", FLOW),
    "flux": ("flux_folder", FLOW),
    "flux2_klein": ("flux2_klein_folder", FLOW),
    "z_image": ("z_image_folder", FLOW),
    "wan": ("wan_folder", {**FLOW, "data": {"height": 32, "width": 32, "frames": 5}}),
    "ltx": ("ltx_folder", {**FLOW, "data": {"height": 32, "width": 32, "frames": 9}}),
    "wan_i2v": ("wan_i2v_folder", {**FLOW, "data": {"task": "i2i", "height": 32, "width": 32, "frames": 5}}),
    "flux_kontext": ("flux_kontext_folder", EDITS),
    "qwen_image_edit": ("qwen_image_edit_folder", EDITS),
    "qwen_image_edit_plus": ("qwen_image_edit_plus_folder", EDITS),
    "qwen2_5_vl": ("vl_folder", VL),
    "qwen3_vl": ("qwen3_vl_folder", VL),
}
QUICK = ("joint", "qwen2_5_vl")
"""What these run covers most of the others, but for the settings of nft and the sources of edits."""

pytestmark = pytest.mark.usefixtures("small_sources")


@pytest.fixture
def case(
    request: pytest.FixtureRequest, source_images: list[Path]
) -> Callable[[str], tuple[Path, Mapping[str, Any], list[PromptRecord]]]:
    def find(name: str) -> tuple[Path, Mapping[str, Any], list[PromptRecord]]:
        folder, changes = CASES[name]
        has_sources = "task" in changes.get("data", {})
        return request.getfixturevalue(folder), changes, records_of(source_images if has_sources else ())

    return find


@contextmanager
def transfers_between_tokens(gpu: Accelerator) -> Iterator[list[tuple[int, int]]]:
    """(number of the token, transfers since the one before), for each generated token but the first of a batch."""
    seen: list[tuple[int, int]] = []
    state = {"number": 0, "before": 0}

    def prefilled(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            state["number"] = 0
            return real(*args)

        return run

    def counted(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            state["number"] += 1
            if state["number"] > 1:  # The first is preceded by the prompts.
                seen.append((state["number"], gpu.count() - state["before"]))
            state["before"] = gpu.count()
            return real(*args)

        return run

    with replaced(generation, "prefill", prefilled), replaced(generation, "sample_ids", counted):
        yield seen


@contextmanager
def waits_while_denoising(gpu: Accelerator) -> Iterator[list[Counter[tuple[str, str]]]]:
    """What the host waited for in each batch of denoising steps."""
    seen: list[Counter[tuple[str, str]]] = []

    def watched(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def batched(denoiser: Any, state: Tensor, entries: Tensor, run: Callable[..., Tensor]) -> Tensor:
            def counted(*part: Tensor) -> Tensor:
                before = gpu.transfers.copy()
                result = run(*part)
                waits = gpu.transfers - before
                seen.append(Counter({each: n for each, n in waits.items() if each[0] == "device to host"}))
                return result

            return real(denoiser, state, entries, counted)

        return batched

    with replaced(Denoiser, "_batched", watched):
        yield seen


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_a_policy_is_trained_on_a_gpu_as_on_the_cpu(case: Any, tmp_path: Path, name: str) -> None:
    folder, changes, records = case(name)
    with replaced(generation, "TokenSteps", lambda _: CapturedOnCpu):
        expected = train(config_of(tmp_path, "cpu", **changes), folder, records)
    with Accelerator() as gpu, transfers_between_tokens(gpu) as between, waits_while_denoising(gpu) as waits:
        found = train(config_of(tmp_path, "cuda:0", **changes), folder, records)
    assert_equal(expected, found)
    moved = [bool(value.any()) for adapter, value in found.adapters.items() if "lora_B" in adapter]
    assert sum(moved) > 0.8 * len(moved), "what nothing follows from is not moved: the last block's text"
    assert sum(waits, Counter()) == Counter()
    assert bool(waits) == ("flow" in changes.get("kinds", ["flow"]))
    assert bool(between) == ("tokens" in changes.get("kinds", ["tokens"]))
    assert changes is not VL or any(number > EOS_CHECK_INTERVAL for number, _ in between)
    looks = EOS_CHECK_INTERVAL if changes is VL else None
    for number, count in between:
        # Whether all rows have ended is asked for after every EOS_CHECK_INTERVAL-th token.
        assert count == (looks is not None and number % looks == 1), (number, gpu.transfers)


def test_a_copy_at_every_token_is_seen_and_a_tensor_left_on_the_host_is_refused(case: Any, tmp_path: Path) -> None:
    folder, changes, records = case("qwen2_5_vl")
    config = config_of(tmp_path, "cuda:0", **{**changes, "grpo": {"steps": 1, "updates_per_rollout": 1}})

    def copies(real: Any) -> Any:
        return lambda log_probs, uniforms: real(log_probs, uniforms.cpu().to(log_probs.device))

    def stays(real: Any) -> Any:
        return lambda log_probs, uniforms: real(log_probs, uniforms.cpu())

    with Accelerator() as gpu, transfers_between_tokens(gpu) as between, replaced(generation, "sample_ids", copies):
        train(config, folder, records)
    assert between
    assert all(count >= 2 for _, count in between)
    said = r"aten.mul got .* on cpu, .* on cuda:0, models/tokens/probabilities.py"
    with Accelerator(), replaced(generation, "sample_ids", stays), pytest.raises(DeviceMixError, match=said):
        train(config, folder, records)
