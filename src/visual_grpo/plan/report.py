"""Makes a plan from parameters and prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from torch import nn

from visual_grpo import console
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.hardware.quantised import quantised_layers
from visual_grpo.hardware.turns import pinned_bytes
from visual_grpo.plan.batches import batches_of, largest
from visual_grpo.plan.dry_run import DryRunner
from visual_grpo.plan.estimate import Card, find_card, phase_seconds, run_seconds, seconds_of, smallest_card
from visual_grpo.plan.meter import OUTSIDE, Meter
from visual_grpo.plan.model import PlannedModel, planned_model


def make_plan(parameters: Parameters) -> dict[str, Any]:
    """Returns the plan as JSON. Raises UserError for an unknown card or model, and for more cards than groups."""
    settings, dtype = parameters.plan, parameters.model.dtype
    card = find_card(settings.gpu) if settings.gpu else None
    config = _of_one_card(parameters)
    planned = planned_model(config)
    runner = DryRunner(config, planned)
    samplers = planned.plan.samplers
    with console.progress("Planning", 2 + len(samplers), console=Console(stderr=True)) as bar:
        bar.advance(0, part="a step")
        step, evaluation = runner.step(), {}
        for name, sampler in samplers.items():
            bar.advance(1, part=f"the evaluation, {name}")
            evaluation[name] = runner.evaluation(sampler, config.evaluation.batch_size)
        bar.advance(1, part="the largest batches")
        peak = max(meter.peak for meter in (step, *evaluation.values()))
        card = card or smallest_card(peak)
        batches = {
            batch.parameter: {"set": batch.value, "largest": largest(batch, card.usable)}
            for batch in (batches_of(runner) if settings.largest_batches else ())
        }
        bar.complete()
    seconds = seconds_of(step, card, dtype)
    parts = run_seconds(
        parameters, planned.plan, seconds, {name: seconds_of(meter, card, dtype) for name, meter in evaluation.items()}
    )
    hours, cards = sum(parts.values()) / 3600, config.distributed.processes
    price = settings.price_per_hour
    return {
        "model": config.model.path or config.starter.model,
        "sizes_from": planned.source,
        "card": {**asdict(card), "usable_gb": card.usable / 1e9, "count": cards},
        "fits": peak <= card.usable,
        "peak_gb": peak / 1e9,
        "changes": _changes(config, card, runner.weights, peak, step.peak, batches, len(planned.networks)),
        "estimated": {
            "validated": False,
            "step_seconds": seconds,
            "seconds": parts,
            "hours": hours,
            "cost": None if price is None else price * hours * cards,
        },
        "largest_batches": batches,
        "host_gb": cards * _host_bytes(planned, dtype) / 1e9,
        "parameters": {name: _parameters(network) for name, network in runner.networks.items()},
        "trained_parameters": sum(p.numel() for own in runner.trainer.modules.values() for p in own.parameters),
        "weights_gb": runner.weights / 1e9,
        "copied_from_host_gb": step.brought / 1e9,
        "step": _phases(step, card, dtype),
        "evaluation": {name: _phases(meter, card, dtype) for name, meter in evaluation.items()},
        "host_waits": dict(step.waits.most_common()),
    }


def _of_one_card(config: Parameters) -> Parameters:
    """The largest share of a step's prompts that one card takes, whole groups. A static cache is counted as a growing
    one, which is as large in the end."""
    count = config.distributed.processes

    def share(prompts: int) -> int:
        if count > prompts:
            raise UserError(
                f"distributed.processes is {count}, but a step has {prompts} prompts, and a card takes whole groups."
                f" Expected at most {prompts}."
            )
        return -(-prompts // count)

    modules = {
        name: own.model_copy(update={"prompts_per_step": share(own.prompts_per_step)}) if own.prompts_per_step else own
        for name, own in config.modules.items()
    }
    grpo = config.grpo.model_copy(update={"prompts_per_step": share(config.grpo.prompts_per_step)})
    policy = config.policy.model_copy(update={"kv_cache": "growing"})
    return config.model_copy(update={"grpo": grpo, "modules": modules, "policy": policy})


def _changes(
    config: Parameters, card: Card, weights: int, peak: int, step: int, batches: Mapping[str, Any], networks: int
) -> list[str]:
    """Parameters with values that would help; none where ``peak`` bytes fit."""
    if peak <= card.usable:
        return []
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
        found.append(f"model.base_weights={fewer} (another base model)")
    if not found or weights <= card.usable:
        height, width = (32 * max(side // 64, 1) for side in (config.data.height, config.data.width))
        found.append(f"data.height={height},data.width={width}")
    larger = smallest_card(peak)
    if peak <= larger.usable:
        found.append(f"plan.gpu={larger.name}")
    return found


def _host_bytes(planned: PlannedModel, dtype: str) -> int:
    """Of one process, while it loads the weights or keeps those of offloaded networks."""
    networks, size = planned.networks.values(), getattr(torch, dtype).itemsize
    return max(size * sum(map(_parameters, networks)), pinned_bytes(*networks))


def _parameters(network: nn.Module) -> int:
    full = sum(parameter.numel() for parameter in network.parameters() if not parameter.requires_grad)
    return full + sum(layer.elements for layer in quantised_layers(network))


def _phases(meter: Meter, card: Card, dtype: str) -> list[dict[str, Any]]:
    return [
        {
            "phase": name,
            "peak_gb": phase.peak / 1e9,
            "tflop": phase.flops / 1e12,
            "kernels": round(phase.work.total()),
            "host_waits": round(phase.waits),
            "seconds": phase_seconds(phase, card, dtype),
        }
        for name, phase in meter.phases.items()
        if phase.work or name != OUTSIDE
    ]


def answer(plan: Mapping[str, Any]) -> list[str]:
    """The plan in at most five lines."""
    card, run = plan["card"], plan["estimated"]
    on = f"{card['count']} x {card['name']}: at most {plan['peak_gb']:.1f} GB of {card['usable_gb']:.1f} GB a card"
    if not plan["fits"]:
        return [f"{plan['model']} does not fit on {on}.", f"What would help: {'; '.join(plan['changes'])}"]
    cost = "" if run["cost"] is None else f", cost {run['cost']:.0f} (plan.price_per_hour)"
    lines = [
        f"{plan['model']} fits on {on}; the host needs {plan['host_gb']:.1f} GB.",
        f"Estimated, confirmed by no GPU: {run['step_seconds']:.0f} s a step, {run['hours']:.1f} h in all{cost}.",
    ]
    if plan["largest_batches"]:
        found = (f"{name} {batch['largest']} (set: {batch['set']})" for name, batch in plan["largest_batches"].items())
        lines.append(f"Largest batches, one changed at a time: {', '.join(found)}.")
    return lines


def show_tables(plan: Mapping[str, Any]) -> None:
    parameters = {name: f"{count / 1e6:,.1f} million" for name, count in plan["parameters"].items()}
    console.summary(
        "Parameters",
        {
            **parameters,
            "trained (LoRA)": f"{plan['trained_parameters'] / 1e6:.1f} million",
            "weights": f"{plan['weights_gb']:.3g} GB",
            "copied from the host in a step": f"{plan['copied_from_host_gb']:.3g} GB",
            "sizes from": plan["sizes_from"],
        },
    )
    _table("One step", plan["step"])
    for name, phases in plan["evaluation"].items():
        _table(f"One batch of the evaluation, sampler {name}", phases)
    console.summary(
        "Estimated hours", {name: f"{part / 3600:.2f}" for name, part in plan["estimated"]["seconds"].items()}
    )
    waits = list(plan["host_waits"].items())[:6]
    console.table("Where the host waits for the device most", ["source line", "times a step"], waits)


def _table(title: str, phases: Sequence[Mapping[str, Any]]) -> None:
    columns = ["phase", "peak GB", "TFLOP", "kernels", "host waits", "seconds (estimated)"]
    console.table(title, columns, [list(phase.values()) for phase in phases])
