"""Resuming from a checkpoint: which one `resume` names, with which parameters, and what may have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo import provenance
from visual_grpo.adapter_folder import START_RUN
from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.files import require_no_links, settled, write_atomically
from visual_grpo.config import Parameters, flatten, merged, presets
from visual_grpo.config.decides import DEPENDS_ON, Decides
from visual_grpo.config.schema import Resume
from visual_grpo.config.validation import validate
from visual_grpo.grpo import checkpoint

STEPS = "grpo.steps"
FINISHED = "finished.txt"
"""File next to the checkpoints: names the last one of a training that has saved its adapters."""


@dataclass(frozen=True)
class ResumedRun:
    """The run to resume."""

    checkpoint: Path
    metadata: Mapping[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.provenance["parameters"])

    @property
    def mlflow_run_id(self) -> str | None:
        return self.metadata["mlflow_run_id"]

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the training so far, with its commands, commit and versions."""
        return dict(self.metadata["provenance"])

    @property
    def changes(self) -> bytes:
        """How the code of the training's first part differed from its commit; empty unless it is what the provenance
        names: a patch in somebody else's checkpoint must not become code of this training."""
        patch = str(self.metadata.get("changes", "")).encode("latin-1")
        return patch if hashlib.sha256(patch).hexdigest() == self.provenance.get("git.changes") else b""


def resumed_run(config: Parameters, now: provenance.Provenance | None = None) -> ResumedRun | None:
    """The run that ``config`` resumes; None = start at step 1. Only reads.

    Args:
        now: the provenance of the training as it would go on; None = only the parameters are known yet.

    Raises:
        UserError: see `find_run`; or what the run depends on has changed.
    """
    run = find_run(config.resume, Path(config.tracking.checkpoints))
    if run is not None:
        _refuse_alarm_too_late(run, config.alarm.action)
        _refuse_changes(run, config, now or {**run.provenance, "parameters": config.public()})
    return run


def find_run(resume: str, folder: Path) -> ResumedRun | None:
    """The run that ``resume`` names, at its newest intact checkpoint; None = start at step 1. Only reads.

    Args:
        folder: where the present parameters have their checkpoints.

    Raises:
        UserError: there are checkpoints, but none is intact, or ``resume`` names none.
    """
    if resume == Resume.NEVER:
        return None
    named = _named(resume, folder)
    path = named if _is_one(named) else checkpoint.newest_intact(named)
    if path is not None:
        require_no_links(named)  # Pictures next to the checkpoints are copied to the adapters.
    return None if path is None else ResumedRun(path, checkpoint.load_metadata(path))


def _named(resume: str, folder: Path) -> Path:
    """The folder that ``resume`` names: a checkpoint, or one with checkpoints in it."""
    if resume == Resume.AUTO:
        return folder
    named = settled(Path(resume).expanduser())
    if _is_one(named) or checkpoint.checkpoints(named):
        return named
    what = "contains no checkpoint" if named.is_dir() else "is not a folder"
    raise UserError(
        f"resume is {resume!r}, which {what}.{nearest_hint(resume, map(str, Resume))} Expected auto, same, never, or"
        " the folder of a checkpoint or of several."
    )


def _is_one(folder: Path) -> bool:
    return (folder / checkpoint.SUMS).is_file()


