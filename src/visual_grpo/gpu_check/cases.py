"""Which steps are run: those of one module each, at one size each."""

from __future__ import annotations

from dataclasses import dataclass

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.policies.family import Family
from visual_grpo.policies.family_settings import trained_modules

_LEAST = 256
"""Pixels of half a height that are worth checking beside the whole one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    module: str
    height: int
    width: int

    @property
    def title(self) -> str:
        return f"{self.module}, {self.height} x {self.width}"

    def configured(self, parameters: Parameters) -> Parameters:
        """The parameters with this module, this size, and the few prompts of a check; everything else as it is."""
        check = parameters.gpu_check
        modules = {name: own.model_copy(update={"prompts_per_step": None}) for name, own in parameters.modules.items()}
        return parameters.model_copy(
            update={
                "data": parameters.data.model_copy(update={"height": self.height, "width": self.width}),
                "policy": parameters.policy.model_copy(update={"train": self.module, "stages": "alternating"}),
                "grpo": parameters.grpo.model_copy(update={"prompts_per_step": check.prompts, "steps": check.steps}),
                "modules": modules,
                "distributed": parameters.distributed.model_copy(update={"processes": 1, "sharded": False}),
            }
        )


def cases_of(parameters: Parameters, family: Family) -> list[Case]:
    """In the order in which they run, small ones first.

    Raises UserError for a module that the family does not have, or a size that is no multiple of 32.
    """
    check, data = parameters.gpu_check, parameters.data
    asked = parameters.policy.model_copy(update={"train": check.modules or list(family.modules)})
    half = [data.height // 2] if data.height // 2 >= _LEAST else []
    sizes = [(height, height * data.width // data.height) for height in check.sizes or [*half, data.height]]
    for height, width in sizes:
        if height < 32 or height % 32 or width % 32:
            raise UserError(
                f"gpu_check.sizes has {height}, which makes pictures of {height} x {width} pixels; expected heights and"
                f" widths that are multiples of 32. data.height x data.width is {data.height} x {data.width}."
            )
    return [
        Case(module=module, height=height, width=width)
        for height, width in sorted(sizes)
        for module in trained_modules(family, asked)
    ]
