"""Makes a plan: does a training fit on a card, how long does it take, and what would help. Its seconds are estimated.

The constants of the estimate come from steps that were measured on one H200 (docs/experiments/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import Parameters
from visual_grpo.models.offload import pinned_bytes
from visual_grpo.models.quantized import quantized_layers
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.plan.dry_run import DryRunner, PlannedModel, planned_model
from visual_grpo.operations.plan.meter import Meter, Phase

LAUNCH_SECONDS = 33e-6
"""Time of the host to launch a kernel, with the Python code of the layers."""
CAPTURED_LAUNCH_SECONDS = 5.2e-6
"""Time to launch a kernel of a CUDA graph."""
FLOPS_SHARE = 0.69
"""Share of the dense rate that matrix products reach."""
BANDWIDTH_SHARE = 0.5
"""Share of the bandwidth that the other kernels reach; a copy reaches 0.9."""
HOST_BANDWIDTH = 25e9
"""Bytes a second from pinned host memory, PCIe 4.0; assumed. PCIe 5.0 gave 55e9."""
_SPARE = 0.05
"""Share of the memory left to the CUDA context, workspaces and fragmentation."""


class Card(NamedTuple):
    """GiB that torch has in all (1 to 4 % less than nvidia-smi shows), bytes a second of its memory, dense FLOP/s in
    bfloat16 or float16, and in float32."""

    name: str
    memory: float
    bandwidth: float
    half: float
    single: float

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return round(self.memory * 2**30 * (1 - _SPARE))


CARDS = (
    Card("L4", 22.03, 0.3e12, 121e12, 30.3e12),
    Card("A10", 22.06, 0.6e12, 125e12, 31.2e12),
    Card("A10G", 22.06, 0.6e12, 70e12, 35e12),
    Card("RTX 4090", 23.52, 1.008e12, 165.2e12, 82.6e12),
    Card("L40S", 44.39, 0.864e12, 362e12, 91.6e12),
    Card("RTX A6000", 47.40, 0.768e12, 154.8e12, 38.7e12),
    Card("H100", 79.10, 3.35e12, 989e12, 67e12),
    Card("A100 80GB", 79.14, 2.039e12, 312e12, 19.5e12),
    Card("H200", 139.8, 4.8e12, 989e12, 67e12),
)
"""Cards, sorted by memory."""


def find_card(name: str) -> Card:
    """Ignores case. Raises UserError with the known names."""
    if found := [card for card in CARDS if card.name.lower() == name.lower()]:
        return found[0]
    known = ", ".join(f"{card.name} ({card.memory:.0f} GiB)" for card in CARDS)
    hint = nearest_hint(name, [card.name for card in CARDS])
    raise UserError(f"plan.gpu is {name!r}, which is not a known card.{hint} Known: {known}")


def smallest_card(peak: int) -> Card:
    """Returns the smallest that holds ``peak`` bytes; the largest where none does."""
    return next((card for card in CARDS if peak <= card.usable), CARDS[-1])


def phase_seconds(phase: Phase, card: Card, dtype: str) -> float:
    """Takes the longer of the GPU's work, one kernel after the other, and of launching it."""
    dense = card.single if dtype == "float32" else card.half
    work = phase.flops / (FLOPS_SHARE * dense) + phase.moved / (BANDWIDTH_SHARE * card.bandwidth)
    one_by_one = phase.kernels - phase.captured
    return max(work, one_by_one * LAUNCH_SECONDS + phase.captured * CAPTURED_LAUNCH_SECONDS)


def make_plan(parameters: Parameters) -> dict[str, Any]:
    """Returns the plan as JSON. Raises UserError for an unknown card or model, and for more cards than groups."""
    card = find_card(parameters.plan.gpu) if parameters.plan.gpu else None
    config, dtype = _of_one_card(parameters), parameters.model.dtype
    planned = planned_model(config)
    runner, samplers, peaks = DryRunner(planned), planned.spec.samplers, {}
    with console.progress("Planning", 1 + len(samplers), console=Console(stderr=True)) as bar:
        step = runner.step()
        for name, sampler in samplers.items():
            bar.advance(1, part=f"the evaluation, {name}")
            peaks[name] = runner.evaluation(sampler, config.evaluation.batch_size).peak
        bar.complete()
    peak = max(step.peak, *peaks.values())
    card = card or smallest_card(peak)
    batches = largest_batches(planned.spec, step, card.usable)
    phases = {name: phase_seconds(phase, card, dtype) for name, phase in step.phases.items()}
    seconds = sum(phases.values()) + step.copied_from_host / HOST_BANDWIDTH
    return {
        "model": config.model.path,
        "sizes_from": planned.source,
        "card": {**card._asdict(), "usable_gb": card.usable / 1e9, "count": config.distributed.processes},
        "fits": peak <= card.usable,
        "peak_gb": peak / 1e9,
        "changes": changes(planned.spec, card, peak, step.peak, batches, len(planned.networks)),
        "estimated": {"step_seconds": seconds, "hours": seconds * config.grpo.steps / 3600},
        "largest_batches": batches,
        "host_gb": config.distributed.processes * host_bytes(planned, dtype) / 1e9,
        "parameters": {name: parameters_in(network) for name, network in runner.networks.items()},
        "trained_parameters": sum(p.numel() for own in runner.trainer.modules.values() for p in own.parameters),
        "weights_gb": runner.weights / 1e9,
        "copied_from_host_gb": step.copied_from_host / 1e9,
        "step": [
            {"phase": name, "peak_gb": step.phases[name].peak / 1e9, "seconds": seconds}
            for name, seconds in phases.items()
        ],
        "evaluation_peak_gb": {name: peak / 1e9 for name, peak in peaks.items()},
    }


