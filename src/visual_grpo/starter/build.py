"""Builds what the default configuration starts from: the drawn dataset and the small base model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from visual_grpo.common.console import progress
from visual_grpo.common.digests import record_content, recorded_content
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import DataConfig, StarterConfig, World
from visual_grpo.config.data import DEFAULT_FAMILIES
from visual_grpo.starter.pretraining import Advance, Job, digest_of, run_side_by_side, write_once
from visual_grpo.starter.scenes import draw_scene_records
from visual_grpo.starter.shapes.dataset import draw_dataset
from visual_grpo.starter.words import draw_words

_VERSION = 7
"""Raised when the same configuration gives other weights."""
_GLM = "visual_grpo.starter.glm_image"
_PRETRAININGS: Mapping[tuple[World, str], tuple[str, ...]] = {
    ("shapes", "glm_image"): (
        f"{_GLM}.pretrain_decoder:pretrain_decoder_half",
        f"{_GLM}.pretrain_ar:pretrain_language_half",
    ),
    ("shapes", "sd3"): ("visual_grpo.starter.flow_models:pretrain_sd3",),
    ("shapes", "flux"): ("visual_grpo.starter.flow_models:pretrain_flux",),
    ("shapes", "z_image"): ("visual_grpo.starter.flow_models:pretrain_z_image",),
    ("words", "glm_image"): (
        f"{_GLM}.pretrain_on_words:pretrain_decoder_half",
        f"{_GLM}.pretrain_on_words:pretrain_language_half",
    ),
    ("scenes", "qwen2_5_vl"): ("visual_grpo.starter.pretrain_vl:pretrain_vl",),
}
"""The functions that pretrain a family on a world, the longer function first."""


def build_starter(config: StarterConfig, data: DataConfig, seed: int, family: str | None = None) -> dict[str, Any]:
    """Draws the dataset and pretrains a base model of ``family``, each unless it is there for the same arguments.

    ``family`` None is the world's default. ``config.processes`` does not change the weights. Of what is returned,
    ``digest`` is of the model's configuration and ``content`` of its files.
    """
    family = family or DEFAULT_FAMILIES[config.world]
    check_starter(config.world, family)
    draw_world(config, data, seed)
    folder, facts = Path(config.model), _facts(config, data, seed, family)
    digest = write_once(folder, facts, lambda fresh: _pretrain(fresh, config, data, seed, family))
    return {"dataset": config.dataset, "model": config.model, "digest": digest, "content": recorded_content(folder)}


def check_starter(world: World, family: str) -> None:
    """Raises UserError where no small model of ``family`` can be pretrained on ``world``."""
    families = [name for drawn, name in _PRETRAININGS if drawn == world]
    if family not in families:
        raise UserError(
            f"model.path is null, and the starter pretrains no small {family} on starter.world {world}; it pretrains"
            f" {', '.join(families)}. Name a saved model with model.path, or another model.family."
        )


def draw_world(config: StarterConfig, data: DataConfig, seed: int) -> None:
    folder = Path(config.dataset)
    if config.world == "words":
        draw_words(folder, config.records_per_prompt, data.height, data.width)
    elif config.world == "scenes":
        draw_scene_records(folder, config.records_per_prompt, data.height, data.width, seed)
    else:
        draw_dataset(folder, config.records_per_prompt, data.height, data.width, seed, task=data.task)


def model_digest(config: StarterConfig, data: DataConfig, seed: int, family: str | None = None) -> str:
    """Returns a digest of everything that the base model's weights depend on."""
    return digest_of(_facts(config, data, seed, family or DEFAULT_FAMILIES[config.world]))


def _facts(config: StarterConfig, data: DataConfig, seed: int, family: str) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "world": config.world,
        "family": family,
        "task": data.task,
        "steps": _steps(config, data, family),
        "seed": seed,
        "height": data.height,
        "width": data.width,
    }


def _steps(config: StarterConfig, data: DataConfig, family: str) -> dict[str, int]:
    if family == "qwen2_5_vl":
        return {"vl": config.vl_steps}
    steps = {"vae": config.vae_steps, "dit": config.dit_steps}
    kinds = 2 if data.task == "mixed" else 1
    return {**steps, "ar": config.ar_steps * kinds} if family == "glm_image" else steps


def _pretrain(folder: Path, config: StarterConfig, data: DataConfig, seed: int, family: str) -> None:
    steps, is_glm = _steps(config, data, family), family == "glm_image"
    parts = folder / "parts" if is_glm else folder
    job = Job(folder=parts, height=data.height, width=data.width, seed=seed, task=data.task, steps=steps)
    # Side by side, the time left is that of the half that takes longer.
    counted = {"vae", "dit"} if is_glm and config.processes > 1 else steps.keys()
    tasks = [partial(_pretrain_alone, path, job) for path in _PRETRAININGS[config.world, family]]
    with _module_progress(steps, counted) as advance:
        run_side_by_side(tasks, config.processes, advance)
    if is_glm:
        with hidden_progress_bars():
            resolve_name(f"{_GLM}.modules:save_pipeline")(job, folder)
    record_content(folder)


def _pretrain_alone(path: str, job: Job, advance: Advance) -> None:
    """Runs in a separate process; one thread makes its weights independent of the number of cores."""
    torch.set_num_threads(1)
    with hidden_progress_bars():
        resolve_name(path)(job, advance)


@contextmanager
def _module_progress(steps: Mapping[str, int], counted: Collection[str]) -> Iterator[Advance]:
    """Shows one bar over the steps of the ``counted`` modules, with every module's share beside it."""
    reached, again = dict.fromkeys(steps, 0), 0
    with progress("Pretraining the base model", sum(steps[module] for module in counted)) as bar:

        def advance(module: str, done: int) -> None:
            nonlocal again
            if done <= reached[module]:  # Only the VAE starts again, where its result is not good enough.
                again += 1
                bar.note(f"The VAE dulls a colour: it is pretrained once more (number {again}), from other weights")
            taken = done - reached[module] if module in counted else 0
            bar.advance(taken, **{module: f"{done / steps[module]:.0%}"})
            reached[module] = done

        yield advance
