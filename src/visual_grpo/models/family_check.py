"""Compares a family of flow models with the plain pipeline of diffusers that it describes.

A family that differs from its pipeline trains without complaint, but trains a model that differs from the one that
users run. Shapes: B rows, C x h x w latents of one image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from PIL import Image
from torch import Tensor

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.images import stretch
from visual_grpo.common.types import Policy, PromptRecord, VideoSample
from visual_grpo.config import FlowConfig, LoraParams, ModelConfig, PolicyConfig, SamplerConfig, Task
from visual_grpo.models.execution import set_execution
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import FlowModel
from visual_grpo.models.flow.parts import packed
from visual_grpo.models.flow.transitions import ode_step
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.plain_pipeline import PlainRun, run_plain

C = TypeVar("C")

PROMPTS = (
    "a cat",
    "a red circle on a blue square, under it " + "a long row of small signs, " * 16,
    "一只戴着红帽子的猫",
)
"""Prompts of different lengths: rows of a batch are padded, and some are cut."""
RECORDS = tuple(PromptRecord(id=str(number), prompt=prompt) for number, prompt in enumerate(PROMPTS))
STEPS = 5
_LIMITS = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.02}
"""Largest relative differences: in half precision a pipeline rounds each step's state, and rows of a batch differ."""
_LEVELS = {"float32": 0, "bfloat16": 24, "float16": 4}
"""Largest differences of pictures, in levels of 255: pipelines rescale latents for the VAE in its precision."""
_NO_EFFECT = 1e-5
"""An adapter whose latents differ by less from the base model's is not loaded."""
_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda state: state,
    packed,
    lambda state: state.flatten(2).transpose(1, 2),
)
"""How pipelines hold [B, C, h, w]: as it is, patches of 2 x 2 as tokens, or each of h x w as a token."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison."""

    name: str
    difference: float
    limit: float
    hint: str
    """Where to look for the fault."""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit


def check_family(
    family: Family,
    path: str,
    config: ModelConfig,
    size: tuple[int, int],
    options: Any,
    guidance_scale: float,
    frames: int | None = None,
) -> list[Finding]:
    """Compares the family's model with the pipeline saved at ``path``.

    ``size``: (height, width) in pixels; one that is not square shows where they are swapped. ``frames``: of a video.
    Raises UserError for a family that is not a flow model behind a pipeline.
    """
    if not _is_comparable(family):
        raise UserError(
            f"check_model compares a flow model of one module with its pipeline; {family.name} has the modules"
            f" {', '.join(family.modules)} and the tasks {', '.join(family.tasks)}."
        )
    config = config.model_copy(update={"base_weights": "full", "options": options.model_dump()})
    policy = PolicyConfig(flow=FlowConfig(window_start=1, window_steps=3), denoise_batch=4)
    settings = ModelSettings(size=size, frames=frames, policy=policy, options=options)
    tasks = [task for task in family.tasks if task in ("t2i", "i2i")]
    drawn = 7 * len(tasks) + 1  # By each of both three times, and in the replay; one adapter.
    with TemporaryDirectory() as folder, console.progress("Comparing with the pipeline", drawn) as bar:
        pipeline = family.load(path, config)
        kinds = [records_of(task, family, size, Path(folder)) for task in tasks]
        cases = [
            (records, scale)
            for several in kinds
            for records, scale in ((several, 1.0), (several, guidance_scale), (several[:1], guidance_scale))
        ]
        runs = [
            run_plain(family, pipeline, settings, records, STEPS, scale, images=scale > 1 and len(records) > 1)
            for records, scale in bar.track(cases)
        ]
        built = family.build(pipeline, settings)
        set_execution(built.adapters.networks, built.modules, config)
        findings = [levels_finding(built.model, runs[0])]
        findings += [latents_finding(built.model, run, config.dtype) for run in bar.track(runs)]
        findings += [pixels_finding(built.model, run, config.dtype) for run in runs if run.images is not None]
        if (saved := getattr(pipeline, "saved_scheduler", None)) is not None:
            findings.append(_scheduler_finding(family, pipeline, saved, settings, runs[1]))
        (module,) = family.modules
        trained = trained_policy(built, module, guidance_scale)
        findings += [_replay_finding(trained, records, config.dtype) for records in bar.track(kinds)]
        base = runs[-2]
        form, latents = _form(built.model, base), ode_latents(built.model, base)
        adapters = Path(folder, "adapters")
        built.adapters.save(adapters)
        del built, trained, pipeline  # One model is in memory at a time.
        clear_device_cache(garbage_collection=True)
        pipeline = family.load(path, config)
        pipeline.load_lora_weights(str(adapters / module))
        run = run_plain(family, pipeline, settings, base.records, STEPS, guidance_scale)
        bar.advance()
    return [*findings, _adapter_finding(form, latents, base, run, config.dtype)]


