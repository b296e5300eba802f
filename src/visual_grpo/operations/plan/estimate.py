"""Seconds on a card from counted work: an estimate that no GPU has confirmed.

The constants are fitted to diffusers' published times of GLM-Image on one H100 (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import Parameters
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.plan.meter import Meter, Phase

LAUNCH_SECONDS = 14.6e-6
"""Between two kernels in eager mode: 35 ms a token over 2,397 kernels."""
FLOPS_SHARE = 0.398
"""Share of the dense rate: 2.54 s a PFLOP on an H100 of 989 TFLOP/s."""
BANDWIDTH_SHARE = 0.8
"""Share of the card's bandwidth; assumed."""
HOST_BANDWIDTH = 25e9
"""Bytes a second from pinned host memory, PCIe 4.0; assumed."""
_SPARE = 0.05
"""Share of the memory left to the CUDA context, workspaces and fragmentation."""


@dataclass(frozen=True)
class Card:
    name: str
    memory: float
    """GiB that torch has in all, 1 to 4 % less than nvidia-smi shows."""
    bandwidth: float
    """Bytes a second."""
    half: float
    """Dense FLOP/s in bfloat16 or float16."""
    single: float
    """FLOP/s in float32."""

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
    Card("H200", 139.72, 4.8e12, 989e12, 67e12),
)
"""By memory."""


def find_card(name: str) -> Card:
    """Ignores case, blanks, hyphens and RTX. Raises UserError with the known names."""
    for card in CARDS:
        if _plain(name) == _plain(card.name):
            return card
    known = ", ".join(f"{card.name} ({card.memory:.0f} GiB)" for card in CARDS)
    hint = nearest_hint(name, [card.name for card in CARDS])
    raise UserError(f"plan.gpu is {name!r}, which is no known card.{hint} Known: {known}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("rtx")


def smallest_card(peak: int) -> Card:
    """Returns the smallest that holds ``peak`` bytes; the largest where none does."""
    return next((card for card in CARDS if peak <= card.usable), CARDS[-1])


def phase_seconds(phase: Phase, card: Card, dtype: str) -> float:
    """Takes the longest of operations, memory traffic and kernel launches."""
    dense = card.single if dtype == "float32" else card.half
    moved = phase.moved / (BANDWIDTH_SHARE * card.bandwidth)
    return max(phase.flops / (FLOPS_SHARE * dense), moved, phase.kernels * LAUNCH_SECONDS)


def seconds_of(meter: Meter, card: Card, dtype: str) -> float:
    phases = sum(phase_seconds(phase, card, dtype) for phase in meter.phases.values())
    return phases + meter.brought / HOST_BANDWIDTH


def run_seconds(config: Parameters, plan: RunSpec, step: float, batch: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each part of a run.

    Args:
        step: seconds of a step.
        batch: seconds of ``evaluation.batch_size`` images, by sampler.
    """
    evaluation, steps = config.evaluation, config.grpo.steps
    each = {name: seconds / evaluation.batch_size / config.distributed.processes for name, seconds in batch.items()}
    # Records are not read, so a split is taken to have as many prompts as are drawn at most.
    images = (evaluation.max_prompts or evaluation.prompts) * evaluation.images_per_prompt
    judged = 2 * images * sum(each.values())
    times = 1 if not evaluation.every else -(-steps // evaluation.every)
    return {
        "signal check": step * config.policy.signal_check.most(steps),
        "steps": step * steps,
        "evaluations while training": times * evaluation.prompts * each["eval"],
        "baseline": judged + len(plan.controls) * images * each["eval"],
        "evaluate": judged,
    }
