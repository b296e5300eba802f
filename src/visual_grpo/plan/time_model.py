"""Seconds from counted work: an estimate that is calibrated at published times and proved by none.

A phase takes the longest of three times: its floating-point operations at the share of the card's rate that the stock
pipeline reaches; each kernel's operations or bytes, whichever take longer, at rates that large kernels reach; and its
kernels one after the other as the host launches them. What comes from other cards is taken not to overlap with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from visual_grpo.plan.cards import Card
from visual_grpo.plan.meter import Phase

LAUNCH_SECONDS = 14.6e-6
"""Between two kernels in eager mode: 35 ms a token over the 2,397 kernels that are counted in it."""
FLOPS_SHARE = 0.398
"""Of the dense rate: 2.54 s a PFLOP on an H100 of 989 TFLOP/s."""
KERNEL_FLOPS_SHARE, BANDWIDTH_SHARE = 0.45, 0.8
"""Of the card's rates, within one large matrix product or copy; assumed."""
HOST_BANDWIDTH = 25e9
"""Bytes a second from pinned host memory: PCIe 4.0 with 16 lanes; assumed."""
CALL_SECONDS = 7.0
"""Of one call of the stock pipeline, apart from these; a step of a training has no such call."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A call of GLM-Image's stock pipeline on one H100, in bfloat16, as diffusers' documentation gives it."""

    size: int
    images: int
    seconds: float
    peak_gb: float


CALIBRATION = (
    Published(size=1024, images=1, seconds=64, peak_gb=37.8),
    Published(size=1024, images=4, seconds=108, peak_gb=52),
    Published(size=512, images=4, seconds=39, peak_gb=37.8),
    Published(size=2048, images=1, seconds=253, peak_gb=45),
)


def seconds_of(phase: Phase, card: Card, dtype: str) -> float:
    """Estimated, on one ``card``."""
    flops_rate, byte_rate = KERNEL_FLOPS_SHARE * card.flops(dtype), BANDWIDTH_SHARE * card.bandwidth
    kernels = sum(count * max(flops / flops_rate, moved / byte_rate) for (flops, moved), count in phase.work.items())
    computing = max(phase.flops / (FLOPS_SHARE * card.flops(dtype)), kernels, phase.kernels * LAUNCH_SECONDS)
    return computing + phase.gathered / (BANDWIDTH_SHARE * card.link)
