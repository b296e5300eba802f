"""MLflow's address."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from visual_grpo.errors import UserError

_URI = "MLFLOW_TRACKING_URI"
_SCHEMES = ("", "file", "http", "https", "databricks", "sqlite", "postgresql", "mysql", "mssql")
_default = ""


def tracking_uri() -> str:
    """MLflow's address in this process: MLFLOW_TRACKING_URI, else mlflow.db in the project's folder."""
    return os.environ.get(_URI) or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def use_project(project: Path) -> None:
    """Makes the project's mlflow.db the address, unless the user's MLFLOW_TRACKING_URI names another.

    The address is absolute: a relative SQLite path would depend on the working directory, for example notebooks/.

    Raises:
        UserError: MLflow knows no address of that kind.
    """
    global _default
    if os.environ.get(_URI, "") in ("", _default):
        os.environ[_URI] = _default = f"sqlite:///{project.resolve() / 'mlflow.db'}"
    scheme = urlsplit(tracking_uri()).scheme.partition("+")[0]
    if scheme not in (*_SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))):
        raise UserError(
            f"MLflow's address begins with {scheme}://, which MLflow does not know. Expected a database, such as"
            " sqlite:///mlflow.db, or a server, such as http://host:5000: set MLFLOW_TRACKING_URI, or leave it out."
        )
