"""A fixed seed per sample, so that baseline and trained samples can be paired."""

from __future__ import annotations

import hashlib


def image_seed(seed: int, record_id: str, index: int) -> int:
    """A seed in [0, 2**63) for image ``index`` of a record: the same on every machine and Python version."""
    key = f"{seed}\0{index}\0{record_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
