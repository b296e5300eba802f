"""A flow model of two numbers, and a family of it as somebody would write one outside of the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.lora import Adapter
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings, Module


class Field(nn.Module):
    """The velocity ``slope * state + offset``; the slope is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(-0.4))
        self.device = torch.device("cpu")

    def forward(self, state: Tensor, offsets: Tensor) -> Tensor:
        return self.slope * state + offsets.view(-1, *[1] * (state.ndim - 1))


class ToyFlow:
    """Satisfies ``FlowModel[Tensor]``; the conditions are an offset for each record, the length of its prompt."""

    latent_shape = (4, 12, 16)
    sigmas = (1.0, 0.8, 0.5, 0.2, 0.0)

    def __init__(self) -> None:
        self.transformer = Field()

    def schedule(self, steps: int) -> Schedule:
        assert steps == 4
        return Schedule(timesteps=tuple(1000 * sigma for sigma in self.sigmas[:-1]), sigmas=self.sigmas)

    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Tensor:
        return torch.tensor([0.1 * len(record.prompt) for record in records])

    def velocity(self, conditions: Tensor, entries: Tensor) -> Velocity:
        return lambda state, timestep: self.transformer(state, conditions[entries])

    def pixels(self, latents: Tensor) -> list[Tensor]:
        return list(((latents[:, :3].tanh() + 1) * 127).to(torch.uint8))


class SlopeAdapter(Adapter):
    """The whole slope is the adapter's, 0 without it."""

    @classmethod
    def _add(cls, base: Field, config: LoraConfig) -> SlopeAdapter:
        base.slope.requires_grad_()
        return cls(base)

    @classmethod
    def load(cls, base: Field, folder: Path) -> SlopeAdapter:
        adapter = cls(base)
        adapter.load_state(cls.saved(folder))
        return adapter

    @classmethod
    def saved(cls, folder: Path) -> dict[str, Tensor]:
        state: dict[str, Tensor] = torch.load(folder / "slope.pt")
        return state

    def parameters(self) -> list[nn.Parameter]:
        return [self.model.slope]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        slope = self.model.slope.detach().clone()
        self.model.slope.data.zero_()
        try:
            yield
        finally:
            self.model.slope.data.copy_(slope)

    def state(self) -> dict[str, Tensor]:
        return {"slope": self.model.slope.detach().clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.model.slope.data.copy_(state["slope"])

    def save(self, folder: Path | str) -> None:
        Path(folder).mkdir(parents=True)
        torch.save(self.state(), Path(folder) / "slope.pt")


class Options(Strict):
    brightness: float = 1.0


MODULES = {"net": Module(kind="flow", adapter=SlopeAdapter, targets="slope", advice="none")}


def load(path: str, config: ModelConfig) -> ToyFlow:
    return ToyFlow()


def build(model: ToyFlow, settings: ModelSettings) -> Any:
    return Model(model, MODULES, settings)


FAMILY = Family(name="toy", modules=MODULES, tasks=("t2i",), saved_as=("Toy",), load=load, build=build, options=Options)
