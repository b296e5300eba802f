"""What policies that train an adapter have in common.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from visual_grpo.config import PolicyConfig, SamplerConfig
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.policies.lora import Adapter
from visual_grpo.types import ReplayChunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterPolicy:
    """The part of ``types.Policy`` that an adapter does."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.adapter.parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(state)

    def save_adapter(self, folder: Path | str) -> None:
        """As peft's ``PeftModel.from_pretrained`` or diffusers' ``load_lora_adapter(folder, prefix=None)`` reads it."""
        self.adapter.save(folder)


class SampledRows(Protocol):
    """What is kept of B rows of sampled tokens."""

    @property
    def tokens(self) -> Tensor:
        """[B, T] int64."""
        ...

    @property
    def reference_log_probs(self) -> Tensor | None:
        """[B, T] float32 under the adapter-disabled model; None without a KL penalty."""
        ...


Sampled = TypeVar("Sampled", bound=SampledRows)
SampledIn = TypeVar("SampledIn", bound=SampledRows, contravariant=True)


class TokenScorer(Protocol[SampledIn]):
    """A language model that scores the tokens that it sampled."""

    def log_probs(self, trajectory: SampledIn, rows: Tensor, temperature: float) -> Tensor:
        """[b, T] float32 of the tokens of ``rows`` ([b]) under the weights as they are now, on the CPU."""
        ...


class TokenPolicy(AdapterPolicy, Generic[Sampled]):
    """All of ``types.Policy`` but the rollout, for policies whose decisions are tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        scorer: TokenScorer[Sampled],
        sampler: SamplerConfig,
        config: PolicyConfig,
    ) -> None:
        """
        Args:
            model: what ``adapter`` is on and ``scorer`` runs.
            sampler: how training samples are drawn; no top-p or top-k.
        """
        super().__init__(adapter)
        self.model, self.scorer, self.sampler = model, scorer, sampler
        self.temperature = 1.0 if sampler.temperature is None else sampler.temperature
        self.batch, self.checkpointing = config.rollout_batch, config.gradient_checkpointing
        if self.checkpointing:
            # use_reentrant=False: a reentrant checkpoint drops the gradient when its input needs none.
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    def replay(self, trajectory: Sampled, rows: Tensor) -> Iterator[ReplayChunk]:
        """One chunk: all T tokens of ``rows`` under the current adapter, with gradient."""
        log_probs = self._log_probs(trajectory, rows)
        kl = None
        if trajectory.reference_log_probs is not None:
            kl = k3_kl(log_probs, trajectory.reference_log_probs[rows])
        yield ReplayChunk(steps=slice(0, log_probs.shape[1]), log_probs=log_probs, kl=kl)

    @torch.no_grad()
    def reference_log_probs(self, trajectory: Sampled) -> Tensor:
        """[B, T] float32 with the adapter switched off."""
        with self.adapter.disabled():
            batches = torch.arange(len(trajectory.tokens)).split(self.batch)
            return torch.cat([self._log_probs(trajectory, rows) for rows in batches])

    def _log_probs(self, trajectory: Sampled, rows: Tensor) -> Tensor:
        # No module has dropout, so the mode changes nothing else: checkpointing is active only in training mode.
        self.model.train(self.checkpointing)
        return self.scorer.log_probs(trajectory, rows, self.temperature)