def records_of(task: Task, family: Family, size: tuple[int, int], folder: Path) -> tuple[PromptRecord, ...]:
    """Returns `RECORDS`; for edits with sources in ``folder``, two of different sizes where the family takes two."""
    if task != "i2i":
        return RECORDS
    count = min(2, family.sources[-1]) if family.sources is not None else 1
    generator = np.random.default_rng(0)

    def drawn(record: PromptRecord, number: int) -> Path:
        """Blocks of random colours; the second source stands where the first lies."""
        blocks = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        file, (height, width) = folder / f"{record.id}-{number}.png", reversed(size) if number else size
        stretch(Image.fromarray(blocks), height, width).save(file)
        return file

    return tuple(
        replace(record, source_images=tuple(drawn(record, number) for number in range(count))) for record in RECORDS
    )


def check_before_training(
    family: Family, pipeline: Any, built: Model, settings: ModelSettings, task: Task, guidance_scale: float, dtype: str
) -> None:
    """Generates one prompt or edit (mixed: each) in two steps by both; raises UserError where they differ.

    Does nothing for a family without a plain pipeline (``plain_guidance`` None) and for models of a different kind.
    """
    if not _is_comparable(family):
        return
    with TemporaryDirectory() as folder:
        kinds: tuple[Task, ...] = ("t2i", "i2i") if task == "mixed" else (task,)
        several = [records_of(kind, family, settings.size, Path(folder))[:1] for kind in kinds]
        runs = [run_plain(family, pipeline, settings, records, 2, guidance_scale) for records in several]
        findings = [levels_finding(built.model, run) for run in runs[:1]]
        findings += [latents_finding(built.model, run, dtype) for run in runs]
    failed = [finding for finding in findings if not finding.passed]
    if failed:
        told = "\n".join(
            f"  {each.name}: {each.difference:.2g}, at most {each.limit:g}. See {each.hint}" for each in failed
        )
        raise UserError(
            f"The family {family.name} generates different latents than its pipeline {type(pipeline).__name__}, so it"
            f" would train a model that differs from the one that users run:\n{told}\nA family without a"
            " pipeline to be compared with sets Family.plain_guidance to None. The pipeline check_model runs"
            " all checks.",
            remedy="check_model",
        )


def levels_finding(model: FlowModel[C], run: PlainRun) -> Finding:
    """Compares sigmas, and timesteps in thousandths."""
    ours, plain = model.schedule(len(run.schedule)), run.schedule
    pairs = [*zip(ours.sigmas, plain.sigmas, strict=False)]
    pairs += [(timestep / 1000, other / 1000) for timestep, other in zip(ours.timesteps, plain.timesteps, strict=False)]
    same = (len(ours), len(ours.sigmas)) == (len(plain), len(plain.sigmas))
    return Finding(
        name="noise levels",
        difference=max(abs(level - other) for level, other in pairs) if same else math.inf,
        limit=1e-6,
        hint="schedule: the shift and what it depends on, and the sigmas that the pipeline's call passes.",
    )


def latents_finding(model: FlowModel[C], run: PlainRun, dtype: str) -> Finding:
    """Compares the latents of the deterministic sampler from the same noise."""
    form, count, guided = _form(model, run), len(run.records), run.guidance_scale > 1
    sources = " Of sources: their sizes, order, scale and positions." if run.records[0].source_images else ""
    guidance = " If only latents with guidance differ: its formula, the negative prompt, Family.plain_guidance."
    return Finding(
        name=f"latents, guidance {run.guidance_scale:g}, {counted(count, 'prompt')}" + _beside(run.records),
        difference=math.inf if form is None else far(form(ode_latents(model, run)).flatten(), run.last.flatten()),
        limit=_LIMITS[dtype],
        hint="latent_shape; conditions (prompt template, length, layer of the text encoder, padding); velocity (sign,"
        " scale of the timestep, order of packed latents, dtype)." + sources + guidance * guided,
    )


def pixels_finding(model: FlowModel[C], run: PlainRun, dtype: str) -> Finding:
    """Compares the pictures of the pipeline's latents, in levels of 255."""
    form, difference = _form(model, run), math.inf
    if form is not None and run.images is not None:
        latents = _unformed(form, run.last, (len(run.records), *model.latent_shape))
        parts = latents.split(1) if run.records[0].source_images else [latents]  # As the pipeline decoded them.
        samples = [sample for part in parts for sample in model.pixels(part)]
        pixels = torch.stack([sample.frames if isinstance(sample, VideoSample) else sample for sample in samples])
        if pixels.shape == run.images.shape:
            difference = float((pixels.int() - run.images.int()).abs().max())
    return Finding(
        name="pixels, of 255" + _beside(run.records),
        difference=difference,
        limit=_LEVELS[dtype],
        hint="pixels: scale and shift of the latents, dtype and layout of what the VAE gives.",
    )


@torch.no_grad()
def ode_latents(model: FlowModel[C], run: PlainRun) -> Tensor:
    """Returns the latents of ``run``'s records at its steps by the deterministic sampler, [B, C, h, w] float32."""
    return ode(model, run.records, _noise(model, run), run.guidance_scale, len(run.schedule))


