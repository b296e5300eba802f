"""A plan as data and as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from visual_grpo import console
from visual_grpo.config import Parameters
from visual_grpo.hardware.quantised import quantised_layers
from visual_grpo.hardware.turns import pinned_bytes
from visual_grpo.plan.advice import changes
from visual_grpo.plan.cards import CARDS, Card
from visual_grpo.plan.largest import LargestBatch
from visual_grpo.plan.meter import OUTSIDE, Meter
from visual_grpo.plan.models import PlannedModel
from visual_grpo.plan.run_time import RunTime, run_time
from visual_grpo.plan.time_model import (
    CALIBRATION,
    CALL_SECONDS,
    FLOPS_SHARE,
    HOST_BANDWIDTH,
    LAUNCH_SECONDS,
    seconds_of,
)

ESTIMATED = (
    "Memory, operations and host waits are counted from the code itself. Seconds, hours and cost are estimates,"
    " calibrated at the published times of one model on one H100; nobody has run this. The time of rewards"
    " is not in them, but that of a SAM 2 segmenter is."
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A batch of the stock sampler that is not full."""

    images: int
    meter: Meter


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What was counted, of whatever card."""

    config: Parameters
    planned: PlannedModel
    networks: Mapping[str, nn.Module]
    """All that are on the card."""
    weights: int
    """Bytes of the model with its adapters."""
    step: Meter
    evaluation: Mapping[str, Meter]
    """Of one batch of ``evaluation.batch_size`` images, by sampler."""
    part: Part | None
    """An evaluation while training, where it is smaller than that."""
    trained: int
    """Trained parameters."""

    @property
    def peak(self) -> int:
        return max(meter.peak for meter in (self.step, *self.evaluation.values()))

    def _share(self, card: Card) -> Callable[[int], float]:
        """The time of so many images in a batch, as a share of a whole batch's: a line through the two that ran."""
        size = self.config.evaluation.batch_size
        if self.part is None:
            return lambda images: 1.0
        known = self._seconds(self.part.meter, card) / self._seconds(self.evaluation["stock"], card)
        each = (1.0 - known) / (size - self.part.images)
        return lambda images: max(0.0, 1.0 - each * (size - images))

    def times(self, card: Card) -> RunTime:
        batch = {name: self._seconds(meter, card) for name, meter in self.evaluation.items()}
        return run_time(
            self.config,
            self.planned.plan,
            self._seconds(self.step, card),
            batch,
            self.config.distributed.processes,
            self._share(card),
        )

    def _seconds(self, meter: Meter, card: Card) -> float:
        computing = sum(seconds_of(phase, card, self.config.model.dtype) for phase in meter.phases.values())
        return computing + meter.brought / HOST_BANDWIDTH


def plan_of(counted: Counted, card: Card | None, batches: Sequence[LargestBatch]) -> dict[str, Any]:
    """As JSON; without a card there are no times."""
    config = counted.config
    return {
        "estimated": ESTIMATED,
        "model": config.model.path or config.starter.model,
        "sizes_from": counted.planned.source,
        "card": None
        if card is None
        else {**asdict(card), "usable": card.usable, "count": config.distributed.processes},
        "fits": None if card is None else counted.peak <= card.usable,
        "changes": []
        if card is None
        else changes(
            config,
            card,
            counted.weights,
            counted.peak,
            batches,
            networks=len(counted.planned.networks),
            step=counted.step.peak,
            trained=counted.trained,
        ),
        "parameters": {name: _parameters(network) for name, network in counted.networks.items()},
        "trained_parameters": counted.trained,
        "weights_gb": counted.weights / 1e9,
        "peak_gb": counted.peak / 1e9,
        "brought_gb": counted.step.brought / 1e9,
        "counted_for": {
            "prompt_words": config.plan.prompt_words,
            "prompts_of_a_split": config.evaluation.max_prompts or config.evaluation.prompts,
        },
        "idle": _idle(config, counted.planned.plan.modules),
        **_host(counted),
        "gathered_gb": sum(phase.gathered for phase in counted.step.phases.values()) / 1e9,
        "step": _phases(counted.step, config, card),
        "evaluation": {name: _phases(meter, config, card) for name, meter in counted.evaluation.items()},
        "largest_batches": [{**asdict(batch), "peak": batch.peak / 1e9} for batch in batches],
        "run": None if card is None else _run(counted, card),
        "cards": [_on_card(counted, each) for each in CARDS.values()] if card is not None else [],
        "host_waits": dict(counted.step.waits.most_common()),
        "mixed_devices": dict(counted.step.mixed),
        "calibration": {
            "seconds_a_kernel": LAUNCH_SECONDS,
            "share_of_dense_flops": FLOPS_SHARE,
            "seconds_a_call_of_the_stock_pipeline": CALL_SECONDS,
            "published": [asdict(point) for point in CALIBRATION],
        },
    }


