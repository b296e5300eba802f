"""Where the host waits for the GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Source line -> how often an operation there made the host wait while this lasted; CUDA itself tells.

    Other warnings are not shown meanwhile.
    """
    found: Counter[str] = Counter()
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(
        f"{_short(each.filename)}:{each.lineno}" for each in caught if "synchronizing CUDA" in str(each.message)
    )


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].rpartition("/src/")[2]