@torch.no_grad()
def ode(
    model: FlowModel[C], records: Sequence[PromptRecord], noise: Tensor, guidance_scale: float, steps: int
) -> Tensor:
    """Takes the flow's Euler steps from ``noise``, both [B, C, h, w] float32."""
    schedule = model.schedule(steps)
    conditions = model.conditions(records, range(len(records)), guidance_scale)
    field, state = model.velocity(conditions, torch.arange(len(records))), noise
    for timestep, (sigma, next_sigma) in zip(schedule.timesteps, pairwise(schedule.sigmas), strict=True):
        velocity = field(state, timestep)
        if velocity.shape != state.shape:
            raise UserError(
                f"velocity gives {list(velocity.shape)} for latents {list(state.shape)}; expected the same."
            )
        state = ode_step(velocity, state, sigma, next_sigma)
    return state


def far(ours: Tensor, want: Tensor) -> float:
    """Returns the largest difference relative to the largest value."""
    return float((ours.float() - want.float()).abs().max() / want.float().abs().max())


def trained_policy(built: Model, module: str, guidance_scale: float) -> Policy[Any]:
    """Attaches an adapter that has an effect, and returns its policy."""
    built.adapters.attach({module: LoraParams(rank=4, alpha=12)}, 3)
    sampler = SamplerConfig(steps=STEPS, guidance_scale=guidance_scale)
    policy = built.policy(module, rollout=sampler, evaluation=sampler, kl_reference=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return policy


def replay_error(policy: Policy[Any], records: Sequence[PromptRecord]) -> float:
    """Returns the largest difference of log-probs between sampling and replay of all rows and of some, in units of a
    mean over the latent's elements."""
    got = policy.rollout(records, 2, torch.Generator().manual_seed(3))
    elements, errors = got.trajectory.states[0, 0].numel(), []
    for rows in (torch.arange(2 * len(records)), torch.tensor([2 * len(records) - 2, 1])):
        with torch.no_grad():
            replayed = torch.cat([chunk.log_probs for chunk in policy.replay(got.trajectory, rows)], 1)
        errors.append(float((replayed - got.log_probs[rows]).abs().max()) / elements**0.5)
    return max(errors)


def _scheduler_finding(family: Family, pipeline: Any, saved: Any, settings: ModelSettings, euler: PlainRun) -> Finding:
    """Names how Euler's steps differ from the scheduler's that the model was saved with, which is not a fault."""
    pipeline.scheduler, kept = saved, pipeline.scheduler
    try:
        run = run_plain(family, pipeline, settings, euler.records, len(euler.schedule), euler.guidance_scale)
    finally:
        pipeline.scheduler = kept
    return Finding(
        name=f"{STEPS} steps of Euler against {type(saved).__name__}",
        difference=far(euler.last, run.last),
        limit=math.inf,
        hint="",
    )


def _replay_finding(policy: Policy[Any], records: Sequence[PromptRecord], dtype: str) -> Finding:
    return Finding(
        name="replay against sampler" + _beside(records),
        difference=replay_error(policy, records),
        limit=_LIMITS[dtype],
        hint="velocity: a row depends on its neighbours (padding without a mask), or on what an earlier call left.",
    )


def _adapter_finding(
    form: Callable[[Tensor], Tensor] | None, ours: Tensor, base: PlainRun, trained: PlainRun, dtype: str
) -> Finding:
    """An adapter that changes nothing is not loaded, whatever the latents are."""
    changed = far(trained.last, base.last) > _NO_EFFECT
    return Finding(
        name="adapter in the plain pipeline",
        difference=far(form(ours).flatten(), trained.last.flatten()) if form is not None and changed else math.inf,
        limit=_LIMITS[dtype],
        hint="the module's targets and adapter class, and the latents above.",
    )


def _is_comparable(family: Family) -> bool:
    kinds = [module.kind for module in family.modules.values()]
    return family.plain_guidance is not None and kinds == ["flow"]


def _beside(records: Sequence[PromptRecord]) -> str:
    """Says that the records have sources."""
    count = len(records[0].source_images)
    return f", {counted(count, 'source')}" if count else ""


def _noise(model: FlowModel[C], run: PlainRun) -> Tensor:
    """Returns the noise that diffusers samples for rows with their own generators, [B, C, h, w] float32."""
    rows = [
        torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(row), dtype=run.first.dtype)
        for row in range(len(run.records))
    ]
    return torch.cat(rows).to(run.first.device).float()


def _form(model: FlowModel[C], run: PlainRun) -> Callable[[Tensor], Tensor] | None:
    """Returns how the pipeline holds latents; None where its noise is not of the model's ``latent_shape``."""
    noise, (*_, h, w), first = _noise(model, run), model.latent_shape, run.first.float().flatten()
    for form in _FORMS:
        possible = noise.numel() == first.numel() and (form is not packed or h % 2 == w % 2 == 0)
        if possible and torch.equal(form(noise).flatten(), first):
            return form
    return None


def _unformed(form: Callable[[Tensor], Tensor], held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Inverts ``form``, which only moves elements: its effect on their numbers tells where each came from."""
    numbers = form(torch.arange(held[0].numel()).view(1, *shape[1:])).flatten()
    return held.flatten(1)[:, numbers.argsort().to(held.device)].view(shape).float()