def parameters_of_run(run: ResumedRun, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree of a resumed run: its checkpoint's tree, with what ``--params`` gives."""
    resumed = merged(run.parameters, overrides)
    distributed, given = resumed["distributed"], overrides.get("distributed", {})
    # The validation says what is wrong with what is not a section.
    if isinstance(given, Mapping) and distributed["processes"] == 1 and "sharded" not in given:
        resumed["distributed"]["sharded"] = False  # A single process has the whole model.
    return resumed


def inherited_parameters(run: ResumedRun, configured: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that come from the run and differ from the configuration: dotted name -> value of the run."""
    configuration, now = (flatten(validate(tree).public()) for tree in (configured, used))
    by_records = ["reward"] if configuration["reward"] == presets.AUTO else []
    if presets.TARGET_JUDGE not in (configured.get("rewards") or {}):
        by_records.append(f"rewards.{presets.TARGET_JUDGE}.")
    return {
        name: value
        for name, value in flatten(run.parameters).items()
        if now.get(name) == value != configuration.get(name)
        and not name.startswith(tuple(by_records))
        and name != "output"
    }


def _refuse_changes(run: ResumedRun, config: Parameters, now: provenance.Provenance) -> None:
    """Raises UserError with every difference from what the checkpoint was made with that is not allowed."""
    path, may_differ, why = run.checkpoint, [], ""
    done, steps = checkpoint.step_of(path), config.grpo.steps
    if steps != run.parameters["grpo"]["steps"]:
        if config.grpo.schedule == "constant":
            if steps < done:
                raise UserError(
                    f"{STEPS} is {steps}, but the checkpoint {path} has done {done} steps: give at least {done}."
                )
            may_differ.append(STEPS)
        else:
            why = (
                f" The steps decide the learning rate of the schedule {config.grpo.schedule!r}; with"
                " grpo.schedule=constant they could change."
            )
    about = DEPENDS_ON["train"] & ~Decides.STOPPING
    if different := provenance.differences(run.provenance, now, about, rounding=False, but=may_differ):
        if "start" in different and (started := run.provenance.get(START_RUN)):
            why += f" It started from the adapters of the run {started}: train.start={started}."
        raise UserError(
            f"The checkpoint {path} was made with different {', '.join(provenance.described(different))}: resuming"
            f" would mix two runs.{why} Restore what differs, or start at step 1 without resume."
        )


def _refuse_alarm_too_late(run: ResumedRun, action: str) -> None:
    """Raises UserError where ``alarm.action`` would, from the start, have kept another best adapter than there is."""
    before = run.parameters["alarm"]["action"]
    if action in (before, "warn"):
        return
    progress = run.metadata["progress"]
    cheated = any(alarm["step"] <= progress["best_step"] for alarm in progress["alarms"])
    if cheated or (action == "rollback" and progress["best_suspicion"]):
        raise UserError(
            f"alarm.action={action} comes too late for the checkpoint {run.checkpoint}: with alarm.action={before}, the"
            f" adapter of step {progress['best_step']} was kept as the best, though the alarm's signals suspect it, and"
            " no earlier one. Resume without it or at an earlier checkpoint, or train again."
        )


def adjusted(run: ResumedRun, parameters: Mapping[str, Any]) -> list[str]:
    """Lines ``NAME: BEFORE, NOW after step N`` of the parameters that decide or round the result and have changed."""
    before, now = ({"parameters": tree} for tree in (run.parameters, parameters))
    # `made_with.runtime` tells of a different device.
    different = provenance.differences(before, now, DEPENDS_ON["train"], but=["model.device"])
    step = checkpoint.step_of(run.checkpoint)
    return [f"{name}: {was}, {is_now} after step {step}" for name, (was, is_now) in different.items()]


def mark_finished(folder: Path) -> None:
    """Notes that the training of the newest checkpoint has left its adapters."""
    newest = next(iter(checkpoint.checkpoints(folder)), None)
    if newest is not None:
        write_atomically(folder / FINISHED, newest.name)


def is_finished(newest: Path) -> bool:
    """Returns whether the training of ``newest``, the newest checkpoint in its folder, has left its adapters."""
    file = newest.with_name(FINISHED)
    return file.is_file() and file.read_text(encoding="utf-8") == newest.name


def why_another(folder: Path, now: provenance.Provenance) -> str | None:
    """Says why the newest intact checkpoint in ``folder`` is not of the training ``now``; None if it is. Only reads."""
    try:
        newest = checkpoint.newest_intact(folder)
    except checkpoint.DamagedCheckpointError:
        return f"{folder} has no intact checkpoint"
    if newest is None:
        return f"{folder} has no checkpoint"
    if is_finished(newest):
        return f"the training of the checkpoints in {folder} is finished"
    run = ResumedRun(newest, checkpoint.load_metadata(newest))
    different = provenance.described(provenance.differences(run.provenance, now, DEPENDS_ON["train"]))
    earlier = run.provenance.keys()
    different += [meaning for name, meaning in provenance.RUNTIME.items() if f"{provenance.RESUMED}{name}" in earlier]
    return f"the checkpoints in {folder} belong to a different training: {', '.join(different)}" if different else None
