"""Sets the number of threads that torch computes with."""

from __future__ import annotations

import torch

from visual_grpo.hardware.freed_memory import keep_freed_memory


def use_threads(count: int) -> None:
    """Sets torch's thread count for this process; results can differ in the last bits between counts."""
    torch.set_num_threads(count)
    keep_freed_memory()
