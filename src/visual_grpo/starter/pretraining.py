"""Helpers of worlds and pretrainings: folders that are written once, the optimiser, child processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from visual_grpo.common import console
from visual_grpo.common.digests import STARTER
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import fresh_folder, settled
from visual_grpo.common.importing import code_digest
from visual_grpo.config import Task

if TYPE_CHECKING:
    Messages = multiprocessing.Queue[tuple[str, int]]

Advance = Callable[[str, int], None]
"""Called with a module's name (``vae``, ``dit``, ``ar``, ``vl``) and the number of its completed steps."""
_FINAL_SHARE = 0.03
"""Final learning rate as a share of its peak."""
_LEAST_SIGMA = 0.002
_SHOWN = 3
"""Names of files in a message."""
_POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the weights depend on, and the folder where each module is saved to a subfolder."""

    folder: Path
    height: int
    """Pixels, a multiple of 32, like ``width``."""
    width: int
    seed: int
    task: Task = "t2i"
    steps: Mapping[str, int]
    """Optimiser steps by module."""


def own_code(module: str) -> dict[str, str]:
    """The digest of a user's code. What this package renders and pretrains has a version instead."""
    return {} if module.startswith("visual_grpo.") else {"code": code_digest(module)}


def digest_of(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def starter_notes(folder: Path) -> dict[str, str]:
    """Returns what `write_once` noted in ``folder``: ``digest`` of the recipe, and more; empty if it wrote no such."""
    file = folder / STARTER
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def write_once(
    folder: Path,
    recipe: Mapping[str, Any],
    write: Callable[[Path], Mapping[str, str | None]],
    *,
    even_if_there: bool = False,
) -> dict[str, str]:
    """Replaces ``folder`` by one that ``write`` fills, unless it was written for the same recipe.

    Notes the digest of the recipe in it, with what ``write`` returns, and returns that. After an error or an
    interruption the folder is unchanged. Raises UserError for a folder that something else has written to.
    """
    digest, present = digest_of(recipe), starter_notes(settled(folder))
    if even_if_there or present.get("digest") != digest:
        _require_own(folder)
        if present and not even_if_there:
            console.note(f"The starter replaces {folder}, which it made with other parameters.")
        with fresh_folder(folder) as fresh:
            noted = {"digest": digest, **write(fresh)}
            (fresh / STARTER).write_text(json.dumps(noted), encoding="utf-8")
    return starter_notes(folder)


def _require_own(folder: Path) -> None:
    """Raises UserError if replacing ``folder`` would delete files of the user."""
    if not folder.exists() or (folder / STARTER).is_file():
        return
    if others := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ["a file"]:
        raise UserError(
            f"The starter would replace {folder}, which it has not written: there is {', '.join(others[:_SHOWN])}. Name"
            " a new or an empty folder by starter.dataset or starter.model. To train on the folder, set data.path or"
            " model.path."
        )


def write_dataset(
    folder: Path,
    recipe: Mapping[str, Any],
    subfolders: Sequence[str],
    records: Callable[[Path], Iterable[Mapping[str, Any]]],
) -> str:
    """Writes ``records.jsonl``, and the pictures that ``records`` renders into ``subfolders``, as `write_once` does.

    Returns the digest of the recipe. A dataset is also written again when the code of a user's ``records`` has changed.
    """

    def write(fresh: Path) -> dict[str, str | None]:
        for name in subfolders:
            (fresh / name).mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records(fresh))
        (fresh / "records.jsonl").write_text(lines, encoding="utf-8")
        return {}

    return write_once(folder, {**recipe, **own_code(records.__module__)}, write)["digest"]


def minimise(
    backward: Callable[[], None],
    parameters: Iterable[nn.Parameter],
    job: Job,
    module: str,
    advance: Advance,
    *,
    peak_learning_rate: float,
    warmup: int,
) -> None:
    """Runs AdamW for the job's steps of ``module``, with linear warm-up and decay, gradients clipped to norm 1.

    ``backward`` samples a batch and adds the gradients of its loss.
    """
    parameters, steps = list(parameters), job.steps[module]
    warmup = max(1, min(warmup, steps))
    # One kernel for each parameter: on a CPU a quarter of the time of the loop that is the default.
    optimizer = torch.optim.AdamW(parameters, peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * (min((step + 1) / warmup, 1.0) * (1 - (1 - _FINAL_SHARE) * step / steps))
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        advance(module, step + 1)


def noised(clean: Tensor, generator: torch.Generator, shift: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rectified flow (Liu et al., 2022) of latents [B, C, ...]: x = (1 - sigma) clean + sigma noise.

    Sigma is spread as a scheduler with ``shift`` spreads its steps: a solver's error is an integral over them.

    Returns x, the target velocity noise - clean, both like ``clean``, and sigma [B].
    """
    noise = torch.randn(clean.shape, generator=generator).to(clean.device)
    even = torch.rand(len(clean), generator=generator).to(clean.device) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
    sigma = shift * even / (1 + (shift - 1) * even)
    share = sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1 - share) * clean + share * noise, noise - clean, sigma


ChildTask = Callable[[Advance], None]
"""Picklable."""


def run_side_by_side(tasks: Sequence[ChildTask], at_once: int, advance: Advance) -> None:
    """Runs tasks in child processes, ``at_once`` of them at a time; their progress goes to ``advance``.

    They end with the caller, even if that is killed. If a task fails, ends the others and raises its error, or
    RuntimeError if it was killed.
    """
    for first in range(0, len(tasks), at_once):
        _run_together(tasks[first : first + at_once], advance)


def _run_together(tasks: Sequence[ChildTask], advance: Advance) -> None:
    messages: Messages = multiprocessing.get_context("spawn").Queue()
    running = start_processes(_run, (tasks, messages), nprocs=len(tasks), join=False, daemon=True, start_method="spawn")
    try:
        finished = False
        while not finished:
            finished = running.join(_POLL)
            while not messages.empty():
                advance(*messages.get())
    except ProcessExitedException as error:
        memory = "; the system kills a process if memory runs out" if error.signal_name == "SIGKILL" else ""
        raise RuntimeError(f"a process of the starter ended without a result ({error}){memory}") from error
    finally:
        for process in running.processes:
            process.terminate()
            process.join()


def _run(number: int, tasks: Sequence[ChildTask], messages: Messages) -> None:
    caller = multiprocessing.parent_process()

    def advance(module: str, done: int) -> None:
        if caller is not None and not caller.is_alive():
            os._exit(1)
        messages.put((module, done))

    tasks[number](advance)
