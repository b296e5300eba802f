"""Runs a step of the trainer and batches of the evaluation on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import Parameters, RewardConfig, SamplerConfig
from visual_grpo.grpo.distributed.sharding import layers_of
from visual_grpo.models.offload import copied_bytes, device_tensors, move_to_host
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.plan.host_values import HostValues
from visual_grpo.operations.plan.meter import Meter, as_on_a_device
from visual_grpo.operations.plan.model import PlannedModel, segmenter_of
from visual_grpo.operations.plan.phases import CONDITIONS, fewer_micro_batches, fewer_repeats, phases_of
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components

_WORDS = ("red", "round", "small", "bright", "distant")


class DryRunner:
    """Runs parts of a training by the project's own code and counts them."""

    def __init__(self, config: Parameters, planned: PlannedModel) -> None:
        self.config, self.planned = config, planned
        self.networks = planned.networks | segmenter_of(config)
        self._values = HostValues()
        self.trainer = planned_trainer(config, planned.plan, planned.model)
        move_to_host(*planned.networks.values())  # Offloaded networks came to get their adapters.
        with self.counting() as meter:
            pass
        self.weights: int = meter.live
        """Bytes of the model with its adapters."""
        with self.counting():  # The optimiser's moments, which all steps but the first have.
            for own in self.trainer.modules.values():
                for parameter in own.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                own.optimizer.adamw.step()
                own.optimizer.zero_grad()

    def step(self) -> Meter:
        """Counts rollout, rewards that cost nothing, reference, replay, gradient and optimiser."""
        count = max(self.config.grpo_of(module).prompts_per_step for module in self.planned.plan.modules)
        with ExitStack() as stack:
            records = stack.enter_context(records_for(self.config, count))
            meter = stack.enter_context(self.counting())
            stack.enter_context(phases_of(meter, self.trainer))
            for module, own in self.trainer.modules.items():
                grpo = self.config.grpo_of(module)
                rows = grpo.prompts_per_step * grpo.group_size
                micro_batches = -(-rows // (grpo.micro_batch_size or rows))
                stack.enter_context(fewer_micro_batches(meter, own.policy, micro_batches))
            next(iter(self.trainer.fit(records)))
        return meter

    def evaluation(self, sampler: SamplerConfig, count: int) -> Meter:
        """Counts one batch of ``count`` samples."""
        with (
            records_for(self.config, count) as records,
            self.counting() as meter,
            phases_of(meter),
            meter.phase(CONDITIONS),
        ):
            self.planned.model.generate(records, list(range(count)), sampler)
        return meter

    @contextmanager
    def counting(self) -> Iterator[Meter]:
        """Counts what happens inside, with weights and the optimiser's state there from the start."""
        meter, networks = Meter(self._values), self.planned.networks.values()
        for network in self.networks.values():
            meter.hold(device_tensors(network))
        if self.config.distributed.sharded:
            blocks = [block for network in networks for block in layers_of(network)]
            meter.live -= on_other_cards(blocks, self.config.distributed.processes)
        for own in self.trainer.modules.values():
            kept = (value for state in own.optimizer.adamw.state.values() for value in state.values())
            meter.hold(value for value in kept if isinstance(value, Tensor))
        before = copied_bytes(*networks)
        with fewer_repeats(meter), as_on_a_device(), meter:
            yield meter
        meter.brought = copied_bytes(*networks) - before


def on_other_cards(blocks: Sequence[torch.nn.Module], count: int) -> int:
    """Bytes of frozen blocks that one of ``count`` cards does not hold; it holds two whole blocks at a time."""
    sizes = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in blocks]
    return sum(sizes) - sum(sizes) // count - 2 * max(sizes, default=0)


def planned_trainer(config: Parameters, plan: RunSpec, model: Any) -> Any:
    """Builds a trainer whose only reward costs nothing."""
    modules = {name: own.model_copy(update={"rewards": {}}) for name, own in config.modules.items()}
    config = config.model_copy(update={"rewards": {"planned": RewardConfig()}, "modules": modules})
    return components.build_trainer(config, plan, model, RewardSet({"planned": (unequal_scores, 1.0)}))


def unequal_scores(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
    """[len(samples)] float32; they differ within every group, so that there is something to learn."""
    return torch.arange(len(samples), dtype=torch.float32) % 7


@contextmanager
def records_for(config: Parameters, count: int) -> Iterator[list[PromptRecord]]:
    """Yields distinct prompts of about ``plan.prompt_words`` tokens, with a blank picture where the task needs one."""
    with TemporaryDirectory() as folder:
        sources: tuple[Path, ...] = ()
        if config.data.task in ("i2i", "segmentation"):
            sources = (Path(folder, "blank.png"),)
            Image.new("RGB", (config.data.width, config.data.height)).save(sources[0])
        yield [
            PromptRecord(id=str(number), prompt=prompt_of(config.plan.prompt_words, number), source_images=sources)
            for number in range(count)
        ]


def prompt_of(words: int, number: int) -> str:
    """Prompts of different numbers have different lengths, as real ones do."""
    count = max(words - number % 5, 1)
    return " ".join(_WORDS[(place + number) % len(_WORDS)] for place in range(count))
