"""Going on from a checkpoint: which one `resume` names, with which parameters, and which of them may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.files import write_atomically
from visual_grpo.config import Parameters, flatten, merged, presets
from visual_grpo.config.adapter_folder import adapter_digest
from visual_grpo.config.schema import validate
from visual_grpo.data.manifest import RecordTable
from visual_grpo.grpo import checkpoint
from visual_grpo.rewards.catalogue import reward_digests
from visual_grpo.training.cache_key import cache_key
from visual_grpo.training.runtime_fingerprint import MEANING

AUTO, SAME, NEVER = "auto", "same", "never"
ROUNDING = (
    *("model.device", "model.offload", "grpo.micro_batch_size", "modules.*.micro_batch_size", "evaluation.batch_size"),
    *("policy.rollout_batch", "policy.denoise_batch", "policy.decode_batch", "policy.gradient_checkpointing"),
    *("distributed.processes", "distributed.sharded"),
)
"""Patterns of the parameters that say where and in how large parts something is computed."""
MAY_CHANGE = ("evaluation.every", "grpo.non_finite", "alarm.*", *ROUNDING)
"""Patterns of the `cache_key` parameters that a resumed run may change, beside ``grpo.steps`` where the schedule allows
it."""
STEPS = "grpo.steps"
FINISHED = "finished.txt"
"""Beside the checkpoints: the one with which a training ended whose adapters are in their place."""


@dataclass(frozen=True)
class Origin:
    """A run that is to go on."""

    checkpoint: Path
    metadata: Mapping[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.metadata["parameters"])

    @property
    def mlflow_run_id(self) -> str | None:
        return self.metadata["mlflow_run_id"]

    @property
    def lineage(self) -> dict[str, str]:
        """Command, commit and versions of the training so far."""
        return dict(self.metadata["lineage"])


def origin(resume: str, folder: Path) -> Origin | None:
    """The run that ``resume`` names, at its newest intact checkpoint; None = start at step 1. Only reads.

    Args:
        folder: where the present parameters have their checkpoints.

    Raises:
        UserError: there are checkpoints, but none is intact, or ``resume`` names none.
    """
    if resume == NEVER:
        return None
    named = _named(resume, folder)
    path = named if _is_one(named) else checkpoint.newest_intact(named)
    return None if path is None else Origin(path, checkpoint.load_metadata(path))


def _named(resume: str, folder: Path) -> Path:
    """The folder that ``resume`` names: a checkpoint, or one with checkpoints in it."""
    named = Path(resume).expanduser()
    if resume == AUTO:
        return folder
    if _is_one(named) or checkpoint.checkpoints(named):
        return named
    what = "has no checkpoint in it" if named.is_dir() else "is no folder"
    raise UserError(
        f"resume is {resume!r}, which {what}.{nearest_hint(resume, (AUTO, SAME, NEVER))} Expected auto, same, never, or"
        " the folder of a checkpoint or of several."
    )


def _is_one(folder: Path) -> bool:
    return (folder / checkpoint.SUMS).is_file()


def parameters_of_run(run: Origin, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree of a resumed run: that of its checkpoint, with what ``--params`` gives."""
    resumed = merged(presets.pinned(run.parameters), overrides)
    if resumed["distributed"]["processes"] == 1 and "sharded" not in overrides.get("distributed", {}):
        resumed["distributed"]["sharded"] = False  # A single process has the whole model.
    return resumed