def _of_one_card(config: Parameters) -> Parameters:
    """Gives one card its share of a step's prompts."""
    count = config.distributed.processes

    def shared(section: Any) -> Any:
        prompts = section.prompts_per_step or count
        if count > prompts:
            raise UserError(
                f"distributed.processes is {count}, but a step has {prompts} prompts, and a card takes whole groups."
                f" Expected at most {prompts}."
            )
        return section.model_copy(update={"prompts_per_step": section.prompts_per_step and -(-prompts // count)})

    modules = {name: shared(own) for name, own in config.modules.items()}
    return config.model_copy(update={"grpo": shared(config.grpo), "modules": modules})


def largest_batches(plan: RunSpec, step: Meter, usable: int) -> dict[str, dict[str, int]]:
    """Returns the set and the largest value of each parameter that says how many rows are computed at a time.

    What a phase holds besides the bytes that it leaves behind is taken to grow with these rows.
    """
    policy, rows = plan.config.policy, 0
    computed: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for module in plan.modules:
        grpo = plan.config.grpo_of(module)
        # A joint rollout decodes each sample of the module before several times.
        own = (rows if plan.joint and rows else grpo.prompts_per_step) * grpo.group_size
        name = f"modules.{module}" if len(plan.modules) > 1 else "grpo"
        computed[f"{name}.micro_batch_size"] = (grpo.micro_batch_size or own, own, (f"{module}: replay and gradient",))
        rows = max(rows, own)
    computed |= {
        "policy.rollout_batch": (policy.rollout_batch, rows, ("tokens", "reference of tokens")),
        "policy.denoise_batch": (policy.denoise_batch, rows, ("denoising", "reference of denoising")),
        "policy.decode_batch": (policy.decode_batch, rows, ("pictures (VAE)",)),
    }
    found = {}
    for name, (value, most, phases) in computed.items():
        counted = [step.phases[phase] for phase in phases if phase in step.phases]
        if counted:
            room = min((usable - phase.rest) / max(phase.peak - phase.rest, 1) for phase in counted)
            found[name] = {"set": value, "largest": max(0, min(most, int(min(value, most) * room)))}
    return found


def changes(plan: RunSpec, card: Card, peak: int, step: int, batches: Mapping[str, Any], networks: int) -> list[str]:
    """Returns parameters with values that would help; none where ``peak`` bytes fit."""
    if peak <= card.usable:
        return []
    config = plan.config
    size, sharded = config.evaluation.batch_size, config.distributed.sharded
    if step <= card.usable and size > 1:
        return [f"evaluation.batch_size={size // 2} (set: {size}; a step fits, the evaluation does not)"]
    found = [
        f"{name}={batch['largest']} (set: {batch['set']})"
        for name, batch in batches.items()
        if 0 < batch["largest"] < batch["set"]
    ]
    if not config.policy.gradient_checkpointing:
        found.append("policy.gradient_checkpointing=true")
    if networks > 1 and config.model.offload == "none" and not sharded:
        found.append("model.offload=phases (one network on the card at a time)")
    fewer = {"full": "8bit", "8bit": "4bit"}.get(config.model.base_weights)
    if fewer and not sharded:
        found.append(f"model.base_weights={fewer} (a different base model)")
    larger = smallest_card(peak)
    return [*found, f"plan.gpu={larger.name}"] if peak <= larger.usable else found


def host_bytes(planned: PlannedModel, dtype: str) -> int:
    """Returns the bytes of one process, while it loads the weights or keeps offloaded networks' weights."""
    networks, size = planned.networks.values(), getattr(torch, dtype).itemsize
    return max(size * sum(map(parameters_in, networks)), pinned_bytes(*networks))


def parameters_in(network: nn.Module) -> int:
    full = sum(parameter.numel() for parameter in network.parameters() if not parameter.requires_grad)
    return full + sum(layer.in_features * layer.out_features for layer in quantized_layers(network))


def answer(plan: Mapping[str, Any]) -> list[str]:
    """The plan in at most three lines."""
    card, run = plan["card"], plan["estimated"]
    on = f"{card['count']} x {card['name']}: at most {plan['peak_gb']:.1f} GB of {card['usable_gb']:.1f} GB a card"
    if not plan["fits"]:
        return [f"{plan['model']} does not fit on {on}.", f"What would help: {'; '.join(plan['changes'])}"]
    batches = (f"{name} {batch['largest']} (set: {batch['set']})" for name, batch in plan["largest_batches"].items())
    total = f"{run['hours']:.1f} h" if run["hours"] >= 1 else f"{60 * run['hours']:.1f} min"
    return [
        f"{plan['model']} fits on {on}; the host needs {plan['host_gb']:.1f} GB.",
        f"Estimated: {run['step_seconds']:.0f} s a step, {total} for all steps.",
        f"Largest batches, one changed at a time: {', '.join(batches)}.",
    ]