def _host(counted: Counted) -> dict[str, float]:
    """GB of host memory of all processes: while they load, and after that."""
    kept = pinned_bytes(*counted.planned.networks.values())
    processes = counted.config.distributed.processes
    return {"host_gb": processes * max(_loaded_bytes(counted), kept) / 1e9, "host_kept_gb": processes * kept / 1e9}


def _idle(config: Parameters, modules: Sequence[str]) -> str:
    """Where the prompts of a step cannot be shared evenly; "" where they can."""
    cards = config.distributed.processes
    uneven = [prompts for m in modules if (prompts := config.grpo_of(m).prompts_per_step) % cards]
    if not uneven:
        return ""
    return (
        f"A step has {uneven[0]} prompts for {cards} cards, and takes as long as the {-(-uneven[0] // cards)} of one"
        f" card: a multiple of {cards} (grpo.prompts_per_step) would use all."
    )


def _loaded_bytes(counted: Counted) -> int:
    """Of the frozen weights as they are read, before any of them has fewer bits."""
    size: int = getattr(torch, counted.config.model.dtype).itemsize
    return size * sum(_parameters(network) for network in counted.planned.networks.values())


def _parameters(network: Any) -> int:
    full = sum(parameter.numel() for parameter in network.parameters() if not parameter.requires_grad)
    return full + sum(layer.elements for layer in quantised_layers(network))


def _phases(meter: Meter, config: Parameters, card: Card | None) -> list[dict[str, Any]]:
    return [
        {
            "phase": name,
            "peak_gb": phase.peak / 1e9,
            "tflop": phase.flops / 1e12,
            "gb_moved": phase.bytes / 1e9,
            "kernels": round(phase.kernels),
            "host_waits": round(phase.waits),
            "seconds": None if card is None else seconds_of(phase, card, config.model.dtype),
        }
        for name, phase in meter.phases.items()
        if phase.kernels or name != OUTSIDE
    ]


def _run(counted: Counted, card: Card) -> dict[str, Any]:
    times, plan, cards = counted.times(card), counted.config.plan, counted.config.distributed.processes
    hours = times.total / 3600
    cost = None if plan.price_per_hour is None else hours * cards * plan.price_per_hour
    return {**asdict(times), "hours": hours, "cost": cost, "currency": plan.currency}


def _on_card(counted: Counted, card: Card) -> dict[str, Any]:
    times = counted.times(card)
    fits = counted.peak <= card.usable
    return {"card": card.name, "fits": fits, "step_seconds": times.step, "run_hours": times.total / 3600}


