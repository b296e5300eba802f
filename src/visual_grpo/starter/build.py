"""Builds what the default configuration starts from: the drawn dataset and the small base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from visual_grpo.config import DataConfig, StarterConfig, Task, World
from visual_grpo.errors import UserError
from visual_grpo.saved_model import record_content, recorded_content
from visual_grpo.starter.job import Advance, Job, digest_of, is_current, whole_folder
from visual_grpo.starter.scenes.world import VERSION as SCENES_VERSION
from visual_grpo.starter.scenes.world import draw_scene_records
from visual_grpo.starter.shapes.dataset import draw_dataset
from visual_grpo.starter.side_by_side import run_side_by_side
from visual_grpo.starter.words.world import VERSION as WORDS_VERSION
from visual_grpo.starter.words.world import draw_words
from visual_grpo.third_party_output import hidden_progress_bars

_VERSION = 6
"""Raised when the same configuration gives other weights."""
_SD3_VERSION = 1
"""Of the small Stable Diffusion 3."""
_SIDE_FACTS = "visual_grpo.json"


class Bar(Protocol):
    """A running progress display."""

    def advance(self, n: int = 1, **fields: float | int | str) -> None: ...

    def note(self, text: str) -> None: ...


Progress = Callable[[str, int], AbstractContextManager[Bar]]
"""Opens a progress display with a description and the total number of steps."""


def build_starter(
    config: StarterConfig, data: DataConfig, seed: int, progress: Progress, family: str | None = None
) -> dict[str, Any]:
    """Draws the dataset and pretrains a base model of ``family``, each unless it is there for the same arguments.

    ``family``: None = the first that the world is drawn for.

    The weights depend on task, step counts, image size and seed, not on ``config.processes``: with one process the
    two halves of the pretraining run one after the other, else side by side.

    Returns ``{"dataset": folder, "model": folder, "digest": digest of the model's configuration, "content": digest of
    its files}``.
    """
    family = family or family_of_starter(config.world)
    check_starter(config.world, family)
    draw_world(config, data, seed)
    folder, digest = Path(config.model), model_digest(config, data, seed, family)
    if not is_current(folder, digest):
        with whole_folder(folder, digest) as fresh:
            if family == "qwen2_5_vl":
                _pretrain_vl(fresh, config, data, seed, progress)
            elif family == "sd3":
                _pretrain_sd3(fresh, config, data, seed, progress)
            else:
                _pretrain(fresh, config, data, seed, at_once=config.processes, progress=progress)
            record_content(fresh)
    return {"dataset": config.dataset, "model": config.model, "digest": digest, "content": recorded_content(folder)}


_FAMILIES: Mapping[World, tuple[str, ...]] = {
    "shapes": ("glm_image", "sd3"),
    "words": ("glm_image",),
    "scenes": ("qwen2_5_vl",),
}
"""Of which families a small model can be pretrained on each world, the default first."""


def family_of_starter(world: World) -> str:
    """The family that is pretrained on a world where the parameters name none."""
    return _FAMILIES[world][0]


def check_starter(world: World, family: str) -> None:
    """Raises UserError where no small model of ``family`` can be pretrained on ``world``."""
    if family not in _FAMILIES[world]:
        raise UserError(
            f"model.path is null, and the starter pretrains no small {family} on starter.world {world}; it pretrains"
            f" {', '.join(_FAMILIES[world])}. Name a saved model with model.path, or another model.family."
        )


def draw_world(config: StarterConfig, data: DataConfig, seed: int) -> None:
    """Draws the dataset of ``config.world`` unless it is there for the same arguments."""
    folder = Path(config.dataset)
    if config.world == "words":
        draw_words(folder, config.records_per_prompt, data.height, data.width)
    elif config.world == "scenes":
        draw_scene_records(folder, config.records_per_prompt, data.height, data.width, seed)
    else:
        draw_dataset(folder, config.records_per_prompt, data.height, data.width, seed, task=data.task)


def model_digest(config: StarterConfig, data: DataConfig, seed: int, family: str | None = None) -> str:
    """A digest of everything that the base model's weights depend on."""
    size = {"height": data.height, "width": data.width}
    if family == "sd3":
        steps = {"vae": config.vae_steps, "dit": config.dit_steps}
        return digest_of({"sd3": _SD3_VERSION, "steps": steps, "seed": seed, **size})
    if config.world == "scenes":
        return digest_of({"scenes": SCENES_VERSION, "steps": config.vl_steps, "seed": seed, **size})
    if config.world == "words":
        return digest_of({"words": WORDS_VERSION, "steps": _steps(config, data.task), "seed": seed, **size})
    task = {} if data.task == "t2i" else {"task": data.task}  # an older text-to-image model stays current
    return digest_of({"model": _VERSION, "steps": _steps(config, data.task), "seed": seed, **size, **task})


