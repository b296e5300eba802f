"""Warnings about settings and rewards that are allowed but probably mistaken."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from pydantic import BaseModel, ValidationError

from visual_grpo.common.errors import counted
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.models.model import DistributedModel, Model
from visual_grpo.models.run_spec import RunSpec

MEASURED_PROMPTS = 2000
"""Prompts whose tokens are counted, a second's work."""
EQUAL_STEPS = 5
"""Steps in a row without any difference in reward within a prompt, after which `equal_rewards` says so."""


def likely_mistakes(
    spec: RunSpec,
    model: Model | DistributedModel,
    train_prompts: Sequence[PromptRecord],
    eval_prompts: Sequence[PromptRecord],
) -> Iterator[str]:
    """Yields a sentence for each mistake that shows before the first step."""
    yield from _different_guidance(spec)
    yield from _unread_guidance(spec, model.local if isinstance(model, DistributedModel) else model)
    yield from _idle_share(spec)
    yield from _long_warmup(spec)
    yield from _idle_patience(spec.config)
    yield from _repeated_prompts(spec, train_prompts)
    yield from _cut_prompts(spec, model, [*train_prompts, *eval_prompts])


def equal_rewards(spec: RunSpec, history: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yields a sentence for a module that has had nothing to learn from for `EQUAL_STEPS`, in the last of them."""
    most = min(EQUAL_STEPS, spec.config.grpo.steps)
    *before, last = history[-most - 1 :]
    for name in (name for name in last if name.endswith("zero_variance_share")):
        equal = [row.get(name) == 1 for row in (*before, last)]
        if equal[-most:] == [True] * most and equal[:-most] != [True]:
            module = name.rpartition("/")[0] or spec.modules[0]
            yield (
                f"in the last {counted(most, 'step')} up to step {last['step']:.0f}, all samples of each prompt had the"
                f" same reward, so {module} learned nothing. Use a finer reward or a larger grpo.group_size, or stop."
            )


def _different_guidance(spec: RunSpec) -> Iterator[str]:
    sampling = spec.config.sampling
    rollout, judged = sampling.rollout.guidance_scale, sampling.eval.guidance_scale
    # What a forward process learns without guidance is kept with it (docs/experiments/words.md).
    free = spec.forward_process and rollout == 1
    if not free and rollout is not None and judged is not None and rollout != judged:
        yield (
            f"training samples are generated with guidance {rollout:g}, the eval sampler has {judged:g}. What is"
            " learned at one overshoots or falls short at the other; let sampling.rollout.guidance_scale and"
            " sampling.eval.guidance_scale agree."
        )


def _unread_guidance(spec: RunSpec, model: Model) -> Iterator[str]:
    """A `FlowModel` that does not read a guidance scale has a true attribute ``unguided``."""
    flows = [name for name in spec.modules if spec.family.modules[name].kind == "flow"]
    unread = [
        name
        for name, sampler in spec.denoised.items()
        if any(sampler.denoising()[1] > 1 and getattr(model.part(flow, sampler), "unguided", False) for flow in flows)
    ]
    if unread:
        yield (
            f"the guidance of {', '.join(unread)} changes nothing: this model was distilled to work without. Set"
            " guidance_scale to 1, also in evaluation.controls."
        )


def _idle_share(spec: RunSpec) -> Iterator[str]:
    flow, steps = spec.config.policy.flow, spec.rollout.steps or 0
    window = flow.stochastic_steps(steps) * flow.draws
    trains_flow = any(spec.family.modules[name].kind == "flow" for name in spec.modules)
    if trains_flow and flow.train_share < 1 and flow.trained_steps(window) == window:
        yield (
            f"policy.flow.train_share is {flow.train_share:g}, which rounds to all of"
            f" {counted(window, 'stochastic step')}. Set it to 1 or, where there are several, lower it."
        )


def _long_warmup(spec: RunSpec) -> Iterator[str]:
    for module in spec.modules:
        grpo = spec.config.grpo_of(module)
        updates = grpo.steps * grpo.updates_per_rollout
        if grpo.warmup_steps > updates:
            yield (
                f"grpo.warmup_steps is {grpo.warmup_steps} optimiser updates, but {module} has only {updates}: its"
                f" learning rate ends at {updates / grpo.warmup_steps:.0%} of grpo.learning_rate."
            )


def _idle_patience(config: Parameters) -> Iterator[str]:
    """The first evaluation is what the next are compared with."""
    patience, every = config.train.early_stopping_patience, config.evaluation.every
    if patience and (patience + 1) * every >= config.grpo.steps:
        yield (
            f"train.early_stopping_patience is {counted(patience, 'evaluation')} after the first, one each"
            f" {counted(every, 'step')}: it cannot end the training before step {config.grpo.steps}, the last."
        )


def _repeated_prompts(spec: RunSpec, prompts: Sequence[PromptRecord]) -> Iterator[str]:
    asked = max(spec.config.grpo_of(module).prompts_per_step for module in spec.modules)
    fewest, of_kind = fewest_of_a_kind(prompts)
    if asked > fewest:
        yield (
            f"grpo.prompts_per_step is {asked}, more than the {counted(fewest, 'training prompt')}{of_kind}: a step"
            " repeats prompts, each time with a new group of samples."
        )


def fewest_of_a_kind(prompts: Sequence[PromptRecord]) -> tuple[int, str]:
    """The number of prompts of the rarest kind, and which kind it is in words, if there are several.

    A step takes prompts with one number of source images (`PromptOrder`).
    """
    kinds = Counter(len(record.source_images) for record in prompts)
    images, fewest = min(kinds.items(), key=itemgetter(1))
    return fewest, f" with {counted(images, 'source image')}" if len(kinds) > 1 else ""


def _cut_prompts(spec: RunSpec, model: Model | DistributedModel, records: Sequence[PromptRecord]) -> Iterator[str]:
    if (count := model.text_tokens) is None:
        return
    prompts = dict.fromkeys(record.prompt for record in records)
    longest = heapq.nlargest(MEASURED_PROMPTS, prompts, key=len)
    cut = [(prompt, tokens, limit) for prompt in longest for tokens, limit in [count(prompt)] if tokens > limit]
    if cut:
        prompt, tokens, limit = cut[0]
        yield (
            f"{len(cut)} of {len(prompts)} prompts (the {len(longest)} longest were looked at) have more tokens than"
            " the model reads; it cannot tell apart prompts that differ only in the rest. Of"
            f" {prompt[:80]!r}... it reads {limit} of {tokens} tokens. Shorten them"
            f"{', or raise model.options.max_sequence_length' * can_be_raised(spec.options, limit)}."
        )


def can_be_raised(options: BaseModel, limit: int) -> bool:
    """Returns whether the option ``max_sequence_length`` of a family is what limits a prompt to ``limit`` tokens, and
    may be higher. A pipeline can read fewer than the option says: Stable Diffusion 3 without its T5."""
    if getattr(options, "max_sequence_length", None) != limit:
        return False
    try:
        type(options).model_validate(options.model_dump() | {"max_sequence_length": limit + 1})
    except ValidationError:
        return False
    return True
