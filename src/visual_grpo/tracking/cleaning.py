"""Deletes old versions of a registered model, and old runs with their artifacts."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.tracking.registry import OVER
from visual_grpo.tracking.registry_client import Server, local_folder
from visual_grpo.tracking.versions import versions_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SOURCE = re.compile(r"models:/(m-\w+)")
"""Of a version that is made of a logged model."""
RETRAINED = "retrained.for"
"""Tag of a run that the retrain command judged: the registered model."""


def mark_run(tracking_uri: str, run_id: str, name: str) -> None:
    """Notes that a run is of a retraining for the registered model ``name``, so that it may be deleted in time."""
    server = Server.registry(tracking_uri)
    server.get(lambda client: client.set_tag(run_id, RETRAINED, name))


def delete_versions(tracking_uri: str, name: str, alias: str, *, keep: int) -> list[int]:
    """Deletes all but the newest ``keep`` versions, those with an alias, and that which the present one replaced."""
    server = Server.registry(tracking_uri)
    model = None if server.is_empty else server.get(lambda client: client.get_registered_model(name))
    if model is None:
        return []
    versions = {int(version.version): version for version in versions_of(server, name)}
    present = versions.get(int(model.aliases.get(alias, 0)))
    replaced = {} if present is None else {present.tags.get(OVER)}
    needed = {int(version) for version in model.aliases.values()} | {int(v) for v in replaced if v and v.isdigit()}
    old = sorted(set(versions) - needed - set(sorted(versions)[-keep:]))
    for number in old:
        source = str(versions[number].source)
        server.ask(partial(_delete_version, name=name, number=number))
        _delete_unused_model(server, source)
    return old


def delete_runs(tracking_uri: str, name: str, *, keep: int) -> list[str]:
    """Deletes all but the newest ``keep`` runs of retrainings for the model, and those of its versions."""
    server = Server.registry(tracking_uri)
    if server.is_empty:
        return []
    needed = {version.run_id for version in versions_of(server, name)}
    experiments = [e.experiment_id for e in server.ask(lambda client: client.search_experiments())]
    found = server.ask(
        lambda client: client.search_runs(
            experiments, f"tags.`{RETRAINED}` = '{name}'", order_by=["attributes.start_time DESC"]
        )
    )
    old = [run for run in list(found)[keep:] if run.info.run_id not in needed]
    for run in old:
        server.ask(partial(_delete_run, run_id=run.info.run_id))
        _delete_folder(run.info.artifact_uri)
    return [run.info.run_id for run in old]


def _delete_version(client: MlflowClient, *, name: str, number: int) -> None:
    client.delete_model_version(name, str(number))


def _delete_run(client: MlflowClient, *, run_id: str) -> None:
    client.delete_run(run_id)


def _delete_unused_model(server: Server, source: str) -> None:
    """What a version was made of, with its files, unless a version of another registered model is made of it too."""
    found = _SOURCE.fullmatch(source)
    if found is None or len(server.ask(lambda client: client.search_model_versions(f"source_path = '{source}'"))):
        return
    model_id = found[1]
    model = server.get(lambda client: client.get_logged_model(model_id))
    if model is not None:
        server.ask(lambda client: client.delete_logged_model(model_id))
        _delete_folder(model.artifact_location)


def _delete_folder(location: str) -> None:
    """MLflow keeps the files of what it deletes; those on a server are the server's to delete (`mlflow gc`)."""
    folder = local_folder(location)
    if folder is not None:
        shutil.rmtree(Path(folder), ignore_errors=True)
