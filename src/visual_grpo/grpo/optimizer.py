"""AdamW on adapters: schedule, gradient sums, loss scaling, non-finite updates, state for a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from visual_grpo.common.device import bitsandbytes
from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import phase
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.metrics import UpdateMetrics
from visual_grpo.grpo.trust_region import TrustRegion

log = logging.getLogger(__name__)

Schedule = Literal["constant", "linear", "cosine"]
SETTING = "grpo.optimizer"
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""bitsandbytes' state entry -> attribute of the optimizer: the codes of each moment, the same for all parameters."""


MOST_IN_A_ROW = 3
"""Updates in a row that are skipped before the run stops: a broken model stays broken."""
MOST_OVERFLOWS = 24
"""Updates in a row that float16's scaler skips because the gradient overflows. It starts at 2^16 and halves each
time, so that after 24 the scale is no longer to blame."""
_SHOWN_PROMPTS = 8


class NonFiniteLossError(UserError):
    """The loss or its gradient is NaN or infinite; nothing was updated with it."""


class AdapterOptimizer:
    """AdamW with a learning-rate schedule and float16 loss scaling; skips updates that are not finite, or stops."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: GRPOConfig, dtype: str) -> None:
        """``dtype`` is the weights' dtype: float16 gets a gradient scaler."""
        self.parameters, self.config, self.device = parameters, config, parameters[0].device
        self.adamw = build_optimizer(parameters, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        target = config.target_kl
        self.trust_region = TrustRegion(parameters, target, rounds=dtype != "float32") if target is not None else None
        self.on_update: list[Callable[[], object]] = []
        """Called after each update that is not skipped."""
        self._skipped = self._overflows = 0
        """Updates in a row that were not finite, and that the scaler skipped."""

    @contextmanager
    def skipping_non_finite(self, metrics: UpdateMetrics) -> Iterator[None]:
        """Skips the update inside where its loss or gradient is not finite, unless the run should stop."""
        try:
            yield
        except NonFiniteLossError as error:
            if self.config.non_finite == "stop":
                raise NonFiniteLossError(f"{error} To skip such updates: grpo.non_finite=skip") from error
            if self._skipped == MOST_IN_A_ROW:
                message = f"{error} The {MOST_IN_A_ROW} updates before it were skipped already."
                raise NonFiniteLossError(message) from error
            self._skipped += 1
            log.warning("%s. The update is skipped.", str(error).partition(". ")[0])
            metrics.skipped, metrics.grad_norm = True, math.nan
        else:
            self._skipped = 0
        self.zero_grad()  # Free gradients before the next rollout.

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def gradient_sums(self) -> GradientSums:
        self.zero_grad()
        # A rank without rows needs its scaler's factor too, which is created at the first loss.
        self.scaler.scale(torch.zeros((), device=self.device))
        return GradientSums(self.parameters)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss.to(self.device)).backward()

    def step(self, number: int, step: int, prompts: Sequence[str]) -> tuple[float, float]:
        """Takes update ``number`` of the run, in training step ``step``; returns gradient norm and learning rate used.

        Raises NonFiniteLossError. With a scaler, an infinite gradient skips the update by design.
        """
        config = self.config
        total = config.steps * config.updates_per_rollout
        factor = learning_rate_factor(number, total, config.warmup_steps, config.schedule)
        region = self.trust_region
        rate = config.learning_rate * factor * (region.scale if region is not None else 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.adamw)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm))
        if not self.scaler.is_enabled() and not math.isfinite(norm):
            raise non_finite(norm, "gradient norm", step, prompts)
        scale = self.scaler.get_scale()
        with phase("AdamW"):
            self.scaler.step(self.adamw)
        self.scaler.update()
        overflowed = self.scaler.get_scale() < scale
        self._overflows = self._overflows + 1 if overflowed else 0
        if self._overflows > MOST_OVERFLOWS:
            raise NonFiniteLossError(
                f"The gradient was not finite in {self._overflows} updates in a row, at step {step} still with a loss"
                f" scale of {self.scaler.get_scale():g}: it is NaN, or float16 cannot hold it. Use"
                " model.dtype=bfloat16 or float32, or a lower grpo.learning_rate."
            )
        if overflowed:
            return norm, 0.0
        if region is not None:
            part = factor * (number % config.updates_per_rollout + 1) / config.updates_per_rollout
            rate *= region.hold(part, taught=norm > 0)
            region.refuse_unreached(config.learning_rate, config.warmup_steps)
        for follow in self.on_update:
            follow()
        return norm, rate

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what a checkpoint needs: tensors, and metadata that are JSON."""
        guard = {"in_a_row": self._skipped, "overflows": self._overflows}
        region = {} if self.trust_region is None else {"trust_region": self.trust_region.state()}
        return optimizer_state(self.adamw), {"scaler": self.scaler.state_dict(), "guard": guard} | region

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        load_optimizer_state(self.adamw, tensors)
        self.scaler.load_state_dict(metadata["scaler"])
        self._skipped, self._overflows = metadata["guard"]["in_a_row"], metadata["guard"]["overflows"]
        if self.trust_region is not None:
            self.trust_region.load_state(metadata["trust_region"])


def non_finite(value: float, what: str, step: int, prompts: Sequence[str]) -> NonFiniteLossError:
    """Returns the error that says that ``value`` was computed on the ``prompts`` with these ids."""
    ids = sorted(set(prompts))
    return NonFiniteLossError(
        f"The {what} became {value} at step {step} with the prompts {', '.join(ids[:_SHOWN_PROMPTS])}"
        f"{' ...' * (len(ids) > _SHOWN_PROMPTS)}. Nothing was updated with it. Lower"
        " grpo.learning_rate or the clip, or look at the rewards of these prompts."
    )


def learning_rate_factor(update: int, total: int, warmup: int, schedule: Schedule) -> float:
    """Factor on the peak learning rate for ``update`` (0-based) of ``total``.

    Linear from 1/warmup to 1 over ``warmup`` updates, then constant, or falling to 0 at ``total``. The schedules of
    diffusers and transformers begin their warm-up at 0, with which the first update would change nothing.
    """
    if update < warmup:
        return (update + 1) / warmup
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


def build_optimizer(parameters: Sequence[nn.Parameter], config: GRPOConfig) -> torch.optim.Optimizer:
    """AdamW. Raises UserError where its library is missing or does not work on the parameters' device."""
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        kind = bitsandbytes(SETTING, config.optimizer, parameters[0].device).optim.AdamW8bit
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    return optimizer


