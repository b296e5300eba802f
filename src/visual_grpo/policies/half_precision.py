"""What half precision does to log-probs that are computed twice, by another order of sums."""

from __future__ import annotations

import math
from typing import Any

import torch

ROUNDING = {torch.bfloat16: 0.003, torch.float16: 0.003 / 8}
"""Mean |log ratio| in nats, for one layer and logits of standard deviation 1, between decoding from a cache and scoring
whole sequences. It grows with the root of the layers and with the deviation (`benchmarks/rounding_gap.py`)."""


def expected_gap(network: Any, dtype: torch.dtype, deviation: float) -> float:
    """Mean |log ratio| in nats that rounding alone makes between sampler and replay of a language model.

    Args:
        network: a transformers model.
        deviation: standard deviation of its logits over the ids that may be drawn.
    """
    layers: int = network.config.get_text_config().num_hidden_layers
    return ROUNDING[dtype] * math.sqrt(layers) * deviation
