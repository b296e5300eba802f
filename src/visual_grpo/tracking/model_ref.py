"""What the parameter ``adapter`` names: the latest adapters, a folder, those of an MLflow run or a registered model."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import FACTS, LATEST, NONE, adapter_digest, read_facts
from visual_grpo.config.command import Command, rerun_command
from visual_grpo.tracking.api import KEY, mlflow_client, search, shown, tracking_uri
from visual_grpo.tracking.registry import SCHEME, named_version, on_this_machine, versions_with
from visual_grpo.tracking.sync import TRAINING_DIGEST

if TYPE_CHECKING:
    from mlflow.entities import Run

_SHORTEST_ID = 6
BASE = "base"
"""``train.start`` of a training with fresh adapters."""


def find_adapters(named: str, latest: Path) -> Path:
    """The folder of the adapters.

    Args:
        named: ``latest``, a folder, the id (at least its first 6 characters) or name of an MLflow run, or a version of
            a registered model: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        latest: the folder that the train pipeline writes.

    Raises:
        UserError: there is no such run or version, several runs have the name, or its adapters are gone.
    """
    if named == LATEST:
        return latest
    if not named.strip():
        raise UserError(
            f"adapter is empty. Expected {LATEST}, a folder that a training left, the id or name of an MLflow run,"
            f" {SCHEME}NAME@ALIAS or, for generate and compare, {NONE} (the base model)."
        )
    if named.startswith(SCHEME):
        return _of_version(named, tracking_uri())
    if (Path(named) / FACTS).is_file():
        return Path(named)
    if Path(named).is_dir():
        raise UserError(
            f"adapter: {named} has no {FACTS}; expected the folder that a training leaves:"
            f" {Command.current().without('adapter').for_pipeline('train')}"
        )
    return _of_run(named, tracking_uri())


def adapters_of(config: Parameters) -> Path | None:
    """The folder that the parameter ``adapter`` names; None for the base model.

    Raises:
        UserError: see `find_adapters`; or nothing was trained yet.
    """
    if config.adapter == NONE:
        return None
    latest = Path(config.adapters_folder)
    if config.adapter == LATEST and not latest.is_dir():
        raise UserError(
            f"adapter: nothing was trained yet ({latest} does not exist). Train one: {rerun_command('train')}\nOr draw"
            f" with the base model: {Command.current().with_parameters({'adapter': NONE})}"
        )
    return find_adapters(config.adapter, latest)


def start_of(config: Parameters) -> Path | None:
    """The folder of the adapters that ``train.start`` names; None for fresh ones."""
    return None if config.train.start == BASE else find_adapters(config.train.start, Path(config.adapters_folder))


def model_of(config: Parameters, adapters: Path | None) -> str:
    """The base model that ``adapters`` were trained on; without adapters that of the parameters.

    Raises:
        UserError: the starter has not pretrained it yet.
    """
    model = (None if adapters is None else read_facts(adapters)["model"]) or config.model.path or config.starter.model
    if config.model.path is None and not Path(model).is_dir():
        raise UserError(f"The base model {model} does not exist yet. Make it with: {rerun_command('starter')}")
    return str(model)


def find_start(named: str, digest: str, latest: Path, run: str | None = None) -> Path:
    """The adapters with ``digest`` that a training started from.

    Args:
        named: its parameter ``train.start``; an alias or ``latest`` may mean other adapters by now, and then those of
            their MLflow run, or of the registered version that has the digest, are taken.
        run: id of the MLflow run that made them; None = not known.

    Raises:
        UserError: they are nowhere.
    """
    for name in filter(None, (named, run)):
        with suppress(UserError):
            folder = find_adapters(name, latest)
            if folder.is_dir() and adapter_digest(folder) == digest:
                return folder.resolve()
    for version in versions_with(digest):
        with suppress(UserError):
            return version.adapters().resolve()
    raise UserError(
        f"The adapters that the run started from (train.start={named}, digest {digest[:12]}) are not there any more:"
        " neither there, nor in their MLflow run, nor in a registered version. Put them back where they were."
    )


@cache
def _of_version(named: str, uri: str) -> Path:
    """Looked up once in a command: an alias that is moved meanwhile would mix two adapters."""
    return named_version(named).adapters()


@cache
def _of_run(named: str, uri: str) -> Path:
    with mlflow_client() as client:
        runs = search(client)
        found = [run for run in runs if _is_named(run, named)]
        if len(found) == 1:
            folder = on_this_machine(found[0].info.artifact_uri, "adapters")
            if (folder / FACTS).is_file():
                return folder
            raise UserError(f"adapter: the MLflow run {named!r} has no adapters: unfinished, or they were deleted.")
    if found:
        ids = "\n".join(f"  {run.info.run_id}  {run.info.run_name}" for run in found[:10])
        raise UserError(f"adapter: {len(found)} MLflow runs are named {named!r}; name one by its id:\n{ids}")
    names = [run.info.run_name for run in runs if run.info.run_name and TRAINING_DIGEST in run.data.tags]
    raise UserError(
        f"adapter: there is no folder and no MLflow run {named!r}.{nearest_hint(named, names)} All runs are in"
        f" {shown()}; `make ui` lists them. A registered adapter is named models:/NAME@ALIAS."
    )


def _is_named(run: Run, named: str) -> bool:
    ids = (run.info.run_id, run.data.tags.get(KEY, ""))
    by_id = len(named) >= _SHORTEST_ID and any(known.startswith(named) for known in ids)
    return by_id or run.info.run_name == named