class GradientSums:
    """Adds up what backward passes leave in ``grad`` of ``parameters`` inside a ``with`` block, on all ranks.

    On a CPU in float64: Adam's step does not shrink with the gradient, so rounding could decide the sign of a step, and
    the result would depend on the number of processes. On a GPU ``grad`` itself is the sum, in the parameter's
    precision, to save memory; its kernels do not repeat to the last bit anyway.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in parameters if in_double(p)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Puts the sums, rounded once, into ``grad``; over all ranks, unless the block has raised."""
        for hook in self._hooks:
            hook.remove()
        if kind is None and ranks.count() > 1:
            self.reduce(ranks.all_reduce)
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)

    def reduce(self, total: Callable[[Tensor], object]) -> None:
        """Replaces each sum by that over all ranks; ``total`` adds a flat tensor up in place."""
        gradients = [self._sums.get(parameter, parameter.grad) for parameter in self._parameters]
        like = [parameter.double() if in_double(parameter) else parameter for parameter in self._parameters]
        parts = [torch.zeros_like(p).detach() if g is None else g for p, g in zip(like, gradients, strict=True)]
        reached = parts[0].new_tensor([gradient is not None for gradient in gradients])
        flat = torch.cat([part.flatten() for part in (*parts, reached)])
        total(flat)
        *sums, reached = flat.split([part.numel() for part in (*parts, reached)])
        for parameter, part, count in zip(self._parameters, sums, reached, strict=True):
            if not count:  # No gradient reaches it: then the optimizer must not touch it.
                continue
            if in_double(parameter):
                self._sums[parameter] = part.view_as(parameter)
            else:
                parameter.grad = part.view_as(parameter)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.double()
        parameter.grad = None


def in_double(parameter: nn.Parameter) -> bool:
    """True if its gradients are added up in float64."""
    return parameter.device.type == "cpu"


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``NUMBER/NAME`` -> tensor, for each parameter in its order that was updated; numbers as tensors of one.

    Copies, which training does not change.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{index}/{name}": torch.as_tensor(value).clone()
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if not (_is_8bit(optimizer) and name in _TABLES)
    }


def load_optimizer_state(optimizer: Any, state: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_state` gave. Raises UserError for what the other kind of optimizer gave."""
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        index, name = key.split("/")
        entries.setdefault(int(index), {})[name] = value.clone()  # The optimizer takes it for its own.
    names = {name for entry in entries.values() for name in entry}
    if names and ("state1" in names) != _is_8bit(optimizer):
        raise UserError(
            f"The checkpoint was written with a different {SETTING}. Set the value of that training, or start at step"
            " 1."
        )
    for entry in entries.values() if _is_8bit(optimizer) else ():
        entry["step"] = int(entry["step"])
        if entry["state1"].dtype == torch.uint8:
            entry |= {name: optimizer.name2qmap[table] for name, table in _TABLES.items()}
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


def _is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "name2qmap")