def _pretrain(
    folder: Path, config: StarterConfig, data: DataConfig, seed: int, *, at_once: int, progress: Progress
) -> None:
    steps, job = _steps(config, data.task), _job(folder / "parts", config, data, seed)
    # Side by side, the time left is that of the half that takes longer.
    counted = {"vae", "dit"} if at_once > 1 else steps.keys()
    with _module_progress(progress, steps, counted) as advance:
        halves = {half: partial(_pretrain_half, half, job) for half in ("decoder", "language")}
        run_side_by_side(halves, at_once, advance)
    with hidden_progress_bars():
        _assemble(job, folder)


def _pretrain_sd3(folder: Path, config: StarterConfig, data: DataConfig, seed: int, progress: Progress) -> None:
    steps = {"vae": config.vae_steps, "dit": config.dit_steps}
    with _module_progress(progress, steps, steps) as advance:
        run_side_by_side({"sd3": partial(_pretrain_sd3_alone, _job(folder, config, data, seed))}, 1, advance)


def _pretrain_sd3_alone(job: Job, advance: Advance) -> None:
    """Runs in its own process; one thread makes its weights independent of the number of cores."""
    import torch

    from visual_grpo.starter.sd3.pretrain import pretrain_sd3

    torch.set_num_threads(1)
    with hidden_progress_bars():
        pretrain_sd3(job, advance)


def _job(folder: Path, config: StarterConfig, data: DataConfig, seed: int) -> Job:
    steps = _steps(config, data.task)
    return Job(
        folder=folder,
        height=data.height,
        width=data.width,
        seed=seed,
        task=data.task,
        vae_steps=steps["vae"],
        dit_steps=steps["dit"],
        ar_steps=steps["ar"],
        world=config.world,
    )


@contextmanager
def _module_progress(progress: Progress, steps: Mapping[str, int], counted: Collection[str]) -> Iterator[Advance]:
    """One bar over the steps of the ``counted`` modules, with every module's share beside it."""
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


def _pretrain_vl(folder: Path, config: StarterConfig, data: DataConfig, seed: int, progress: Progress) -> None:
    reached = 0
    with progress("Pretraining the base model", config.vl_steps) as bar:

        def advance(module: str, done: int) -> None:
            nonlocal reached
            bar.advance(done - reached)
            reached = done

        from visual_grpo.starter.qwen2_5_vl.pretrain import pretrain_vl

        size = (data.height, data.width)
        run_side_by_side({"vl": partial(pretrain_vl, folder, size, config.vl_steps, seed)}, 1, advance)


def _steps(config: StarterConfig, task: Task) -> dict[str, int]:
    kinds = 2 if task == "mixed" else 1
    return {"vae": config.vae_steps, "dit": config.dit_steps, "ar": config.ar_steps * kinds}


def _pretrain_half(half: str, job: Job, advance: Advance) -> None:
    """Runs in a separate process; one thread makes its weights independent of the number of cores."""
    import torch

    torch.set_num_threads(1)
    with hidden_progress_bars():
        _halves(job.world)[half](job, advance)


def _halves(world: World) -> Mapping[str, Callable[[Job, Advance], None]]:
    """The two pretrainings of a world by name, the longer one first."""
    if world == "words":
        import visual_grpo.starter.words.pretrain as of_words

        return of_words.HALVES
    import visual_grpo.starter.glm_image.pretrain_on_shapes as of_shapes

    return of_shapes.HALVES


def _assemble(job: Job, folder: Path) -> None:
    """Saves the trained modules with the fixed ones as a GlmImagePipeline and removes the modules' own folders."""
    from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, GlmImageForConditionalGeneration, T5EncoderModel

    import visual_grpo.starter.glm_image.modules as modules
    from visual_grpo.starter.glm_image.codebook import build_processor
    from visual_grpo.starter.glm_image.corpus import PREVIEW_SIDE

    parts = job.folder
    glyphs = parts / "text_encoder"  # trained only where words are drawn
    pipeline = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=build_processor(job.task),
        text_encoder=(
            T5EncoderModel.from_pretrained(glyphs, use_safetensors=True)
            if glyphs.exists()
            else modules.build_glyph_encoder(job.seed)
        ),
        vision_language_encoder=GlmImageForConditionalGeneration.from_pretrained(
            parts / "vision_language_encoder", use_safetensors=True
        ),
        vae=AutoencoderKL.from_pretrained(parts / "vae", use_safetensors=True),
        transformer=GlmImageTransformer2DModel.from_pretrained(parts / "transformer", use_safetensors=True),
        scheduler=modules.build_scheduler(),
    )
    pipeline.save_pretrained(folder)
    (folder / _SIDE_FACTS).write_text(json.dumps({"preview_side": PREVIEW_SIDE}), encoding="utf-8")
    shutil.rmtree(parts)
