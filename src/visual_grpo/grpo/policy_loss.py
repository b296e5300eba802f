"""The configured loss of an update: masks, aggregation, KL and counts around an algorithm of `losses`, and refusals of
what does not go together.

Shapes: B rows in group-major order (N prompts x G samples), S decision steps; log-probs, ratios, losses and weights are
[B, S] float32, advantages [B] float32, masks [B, S] bool with True = counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.decisions import Likelihoods, Matches, k3
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.losses import LOSSES, Aggregation, average_decay, is_forward_process


def conflicts(config: GRPOConfig, module: str, dtype: str) -> Iterator[str]:
    """Yields a sentence for each setting of a ``module`` that its loss does not read, or that another one rules out.

    ``dtype``: of the weights, as a text.
    """
    loss, own = config.loss, {field.name for field in fields(LOSSES[config.loss])}
    clips = ("clip_low", "clip_high")
    if unread := [name for name in clips if getattr(config, name) is not None and name not in own]:
        yield (
            f"grpo.loss is {loss}, which has no {' and no '.join(unread)}: {module} would not be clipped. Set"
            f" {'it' if len(unread) == 1 else 'them'} to null, or set a loss that clips, such as grpo."
        )
    if config.target_kl is not None and LOSSES[loss].average_samples and average_decay(config):
        yield (
            f"grpo.target_kl compares {module} with its weights at the rollout, but {loss} samples with an average of"
            " them. Set grpo.average_decay=0, or leave target_kl out."
        )
    if config.sampler_correction is not None and is_forward_process(loss):
        yield (
            f"grpo.sampler_correction weighs decisions by their log-probs, but {loss} takes a sample without any. Leave"
            " it out."
        )
    elif config.sampler_correction is not None and not config.replays(dtype):
        yield (
            "grpo.sampler_correction corrects to the replay, so grpo.old_log_probs has to be replay; it is"
            f" {config.old_log_probs} with model.dtype {dtype}."
        )


def step_weights(mask: Tensor, aggregation: Aggregation, *, counted_rows: int, counted_steps: int, rows: int) -> Tensor:
    """Weights w, [B, S], such that the loss of the whole batch is ``sum(w * loss)``.

    The counts cover the *whole* batch (all micro-batches, all ranks): rows with a counted
    step, counted steps, all rows. So micro-batches add up to exactly the full batch.
    """
    weights = mask.float()
    if aggregation == "row_mean":
        return weights / (mask.sum(1, keepdim=True).clamp(min=1) * max(counted_rows, 1))
    if aggregation == "step_mean":
        return weights / max(counted_steps, 1)
    return weights / (rows * mask.shape[1])


class PolicyLoss:
    """The configured loss of one optimizer update on ``batches``, normalised by the counts of all of them."""

    def __init__(self, config: GRPOConfig, batches: Sequence[TrainBatch[Any]], *, reward_only: bool = False) -> None:
        """``reward_only`` leaves out the KL, which no reward decides."""
        self.config, self.kl_weight = config, 0.0 if reward_only else config.kl_weight
        self.algorithm = LOSSES[config.loss].of(config)
        masks = [batch.rollout.mask[batch.rows] for batch in batches]
        self.counts = {
            "counted_rows": sum(int(mask.any(1).sum()) for mask in masks),
            "counted_steps": sum(int(mask.sum()) for mask in masks),
            "rows": sum(len(mask) for mask in masks),
        }

    def __call__(
        self, decisions: Likelihoods, batch: TrainBatch[Any], rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Returns the share of the loss of some decisions with their metrics.

        Args:
            decisions: [b, s] of ``rows`` under the current policy.
            rows: [b] rows of the batch's rollout.

        Returns:
            The loss, a scalar with gradient; metrics of each step, [b, s]; and [b, s] bool, the steps that count.
        """
        mask, steps = batch.rollout.mask[rows], decisions.steps
        counted = mask[:, steps]
        self._refuse_unfit(decisions, whole=counted.shape == mask.shape)
        loss, metrics = self.algorithm(decisions, batch.advantages[rows], counted)
        if self.kl_weight:
            assert decisions.kl is not None
            loss = loss + self.kl_weight * decisions.kl
        if (cap := self.config.sampler_correction) is not None:
            # Truncated importance sampling (Ionides 2008). Rounding makes the sampler a slightly different policy than
            # the replay: the weight min(pi_old / pi_sampler, cap) turns averages over its samples into averages under
            # pi_old, and the cap bounds their variance.
            loss = loss * decisions.sampler_ratio.clamp(max=cap)
        weights = step_weights(mask, self.algorithm.aggregation, **self.counts)[:, steps]
        # Uncounted steps may hold anything, even inf: where() keeps them out of value and gradient.
        total = torch.where(counted, weights * loss, 0.0).sum()
        with torch.no_grad():
            # k3 of the old policy against the new one: how far this rollout's updates have moved it.
            measured = {**metrics, "approx_kl": k3(decisions.log_ratio)}
            if decisions.kl is not None:
                measured["kl"] = decisions.kl
            return total, {name: torch.where(counted, value, 0) for name, value in measured.items()}, counted

    def _refuse_unfit(self, decisions: Likelihoods, *, whole: bool) -> None:
        refuse_unfit(self.config.loss, decisions)
        if self.algorithm.whole_rows and not whole:
            raise UserError(
                f"grpo.loss is {self.config.loss}, which needs all decisions of a row at once, but the policy replays"
                " them one at a time. Use a different loss, or train one denoising step (policy.flow.window_steps=1)."
            )
        if self.kl_weight and decisions.kl is None:
            raise UserError(
                f"kl_weight is {self.kl_weight:g}, but the policy's replay gives no KL to its reference. Make"
                " the policy with it, as load_policy(..., kl_reference=True) does, or set kl_weight to 0."
            )


def refuse_unfit(loss: str, decisions: Likelihoods) -> None:
    """Raises UserError where the policy's replay does not give what ``loss`` is computed from."""
    needs = LOSSES[loss].needs
    if not isinstance(decisions, needs):
        made = "Make the policy with load_policy(..., forward_process=True), or use a different loss."
        raise UserError(
            f"grpo.loss is {loss}, which needs {needs.described}. The policy's replay gives none."
            f" {made if needs is Matches else 'Use a different loss.'}"
        )
