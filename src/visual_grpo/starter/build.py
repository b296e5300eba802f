"""Makes what a configuration with a world starts from: the world's dataset and the small base model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from shutil import copyfile
from typing import Any

import torch

from visual_grpo.common.console import note, progress
from visual_grpo.common.device import processor
from visual_grpo.common.digests import content_digest
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import DataConfig, StarterConfig
from visual_grpo.starter.pretraining import (
    Advance,
    Job,
    digest_of,
    own_code,
    run_side_by_side,
    starter_notes,
    write_once,
)
from visual_grpo.starter.worlds import SmallModel, find_world

_VERSION = 7
"""Raise it when the same configuration gives different weights."""
BASES = Path(__file__).parent / "bases"
"""Small models that come with the package, as the pretraining left them (`make base`)."""


def render_dataset(config: StarterConfig, data: DataConfig, seed: int) -> None:
    """Writes the world's dataset, unless it is there for the same arguments."""
    render = resolve_name(find_world(config.world).render)
    render(Path(config.dataset), config.records_per_prompt, data.height, data.width, seed, data.task)


def pretrain_model(config: StarterConfig, data: DataConfig, family: str, seed: int) -> dict[str, str | None]:
    """Pretrains a small model of ``family`` on the world, unless it is there for the same arguments or in `BASES`.

    With ``config.pretrain`` it is pretrained in any case. ``config.processes`` does not change the weights. Returns
    ``digest``, of the model's configuration, and ``content``, of its files.
    """
    folder, recipe = Path(config.model), model_recipe(config, data, family, seed)
    base = None if config.pretrain else find_base(recipe)

    def write(fresh: Path) -> Mapping[str, str | None]:
        if base is None:
            _pretrain(fresh, config, data, family, seed)
            return {"content": content_digest(fresh), "processor": processor()}
        _copy(base, fresh)
        note("This base model comes with the project; starter.pretrain=true pretrains it again.")
        return starter_notes(base)

    made = write_once(folder, recipe, write, even_if_there=config.pretrain)
    # Of the files as they were made: `check_unchanged` tells where they have been edited since.
    return {"digest": made["digest"], "content": made.get("content") or content_digest(folder)}


def find_base(recipe: Mapping[str, Any]) -> Path | None:
    """Returns the folder in `BASES` that the same recipe gave, if there is one."""
    return next((base for base in BASES.iterdir() if starter_notes(base).get("digest") == digest_of(recipe)), None)


def _copy(base: Path, folder: Path) -> None:
    """File by file: folders of a read-only checkout are not to be read-only here, too."""
    for file in filter(Path.is_file, base.rglob("*")):
        copied = folder / file.relative_to(base)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copyfile(file, copied)


def model_recipe(config: StarterConfig, data: DataConfig, family: str, seed: int) -> dict[str, Any]:
    """Returns everything that the base model's weights depend on."""
    small = find_world(config.world).models[family]
    code = [own_code(function.partition(":")[0]) for function in small.functions]
    return {
        "version": _VERSION,
        "world": config.world,
        "family": family,
        "task": data.task,
        "steps": _steps(small, config, data),
        "seed": seed,
        "height": data.height,
        "width": data.width,
        **({"code": code} if any(code) else {}),
    }


def _steps(small: SmallModel, config: StarterConfig, data: DataConfig) -> dict[str, int]:
    kinds = {"ar": 2} if data.task == "mixed" else {}
    modules = chain.from_iterable(small.pretrain.values())
    return {module: getattr(config, f"{module}_steps") * kinds.get(module, 1) for module in modules}


def _pretrain(folder: Path, config: StarterConfig, data: DataConfig, family: str, seed: int) -> None:
    small = find_world(config.world).models[family]
    steps = _steps(small, config, data)
    parts = folder if small.assemble is None else folder / "parts"
    job = Job(folder=parts, height=data.height, width=data.width, seed=seed, task=data.task, steps=steps)
    # In parallel, the longest function decides the time left.
    counted = next(iter(small.pretrain.values())) if config.processes > 1 else steps.keys()
    tasks = [partial(_pretrain_alone, path, job) for path in small.pretrain]
    with _module_progress(steps, counted) as advance:
        run_side_by_side(tasks, config.processes, advance)
    if small.assemble is not None:
        with hidden_progress_bars():
            resolve_name(small.assemble)(job, folder)


def _pretrain_alone(path: str, job: Job, advance: Advance) -> None:
    """Runs in a separate process; one thread makes its weights independent of the number of cores."""
    torch.set_num_threads(1)
    with hidden_progress_bars():
        resolve_name(path)(job, advance)


@contextmanager
def _module_progress(steps: Mapping[str, int], counted: Collection[str]) -> Iterator[Advance]:
    """Shows one bar over the steps of the ``counted`` modules, with every module's share next to it."""
    reached, again = dict.fromkeys(steps, 0), 0
    with progress("Pretraining the base model", sum(steps[module] for module in counted)) as bar:

        def advance(module: str, done: int) -> None:
            nonlocal again
            if done <= reached[module]:  # Only the VAE starts again, where its result is not good enough.
                again += 1
                bar.note(f"The VAE is not good enough: attempt {again} starts from different initial weights")
            taken = done - reached[module] if module in counted else 0
            bar.advance(taken, **{module: f"{done / steps[module]:.0%}"})
            reached[module] = done

        yield advance
