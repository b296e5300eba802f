"""Makes glibc keep the memory of freed CPU tensors for reuse."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameter numbers of mallopt(3), and the environment variables that set them.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_SET_BY_THE_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
_KEPT = 512 * 2**20
_FROM_THE_HEAP = 32 * 2**20
"""Bytes; the largest value that glibc accepts."""


def keep_freed_memory() -> None:
    """Makes glibc keep up to 512 MiB of freed memory for later tensors; does nothing with other C libraries.

    By default glibc returns the activations of a forward pass to the kernel, how many differs between processes, and
    the kernel zeroes the pages again on the next allocation: 5 to 15 % of a rollout's CPU time (benchmarks/cores.py).
    Results do not change. The environment variables ``MALLOC_*`` and ``GLIBC_TUNABLES`` take precedence.
    """
    if platform.libc_ver()[0] != "glibc" or _SET_BY_THE_USER & os.environ.keys():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    libc.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)
