"""A step of the trainer, and a batch of each sampler of the evaluation, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from visual_grpo import components
from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.hardware.turns import brought, on_device, put_away
from visual_grpo.plan.attention import fused_attention
from visual_grpo.plan.host_values import HostValues, literals_with_values
from visual_grpo.plan.inputs import REWARD, records_for, unequal_scores, with_planned_reward
from visual_grpo.plan.meter import Meter
from visual_grpo.plan.models import PlannedModel
from visual_grpo.plan.parts import Parts
from visual_grpo.plan.phases import CONDITIONS, REWARDS, phases_of_drawing, phases_of_training
from visual_grpo.plan.repeats import Denoised, fewer_micro_batches, fewer_repeats
from visual_grpo.plan.segmenter import PlannedSegmenter
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import PromptRecord, Sample


class DryRunner:
    """Runs parts of a training of a model without weights, by the project's own code, and counts what they do."""

    def __init__(self, config: Parameters, planned: PlannedModel, device: str) -> None:
        """``device``: cpu or cuda, whose kernels are taken."""
        self.config, self.planned, self.device = with_planned_reward(config), planned, device
        self.trajectories: dict[str, Any] = {}
        """By module, those of the last step."""
        self.denoised: Denoised | None = None
        """The last one."""
        self._values = HostValues()
        self._segmenter = PlannedSegmenter(config)
        self._meter = Meter()
        self.scorer = RewardSet({REWARD: (self._scores, 1.0)})
        self.trainer: Any = components.build_trainer(self.config, planned.plan, planned.model, self.scorer)
        self._parts = (
            Parts(planned.networks.values(), config.distributed.processes) if config.distributed.sharded else None
        )
        if self._parts is not None:
            self._parts.tell(lambda count: self._meter.gather(count))
        put_away(*planned.networks.values())  # Those that take turns; they have come to get their adapters.
        with self.counting() as meter:
            pass
        self.weights: int = meter.live
        """Bytes of the model with its adapters."""
        self._update()

    def _update(self) -> None:
        """Gives the optimisers their moments, which the first step of a training makes and all later ones have."""
        with self.counting():
            for own in self.trainer.modules.values():
                for parameter in own.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                own.optimizer.step()
                own.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Meter:
        """A whole one after the first: rollout, rewards that cost nothing, reference, replay, gradient, optimiser."""
        count = max(self.config.grpo_of(module).prompts_per_step for module in self.planned.plan.modules)
        with (
            records_for(self.config, count) as records,
            self.counting() as meter,
            phases_of_training(meter, self.trainer),
            self._fewer_micro_batches(meter),
        ):
            next(iter(self.trainer.fit(records)))
        return meter

    def evaluation(self, sampler: SamplerConfig, count: int) -> Meter:
        """One batch of ``count`` samples."""
        with records_for(self.config, count) as records, self.counting() as meter, meter.phase(CONDITIONS):
            self._scores(records, self.planned.model.generate(records, list(range(count)), sampler))
        return meter

    def networks(self) -> dict[str, torch.nn.Module]:
        """All that are on the card, by name."""
        judge = self._segmenter.network
        return self.planned.networks | ({} if judge is None else {"segmenter": judge})

    @contextmanager
    def counting(self) -> Iterator[Meter]:
        """What happens within is counted; the weights and what the optimiser keeps are there before."""
        self._meter = meter = Meter(values=self._values)
        for network in self.networks().values():
            meter.hold(on_device(network))
        if self._parts is not None:
            meter.live -= self._parts.saved
        for own in self.trainer.modules.values():
            kept = (value for state in own.optimizer.state.values() for value in state.values())
            meter.hold(value for value in kept if isinstance(value, Tensor))
        with ExitStack() as stack:
            for counted in (phases_of_drawing(meter), fewer_repeats(meter, self._seen), fused_attention(self.device)):
                stack.enter_context(counted)
            stack.enter_context(literals_with_values())
            stack.enter_context(meter)
            before = brought(*self.planned.networks.values())
            yield meter
            meter.brought = brought(*self.planned.networks.values()) - before

    def _scores(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
        with self._meter.phase(REWARDS):
            self._segmenter.judge(prompts, samples, (self.config.data.height, self.config.data.width))
        return unequal_scores(len(samples))

    def _seen(self, denoised: Denoised) -> None:
        self.denoised = denoised

    @contextmanager
    def _fewer_micro_batches(self, meter: Meter) -> Iterator[None]:
        with ExitStack() as stack:
            for module, own in self.trainer.modules.items():
                grpo = self.config.grpo_of(module)
                rows = grpo.prompts_per_step * grpo.group_size
                size = min(grpo.micro_batch_size or rows, rows)

                def seen(trajectory: Any, module: str = module) -> None:
                    self.trajectories[module] = trajectory

                stack.enter_context(fewer_micro_batches(meter, own.policy, rows, size, seen))
            yield