def show(plan: Mapping[str, Any]) -> None:
    """Prints it."""
    card = plan["card"]
    console.heading(f"Plan of {plan['model']}" + ("" if card is None else f" on {card['count']} x {card['name']}"))
    parameters = {name: f"{count / 1e6:,.1f} million" for name, count in plan["parameters"].items()}
    trained = {"trained (LoRA)": f"{plan['trained_parameters'] / 1e6:.1f} million"}
    memory = {"weights": f"{plan['weights_gb']:.3g} GB", "largest peak": f"{plan['peak_gb']:.3g} GB"}
    console.summary(
        "Parameters", {**parameters, **trained, **memory, **_host_memory(plan), "sizes from": plan["sizes_from"]}
    )
    _table("One step", plan["step"])
    if plan["brought_gb"]:
        console.note(f"Networks take turns: a step copies {plan['brought_gb']:.0f} GB from the host to the card.")
    if plan["gathered_gb"]:
        console.note(
            f"Each card keeps a part of every layer: a step brings it {plan['gathered_gb']:.0f} GB of the others."
        )
    for name, phases in plan["evaluation"].items():
        _table(f"One batch of the evaluation, sampler {name}", phases)
    if plan["largest_batches"]:
        rows = [[b["parameter"], b["value"], b["largest"], b["peak"]] for b in plan["largest_batches"]]
        console.table("Batches", ["parameter", "set", "largest that fits", "peak GB with it"], rows)
    if plan["run"] is not None:
        _show_run(plan)
    _show_waits(plan)
    console.note(plan["estimated"])


def _host_memory(plan: Mapping[str, Any]) -> dict[str, str]:
    count = 1 if plan["card"] is None else plan["card"]["count"]
    processes = f" of {count} processes" if count > 1 else ""
    shown = {f"host memory{processes}, loading": f"{plan['host_gb']:.3g} GB"}
    kept = {"and then, pinned": f"{plan['host_kept_gb']:.3g} GB"} if plan["host_kept_gb"] else {}
    return shown | kept


def _table(title: str, phases: Sequence[Mapping[str, Any]]) -> None:
    columns = ["phase", "peak GB", "TFLOP", "GB moved", "kernels", "host waits", "seconds (estimated)"]
    keys = ("phase", "peak_gb", "tflop", "gb_moved", "kernels", "host_waits", "seconds")
    console.table(title, columns, [[phase[key] for key in keys] for phase in phases])


def _show_run(plan: Mapping[str, Any]) -> None:
    run = plan["run"]
    cards = plan["card"]["count"]
    cost = "set plan.price_per_hour, that of one card"
    if run["cost"] is not None:
        cost = f"{run['cost']:.0f} {run['currency']}" + (f" for {cards} cards" if cards > 1 else "")
    console.summary(
        "Estimated",
        {
            "a step": f"{run['step']:.0f} s",
            "all steps": _long(run["steps"]),
            "signal check": _long(run["signal_check"]),
            "evaluations while training": f"{run['evaluations_in_training']} x {_long(run['evaluation_in_training'])}",
            "baseline": _long(run["baseline"]),
            "evaluate": _long(run["evaluate"]),
            "everything": _long(3600 * run["hours"]),
            "cost": cost,
        },
    )
    words, prompts = plan["counted_for"].values()
    console.note(
        f"Counted for prompts of {words} words (plan.prompt_words), and for {prompts} evaluation prompts and as many"
        " held-out ones (evaluation.max_prompts); your records are not read."
    )
    if plan["idle"]:
        console.note(plan["idle"])
    rows = [
        [each["card"], "yes", each["step_seconds"], each["run_hours"]]
        if each["fits"]
        else [each["card"], "no", None, None]
        for each in plan["cards"]
    ]
    console.table("The same on other cards", ["card", "fits", "seconds a step", "hours"], rows)


def _long(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _show_waits(plan: Mapping[str, Any]) -> None:
    most = list(plan["host_waits"].items())[:6]
    if most:
        console.table("Where the host waits for the device most", ["source line", "times a step"], most)
    if plan["mixed_devices"]:
        rows = list(plan["mixed_devices"].items())
        console.table("Tensors of two devices in one operation: a GPU refuses them", ["operation", "times"], rows)
