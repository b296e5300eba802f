"""Ratio check: before the first update, the replay gives the sampler's log-probs."""

from __future__ import annotations

from visual_grpo.common.errors import UserError

# Largest mean and single |log ratio| accepted, in nats. float32 was measured at 2e-5 (max); a wrong
# replay (position ids, temperature, source image) is 0.05 to 3 in the mean. Half precision rounds
# logits to 8 (bf16) or 11 (fp16) bits, so single steps are far noisier than their mean.
TOLERANCES = {
    "float32": (2e-5, 2e-4),
    "float16": (5e-3, 1e-1),
    "bfloat16": (4e-2, 1.0),
}
MEAN_FACTOR, MAX_FACTOR = 2.0, 30.0
"""Mean and largest |log ratio| accepted, in units of the mean that rounding is expected to make."""


class RatioCheckError(UserError):
    """The replayed log-probs differ from the sampler's."""


def check_ratio(mean: float, maximum: float, dtype: str, rounding: float = 0.0, tolerance: float | None = None) -> None:
    """Raises RatioCheckError if |log ratio| before the first update is above the numeric floor.

    Args:
        mean, maximum: of |log ratio| over all counted steps, nats.
        dtype: of the policy's weights; chooses the floor.
        rounding: mean |log ratio| that rounding is expected to make in this model; replaces the floor of the dtype.
        tolerance: replaces both floors.
    """
    mean_floor, max_floor = TOLERANCES[dtype]
    if rounding:
        mean_floor, max_floor = MEAN_FACTOR * rounding, MAX_FACTOR * rounding
    if tolerance is not None:
        mean_floor, max_floor = tolerance, tolerance
    if mean <= mean_floor and maximum <= max_floor:
        return
    raise RatioCheckError(
        "The ratio check stopped the run before its first update.\n"
        f"  expected: |log ratio| between sampler and replay at most {max_floor:g}"
        f" (mean {mean_floor:g}) in {dtype}\n"
        f"  measured: max {maximum:.3g}, mean {mean:.3g}\n"
        "The loss would train a distribution that differs from the sampled one. Usual causes: sampling and"
        " replay differ in precision, attention kernel, temperature or vocabulary restriction, position ids,"
        " classifier-free guidance or source image; dropout is on; the model was changed between the two.\n"
        "If the difference is only this machine's rounding, set grpo.ratio_tolerance above what was measured."
    )
