"""Artifacts that follow the project when its folder is moved or copied.

MLflow stores absolute locations. In a moved project they point to a folder that is gone, in a copied one to the
original's, which the copy would write into.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

from visual_grpo.errors import UserError

ARTIFACTS = "mlartifacts"
_SQLITE = "sqlite:///"
_SERVERS = ("http", "https", "databricks")
_FILES = ("", "file")
_LOCATIONS = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}
"""Table of MLflow's database -> its column with a location."""


def use_server(tracking_uri: str, project: Path) -> None:
    """Makes it MLflow's server in this process, and lets artifacts follow the project. Creates nothing.

    Raises:
        UserError: MLflow knows no server of that kind, so that trying it again would never help.
    """
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    _check_kind(tracking_uri)
    with contextlib.suppress(SQLAlchemyError):  # Locked or damaged: the next command tries it again.
        follow_project(tracking_uri, project)
    mlflow.set_tracking_uri(tracking_uri)


def _check_kind(tracking_uri: str) -> None:
    from mlflow import MlflowClient
    from mlflow.store.db.db_types import DATABASE_ENGINES
    from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

    kind = urlsplit(tracking_uri).scheme.partition("+")[0]
    if kind in (*_SERVERS, *_FILES, *DATABASE_ENGINES):
        return  # Asking MLflow would open a database.
    try:
        MlflowClient(tracking_uri)
    except UnsupportedModelRegistryStoreURIException as error:
        raise UserError(
            f"MLflow's address begins with {kind}://, which MLflow does not know. Expected a database, such as"
            " sqlite:///mlflow.db, or a server, such as http://host:5000: set MLFLOW_TRACKING_URI, or leave it out."
        ) from error


def absolute(location: str, project: Path) -> str:
    """A place of artifacts; a relative one is in the project."""
    return location if urlsplit(location).scheme else (project / location).as_uri()


def default_artifacts(tracking_uri: str, location: str | None, project: Path) -> str | None:
    """Where an experiment keeps its artifacts.

    A folder of the project is none for a server, which other machines reach too: None = it has a place for them.
    """
    if location is None or (not urlsplit(location).scheme and urlsplit(tracking_uri).scheme in _SERVERS):
        return None
    return absolute(location, project)


def follow_project(tracking_uri: str, project: Path) -> int:
    """Points all locations below another folder's ``mlartifacts`` to that of ``project``; returns how many.

    Only in a database in the project's own folder: a shared one may belong to others.
    """
    database = Path(tracking_uri.removeprefix(_SQLITE))
    if not tracking_uri.startswith(_SQLITE) or not database.is_file() or database.parent.resolve() != project.resolve():
        return 0
    from sqlalchemy import create_engine, inspect, text

    here, changed = project.resolve() / ARTIFACTS, 0
    engine = create_engine(tracking_uri)
    try:
        with engine.begin() as connection:
            tables = set(inspect(connection).get_table_names())
            for table, column in _LOCATIONS.items():
                if table not in tables:
                    continue
                for (location,) in connection.execute(text(f"SELECT DISTINCT {column} FROM {table}")).all():  # noqa: S608
                    moved = _moved(location, here)
                    if moved is not None:
                        update = text(f"UPDATE {table} SET {column} = :moved WHERE {column} = :location")  # noqa: S608
                        changed += connection.execute(update, {"moved": moved, "location": location}).rowcount
    finally:
        engine.dispose()
    return changed


def _moved(location: str | None, here: Path) -> str | None:
    """The location in this project; None where it is already there, or is no local ``mlartifacts``."""
    if location is None or "://" in location.removeprefix("file://"):
        return None
    scheme = "file://" if location.startswith("file://") else ""
    path = Path(location.removeprefix("file://"))
    if ARTIFACTS not in path.parts or path.is_relative_to(here):
        return None
    inside = path.parts[len(path.parts) - path.parts[::-1].index(ARTIFACTS) :]
    return scheme + here.joinpath(*inside).as_posix()
