"""The phases of a step, told apart by the functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from visual_grpo.policies import token_policy
from visual_grpo.policies.denoising import Denoiser

CONDITIONS = "prompts and conditions"
OUTSIDE = "other"
"""Work that belongs to no other phase."""


@contextmanager
def phases_of(phases: Any, trainer: Any = None) -> Iterator[None]:
    """Enters ``phases.phase(name)`` for each phase of sampling and, with ``trainer``, of its whole step.

    Args:
        phases: `Meter` or `gpu_check.Stopwatch`.
    """
    marked: list[tuple[Any, str, str]] = [
        (token_policy, "sample_tokens", "tokens"),
        (Denoiser, "sample_path", "denoising"),
        (Denoiser, "integrate", "denoising"),
        (Denoiser, "pixels", "pictures (VAE)"),
    ]
    if hasattr(getattr(trainer, "policy", None), "joint_rollout"):
        marked.append((trainer.policy, "joint_rollout", CONDITIONS))
    for module, own in {} if trainer is None else trainer.modules.items():
        marked += [
            (own.policy, "rollout", CONDITIONS),
            (own, "update", f"{module}: replay and gradient"),
            (own.optimizer, "step", f"{module}: AdamW"),
        ]
        references = [name for name in ("reference_log_probs", "reference_means") if hasattr(own.policy, name)]
        marked += [(own.policy, name, f"{module}: reference") for name in references]
    with ExitStack() as stack:
        for owner, function, name in marked:
            # A contextlib context manager is also a decorator, and enters again at each call.
            stack.enter_context(replaced(owner, function, phases.phase(name)))
        yield


def replaced(owner: Any, name: str, by: Callable[[Callable[..., Any]], Any]) -> AbstractContextManager[Any]:
    """Puts ``by(owner.name)`` in the place of ``owner.name`` for a while."""
    return patch.object(owner, name, by(getattr(owner, name)))
