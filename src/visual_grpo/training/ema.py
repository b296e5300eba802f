"""Exponential moving average (EMA) of the adapters, evaluated and saved in place of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.two_stage import Trainer

if TYPE_CHECKING:
    from diffusers.training_utils import EMAModel


class AdapterAverage:
    """diffusers' EMA of each module's adapter, updated by every update of its optimizer that is not skipped.

    After update n: ``average += (1 - d) (weights - average)`` with ``d = min(decay, n / (n + 9))``, and d = 0 at n = 1.
    All ranks have the same weights, and so the same average.
    """

    def __init__(self, trainer: Trainer, decay: float | None) -> None:
        """``decay`` None: there is no average, and `in_place` changes nothing."""
        self._averages: dict[str, tuple[EMAModel, list[nn.Parameter]]] = {}
        if decay is None:
            return
        from diffusers.training_utils import EMAModel  # Two seconds, which a training without it should not pay.

        for module, module_trainer in trainer.modules.items():
            average = EMAModel(module_trainer.parameters, decay=decay, foreach=True)
            self._averages[module] = average, module_trainer.parameters
            module_trainer.optimizer.on_update.append(partial(average.step, module_trainer.parameters))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the adapters their average inside the block, and their trained weights back after it."""
        with ExitStack() as stack:
            for average, parameters in self._averages.values():
                average.store(parameters)
                stack.callback(average.restore, parameters)
                average.copy_to(parameters)
            yield

    def state(self) -> dict[str, Tensor]:
        """``MODULE/NUMBER`` -> average of a parameter, and ``MODULE/updates``; empty without an average."""
        state: dict[str, Tensor] = {}
        for module, (average, _) in self._averages.items():
            state |= {f"{module}/{number}": value for number, value in enumerate(average.shadow_params)}
            state[f"{module}/updates"] = torch.tensor(average.optimization_step)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for module, (average, parameters) in self._averages.items():
            tensors = tensors_under(module, state)
            updates = int(tensors.pop("updates"))
            values = [tensors[str(number)] for number in range(len(tensors))]
            average.load_state_dict({"optimization_step": updates, "shadow_params": values})
            average.to(device=parameters[0].device)
