"""Random streams that an error leaves where they were, so that what it broke off can be done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from visual_grpo.grpo.checkpoint import random_states, restore_random_states


@contextmanager
def rewound_by_errors(generator: torch.Generator) -> Iterator[None]:
    """Puts ``generator`` and the process's random states back where they were if the block raises anything."""
    own, everybodys = generator.get_state(), random_states()
    try:
        yield
    except BaseException:
        generator.set_state(own)
        restore_random_states(*everybodys)
        raise
