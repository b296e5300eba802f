"""What MLflow knows of where a training's adapters come from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.errors import UserError
from visual_grpo.tracking.adapters import find_adapters
from visual_grpo.tracking.lineage import recorded
from visual_grpo.tracking.registry_client import Server, tracking_uri
from visual_grpo.tracking.runs import KEY
from visual_grpo.tracking.versions import DIGEST, Registered, registered
from visual_grpo.trained_adapters import adapter_digest, read_facts

if TYPE_CHECKING:
    from mlflow.entities import Run

_HASH = "dvc."


def training(named: str, latest: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the adapters that ``named`` means, as for the parameter ``adapter``, and its facts.

    Raises:
        UserError: there is no such training; the message begins with the parameter ``run``.
    """
    try:
        folder = find_adapters(named, latest)
        return folder, read_facts(folder)
    except UserError as error:
        raise UserError(f"run: {str(error).removeprefix('adapter: ')}") from error


def dvc_hashes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Path -> DVC hash of what a training read: by its facts, else by the tags of its MLflow run."""
    run = run_of(facts)
    return _hashes({} if run is None else run.data.tags) | _hashes(facts)


def recorded_hashes(project: Path, *known: Mapping[str, str]) -> dict[str, str]:
    """Path -> DVC hash by dvc.lock and ``*.dvc`` in ``project``, and by ``known``, which counts more."""
    both = recorded(project)
    for hashes in known:
        both |= hashes
    return both


def run_of(facts: Mapping[str, Any]) -> Run | None:
    """The MLflow run of a training; None if it had none, it was deleted, or MLflow is away."""
    named = facts.get("mlflow_run_id")
    if not named:
        return None
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    try:
        runs: list[Run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    except (mlflow.exceptions.MlflowException, SQLAlchemyError, OSError):
        return None
    return next((run for run in runs if named in (run.info.run_id, run.data.tags.get(KEY))), None)


def start_of(named: str, digest: str, latest: Path, run: str | None = None) -> Path:
    """The adapters with ``digest`` that a training started from.

    Args:
        named: what its parameter ``train.start`` said; an alias or ``latest`` may mean other adapters by now, and then
            those of their MLflow run, or of the registered version that has the digest, are taken.
        run: id of the MLflow run that made them; None = not known.

    Raises:
        UserError: they are nowhere.
    """
    for name in filter(None, (named, run)):
        with suppress(UserError):
            folder = find_adapters(name, latest)
            if folder.is_dir() and adapter_digest(folder) == digest:
                return folder.resolve()
    for version in _versions_with(digest):
        folder = version.adapters(whatever_they_are=True)
        if adapter_digest(folder) == digest:
            return folder.resolve()
    raise UserError(
        f"The adapters that the run started from (train.start={named}, digest {digest[:12]}) are not there any more:"
        f" {named} has other weights now, and neither their MLflow run nor a registered version has these. Put them"
        " back where they were, or train again from adapters that stay: a registered version (models:/NAME/3), or an"
        " MLflow run's id."
    )


def _versions_with(digest: str) -> list[Registered]:
    """The registered versions whose tag says this digest."""
    server = Server.registry(tracking_uri())
    if server.is_empty:
        return []
    found = server.ask(lambda client: client.search_model_versions(f"tags.`{DIGEST}` = '{digest}'"))
    return [registered(server, version) for version in found]


def _hashes(tags: Mapping[str, Any]) -> dict[str, str]:
    return {name.removeprefix(_HASH): str(value) for name, value in tags.items() if name.startswith(_HASH)}
