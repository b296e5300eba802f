"""What becomes of the memory of freed tensors on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform

# mallopt(3)'s numbers of what can be set, and its environment variables.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_SET_BY_THE_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
_KEPT = 512 * 2**20
_FROM_THE_HEAP = 32 * 2**20
"""Bytes; glibc takes no more."""


def keep_freed_memory() -> None:
    """Has glibc keep up to half a GiB of freed memory for the next tensors; other C libraries stay as they are.

    By itself glibc gives the activations of a forward back to the kernel, more or less of them from one process to the
    next, and their pages have to be cleared again: 5 to 15 % of a rollout's CPU time (benchmarks/cores.py). What is
    computed does not change. The environment (``MALLOC_*``, ``GLIBC_TUNABLES``) still wins.
    """
    if platform.libc_ver()[0] != "glibc" or _SET_BY_THE_USER & os.environ.keys():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    libc.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)