def inherited_parameters(run: Origin, configured: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that come from the run, and would be others by the configuration: dotted name -> value of the run."""
    configuration, now = (flatten(validate(tree).public()) for tree in (configured, used))
    chosen_by_records = configuration["reward"] == presets.AUTO
    return {
        name: value
        for name, value in flatten(run.parameters).items()
        if now.get(name) == value != configuration.get(name)
        and not (chosen_by_records and name.startswith("reward"))
        and name != "output"
    }


def refuse_changes(run: Origin, config: Parameters) -> None:
    """Raises UserError with each parameter that differs from the checkpoint's and may not."""
    path, was, now = run.checkpoint, _fixed(run.parameters), _fixed(config.public())
    why, done = "", checkpoint.step_of(path) if was[STEPS] != now[STEPS] else 0
    if done and config.grpo.schedule == "constant":
        if now[STEPS] < done:
            raise UserError(
                f"{STEPS} is {now[STEPS]}, but the checkpoint {path} has done {done} steps: give at least {done}."
            )
        was[STEPS] = now[STEPS]
    elif done:
        why = (
            f" The steps decide the learning rate of the schedule {config.grpo.schedule!r}; with grpo.schedule=constant"
            " they could change."
        )
    if changed := _changes(was, now):
        raise UserError(
            f"The checkpoint {path} was made with other values of {', '.join(changed)}: going on would mix two runs."
            f"{why} Leave out what differs, or start at step 1 without resume."
        )


def _fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by their dotted names that a resumed run must share with its checkpoint."""
    return {
        name: value
        for name, value in cache_key("train", tree).items()
        if not any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE)
    }


def training_identity(
    config: Parameters, base_model: Mapping[str, Any], records: RecordTable, start: Path | None
) -> dict[str, str]:
    """Returns digests of what a training depends on beside its parameters: model, data, own reward code, files and
    weights, and the adapters in ``start``."""
    digests = {
        "model": base_model["model"],
        "model_digest": base_model["digest"],
        "data": records.digest,
        **reward_digests(config.rewards, config.output),
    }
    return digests if start is None else digests | {"start": adapter_digest(start)}


def refuse_another_origin(run: Origin, identity: Mapping[str, str]) -> None:
    """Raises UserError with what else the run depends on, and is not what it was: model, data, code of rewards."""
    if changed := _changes(run.metadata["identity"], identity):
        raise UserError(
            f"The checkpoint {run.checkpoint} was made with another {', '.join(changed)}: going on would mix two runs."
            " Put that back as it was, or start at step 1 without resume."
        )


def adjusted(run: Origin, config: Parameters) -> list[str]:
    """Lines ``NAME: BEFORE, NOW after step N`` of the parameters that decide or round the result and have changed."""
    was, now = (cache_key("train", tree) for tree in (run.parameters, config.public()))
    step = checkpoint.step_of(run.checkpoint)
    differing = [name for name in _differing(was, now) if name != "model.device"]  # `runtime_fingerprint` tells.
    return [f"{name}: {was.get(name)}, {now.get(name)} after step {step}" for name in differing]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{name} (was {before.get(name)}, is {now.get(name)})" for name in _differing(before, now)]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def mark_finished(folder: Path) -> None:
    """Notes that the training of the newest checkpoint has left its adapters."""
    newest = next(iter(checkpoint.checkpoints(folder)), None)
    if newest is not None:
        write_atomically(folder / FINISHED, newest.name)


def why_another(config: Parameters, identity: Mapping[str, str], computed: Mapping[str, str]) -> str | None:
    """Says why the newest intact checkpoint cannot be continued; None if it can. Only reads.

    Args:
        identity: what the training depends on beside the parameters: digests of model, data and own rewards.
        computed: `runtime_fingerprint` of the pipeline train.
    """
    folder = Path(config.tracking.checkpoints)
    try:
        newest = checkpoint.newest_intact(folder)
    except checkpoint.DamagedCheckpointError:
        return f"{folder} has no intact checkpoint"
    if newest is None:
        return f"{folder} has no checkpoint"
    finished = folder / FINISHED
    if finished.is_file() and finished.read_text(encoding="utf-8") == newest.name:
        return f"the training of the checkpoints in {folder} is finished"
    different = ", ".join(_differences(checkpoint.load_metadata(newest), config, identity, computed))
    return f"the checkpoints in {folder} are of a training with another {different}" if different else None


def _differences(
    metadata: Mapping[str, Any], config: Parameters, identity: Mapping[str, str], computed: Mapping[str, str]
) -> Iterator[str]:
    yield from _changes(cache_key("train", metadata["parameters"]), cache_key("train", config.public()))
    yield from _differing(metadata["identity"], identity)
    lineage = metadata.get("lineage", {})
    for name, value in computed.items():
        if lineage.get(name) != value or f"resumed.{name}" in lineage:
            yield MEANING[name]
