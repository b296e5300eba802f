"""Which function of a step belongs to which of its phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from visual_grpo.plan.replaced import replaced
from visual_grpo.policies import token_policy
from visual_grpo.policies.denoising import Denoiser

CONDITIONS, TOKENS, DENOISING, PIXELS = "prompts and conditions", "tokens", "denoising", "pictures (VAE)"
REWARDS = "rewards"


class Phases(Protocol):
    """What counts or times them."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Within another phase what happens belongs to this one alone."""
        ...


@contextmanager
def phases_of_drawing(phases: Phases) -> Iterator[None]:
    """Of anything that generates samples."""
    with ExitStack() as stack:
        stack.enter_context(_phase(phases, token_policy, "sample_tokens", TOKENS))
        for name in ("sample_path", "integrate"):
            stack.enter_context(_phase(phases, Denoiser, name, DENOISING))
        stack.enter_context(_phase(phases, Denoiser, "pixels", PIXELS))
        yield


@contextmanager
def phases_of_training(phases: Phases, trainer: Any) -> Iterator[None]:
    """Of a trainer's step: what it draws is told apart by `phases_of_drawing`."""
    with ExitStack() as stack:
        if hasattr(trainer, "policy") and hasattr(trainer.policy, "joint_rollout"):
            stack.enter_context(_phase(phases, trainer.policy, "joint_rollout", CONDITIONS))
        for module, own in trainer.modules.items():
            stack.enter_context(_phase(phases, own.policy, "rollout", CONDITIONS))
            stack.enter_context(_phase(phases, own, "update", f"{module}: replay and gradient"))
            stack.enter_context(_phase(phases, own.optimizer, "step", f"{module}: AdamW"))
            for name in ("reference_log_probs", "reference_means"):
                if hasattr(own.policy, name):
                    stack.enter_context(_phase(phases, own.policy, name, f"{module}: reference"))
        yield


@contextmanager
def _phase(phases: Phases, owner: Any, function: str, name: str) -> Iterator[None]:
    def within(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with phases.phase(name):
                return real(*args, **kwargs)

        return run

    with replaced(owner, function, within):
        yield
