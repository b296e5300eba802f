"""Nodes that repeat a training, show what matched, and refuse what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.trained_adapters import START_RUN


def reproduce_training(parameters: Parameters) -> dict[str, Any]:
    """The training that ``run`` names, repeated: see `visual_grpo.reproduction.repeat.repeat`."""
    from visual_grpo import console
    from visual_grpo.reproduction.repeat import Training, repeat
    from visual_grpo.tracking import origins

    if parameters.run is None:
        raise UserError(
            "reproduce: name the training with run=ID: the id or name of an MLflow run, a folder of adapters, or"
            " latest, what the train pipeline left in this output folder"
        )
    adapters, facts = origins.training(parameters.run, Path(parameters.adapters_folder))
    training = Training(
        project=Path.cwd(),
        adapters=adapters,
        facts=facts,
        hashes=origins.dvc_hashes(facts),
        start=_start(parameters, facts),
    )
    settings = parameters.reproduce
    report = repeat(
        training,
        parameters.model_dump(mode="json"),
        tolerance=settings.tolerance,
        keep=settings.keep,
        note=console.note,
    )
    rows = [[row["what"], row["run"], row["here"], row["result"]] for row in report["rows"]]
    console.table("What matched", ["", "run", "here", ""], rows)
    console.note(f"{report['sentence']} ({report['seconds']} s)")
    return report


def _start(parameters: Parameters, facts: dict[str, Any]) -> Path | None:
    """The adapters that the training started from; None = fresh ones."""
    from visual_grpo.tracking.origins import start_of

    if "start" not in facts:
        return None
    named = facts["parameters"]["train"]["start"]
    return start_of(named, facts["start"], Path(parameters.adapters_folder), facts.get(START_RUN))


def require_match(reproduction: dict[str, Any]) -> None:
    """Raises UserError where the repeated training is not the run."""
    if not reproduction["matches"]:
        raise UserError(str(reproduction["sentence"]))
