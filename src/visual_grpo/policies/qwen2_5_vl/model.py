"""Qwen2.5-VL: the model with its adapter, and the policy whose decisions are an answer's tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.config import ModelConfig, PolicyConfig, SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.hardware.device import resolve_device
from visual_grpo.policies import lora
from visual_grpo.policies.glm_image.loading import check_model_path
from visual_grpo.policies.glm_image.model import SEED_RANGE
from visual_grpo.policies.lora import Adapter, PeftAdapter
from visual_grpo.policies.qwen2_5_vl.answer_model import AnswerModel, AnswerTrajectory, SampledAnswers
from visual_grpo.policies.token_policy import TokenPolicy
from visual_grpo.policies.tokens import TokenSampler
from visual_grpo.third_party_output import hidden_progress_bars
from visual_grpo.types import PromptRecord, Rollout, Sample

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor


def load_qwen(path: str, config: ModelConfig) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A folder or hub id by plain ``from_pretrained``, frozen and in evaluation mode.

    Raises UserError if there is nothing at ``path`` or it is no Qwen2.5-VL.
    """
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    check_qwen_path(path)
    with hidden_progress_bars() if Path(path).exists() else nullcontext():
        try:
            processor = AutoProcessor.from_pretrained(path)
            model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=getattr(torch, config.dtype))
        except (OSError, ValueError) as error:  # What the hub's client and transformers raise for what they lack.
            raise UserError(
                f"The model {path!r} cannot be loaded: {error}\n"
                "A hub id needs a network or a download made before; a folder must be whole."
            ) from error
    return model.eval().requires_grad_(False).to(resolve_device(config.device)), processor


def check_qwen_path(path: str) -> None:
    """Raises UserError if ``path`` is a folder, or can be nothing else, and holds no model."""
    check_model_path(path, "config.json", "Qwen2_5_VLForConditionalGeneration.save_pretrained")


class QwenVl:
    """A model that answers queries about images, with the LoRA adapter that is trained."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        processor: Qwen2_5_VLProcessor,
        config: PolicyConfig,
    ) -> None:
        """No adapter is attached yet."""
        self.model, self.config = model, config
        self.adapter: Adapter | None = None
        self.answers = AnswerModel(
            model,
            processor,
            instruction=config.vl.instruction,
            max_tokens=config.vl.max_tokens,
            batch=config.rollout_batch,
            share_prefix=config.share_prefix and not config.gradient_checkpointing,
        )

    def attach(self, seed: int) -> None:
        """A fresh adapter, which changes nothing until it is trained; ``seed`` decides its initial values."""
        self.adapter = PeftAdapter.attach(self.model, self.config.lora, lora.VL_TARGETS, seed)

    def load(self, folder: Path) -> None:
        """The saved adapter, for sampling only."""
        self.adapter = PeftAdapter.load(self.model, folder / "vl")

    @property
    def attached(self) -> Adapter:
        if self.adapter is None:
            raise UserError("This Qwen2.5-VL has no adapter yet: call attach(seed) or load(folder) first.")
        return self.adapter

    def save_adapters(self, folder: Path) -> None:
        """``folder/vl``, as ``PeftModel.from_pretrained`` reads it."""
        self.attached.save(folder / "vl")

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """The adapter's tensors, as ``vl/name``."""
        return {f"vl/{name}": value for name, value in self.attached.state().items()}

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts tensors of ``adapter_state_dict`` back."""
        self.attached.load_state({name.removeprefix("vl/"): value for name, value in state.items()})

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One TextSample a record; each depends on its record, its seed and the weights."""
        return list(self.answers.samples(self.sample(records, seeds, sampler).trajectory))

    @torch.no_grad()
    def sample(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> SampledAnswers:
        """B answers under the present adapter, merged into the weights meanwhile."""
        self.model.eval()
        with lora.merged(self.model):
            return self.answers.sample(records, seeds, self._sampler(sampler))

    def _sampler(self, sampler: SamplerConfig) -> TokenSampler:
        """What is None is the model's own generation_config, which decodes greedily where it does not sample."""
        own = self.model.generation_config
        greedy = None if own.do_sample else 1
        top_k = sampler.top_k if sampler.top_k is not None else (greedy or own.top_k or 0)
        top_p = sampler.top_p if sampler.top_p is not None else own.top_p
        temperature = sampler.temperature if sampler.temperature is not None else own.temperature
        return TokenSampler(temperature=temperature or 1.0, top_p=top_p or 1.0, top_k=top_k)


class QwenVlPolicy(TokenPolicy[AnswerTrajectory]):
    """Satisfies ``types.Policy[AnswerTrajectory]``."""

    def __init__(self, qwen: QwenVl, sampler: SamplerConfig, *, kl_reference: bool = False) -> None:
        """A policy on the adapter of ``qwen``.

        Args:
            sampler: how training samples are drawn; no top-p or top-k.
            kl_reference: keep the reference's log-probs with every rollout, for a KL penalty.
        """
        super().__init__(qwen.model, qwen.attached, qwen.answers, sampler, qwen.config)
        self.qwen, self.kl_reference = qwen, kl_reference

    @torch.no_grad()
    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[AnswerTrajectory]:
        """G answers to each record. All randomness comes from seeds drawn from ``generator``."""
        started = time.perf_counter()
        rows = [record for record in prompts for _ in range(group_size)]
        seeds: list[int] = torch.randint(SEED_RANGE, (len(rows),), generator=generator).tolist()
        sampled = self.qwen.sample(rows, seeds, self.sampler)
        trajectory = sampled.trajectory
        seconds = time.perf_counter() - started
        if self.kl_reference:
            trajectory = replace(trajectory, reference_log_probs=self.reference_log_probs(trajectory))
        counted = trajectory.mask.sum()
        return Rollout(
            prompts=rows,
            samples=self.qwen.answers.samples(trajectory),
            trajectory=trajectory,
            log_probs=sampled.log_probs,
            mask=trajectory.mask,
            stats={
                "entropy": float(sampled.entropy[trajectory.mask].mean()),
                "answer_tokens": float(counted / len(rows)),
                "seconds/tokens": seconds,
                "speed/tokens_per_second": float(counted / seconds),
            },
        )
