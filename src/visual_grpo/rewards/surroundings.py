"""What a reward's code may change for the whole process, and what is put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def kept_surroundings() -> Iterator[None]:
    """Puts back the working folder, and torch's gradient mode and default dtype.

    Scripts that score pictures often switch gradients off for themselves; the training would lose its own. A child
    process that the code forks ends where it would return: it must not go on with the training beside its parent.
    """
    process, folder = os.getpid(), Path.cwd()
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
        os.chdir(folder)
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
