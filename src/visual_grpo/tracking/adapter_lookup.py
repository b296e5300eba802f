"""Finds what the parameter ``adapter`` names: a folder, an MLflow run, or a version of a registered model."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import FACTS, LATEST, NONE, adapter_digest, read_facts
from visual_grpo.config.command import Command, rerun_command
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.sync import TRAINING_DIGEST

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
DIGEST = "adapter.digest"
"""Tag of a version: `config.adapter_folder.adapter_digest`."""
ADAPTERS = "data/visual_grpo/adapters"
"""Folder of the adapters among a version's files (`served_model`)."""
_URI = re.compile(r"models:/(?P<name>[^/]+?)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_SHORTEST_ID = 6
BASE = "base"
"""``train.start`` of a training with fresh adapters."""


@dataclass(frozen=True)
class Registered:
    """A version of a registered model: the adapters of one training."""

    name: str
    version: int
    tags: Mapping[str, str]

    @classmethod
    def of(cls, version: ModelVersion) -> Registered:
        return cls(version.name, int(version.version), dict(version.tags))

    @property
    def digest(self) -> str | None:
        """The digest of the weights; None for a version that another program registered."""
        return self.tags.get(DIGEST)

    @property
    def uri(self) -> str:
        """The name that MLflow's functions and the parameter ``adapter`` take."""
        return f"{SCHEME}{self.name}/{self.version}"

    def adapters(self, *, check: bool = True) -> Path:
        """Returns the folder of the adapters; a temporary copy if MLflow keeps its artifacts on a server.

        Raises:
            UserError: the files are gone or, with ``check``, are not those that were registered.
        """
        with mlflow_api.mlflow_client() as client:
            folder = download(client.get_model_version_download_uri(self.name, str(self.version)), ADAPTERS)
        remedy = "Put them back, or name another version."
        if not (folder / FACTS).is_file():
            raise UserError(f"The files of {self.uri} are gone: {folder} has no {FACTS}. {remedy}")
        if check and self.digest is not None and adapter_digest(folder) != self.digest:
            raise UserError(f"The weights of {self.uri} in {folder} are not those that were registered. {remedy}")
        return folder


def find_adapters(named: str, latest: Path) -> Path:
    """Returns the folder of the adapters.

    Args:
        named: ``latest``, a folder, the id (at least its first 6 characters) or name of an MLflow run, or a version of
            a registered model: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        latest: the folder that the train pipeline writes.

    Raises:
        UserError: no run or version has the name, several runs have it, or the adapters are gone.
    """
    if named == LATEST:
        return latest
    if not named.strip():
        raise UserError(
            f"adapter is empty. Expected {LATEST}, a folder that a training left, the id or name of an MLflow run,"
            f" {SCHEME}NAME@ALIAS or, for generate and compare, {NONE} (the base model)."
        )
    if named.startswith(SCHEME):
        return _adapters_of_version(named, mlflow_api.tracking_uri())
    if (Path(named) / FACTS).is_file():
        return Path(named)
    if Path(named).is_dir():
        raise UserError(
            f"adapter: {named} has no {FACTS}; expected the folder that a training leaves:"
            f" {Command.current().without('adapter').for_pipeline('train')}"
        )
    return _adapters_of_run(named, mlflow_api.tracking_uri())


def adapters_of(config: Parameters) -> Path | None:
    """Returns the folder that the parameter ``adapter`` names; None for the base model.

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
    """Returns the base model that ``adapters`` were trained on; without adapters, the one of the parameters.

    Raises:
        UserError: the starter has not pretrained it yet.
    """
    model = (None if adapters is None else read_facts(adapters)["model"]) or config.model.path or config.starter.model
    if config.model.path is None and not Path(model).is_dir():
        raise UserError(f"The base model {model} does not exist yet. Make it with: {rerun_command('starter')}")
    return str(model)


def find_start(named: str, digest: str, latest: Path, run: str | None = None) -> Path:
    """Returns the adapters with ``digest`` that a training started from.

    Looks at ``named`` first, which may mean other adapters by now, then in the MLflow run and in the registry.

    Args:
        named: the training's parameter ``train.start``.
        run: id of the MLflow run that made them; None = not known.

    Raises:
        UserError: no place has them.
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


def find_version(uri: str) -> Registered:
    """Returns the version that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names.

    Raises:
        UserError: the form is another, or there is no such version or alias; the message lists those that exist.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise UserError(f"adapter is {uri!r}. Expected {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION")
    version = get_version(**parts.groupdict())
    if version is None:
        raise UserError(f"adapter: {explain_missing(parts['name'], uri)}")
    return version


def get_version(name: str, alias: str | None = None, version: str | None = None) -> Registered | None:
    """Returns the version with this alias or number; None if there is none."""
    with mlflow_api.mlflow_client() as client:
        if version is None:
            entity = mlflow_api.get(client.get_model_version_by_alias, name, str(alias))
        else:
            entity = mlflow_api.get(client.get_model_version, name, version)
    return None if entity is None else Registered.of(entity)


def versions_with(digest: str) -> list[Registered]:
    """Returns the versions of all registered models that have these weights."""
    with mlflow_api.mlflow_client() as client:
        return [Registered.of(version) for version in client.search_model_versions(f"tags.`{DIGEST}` = '{digest}'")]


def explain_missing(name: str, wanted: str) -> str:
    """Says that MLflow lacks ``wanted``, and which versions and aliases, or other models, it has."""
    with mlflow_api.mlflow_client() as client:
        model = mlflow_api.get(client.get_registered_model, name)
        if model is None:
            names = ", ".join(other.name for other in client.search_registered_models())
            return f"MLflow ({mlflow_api.shown()}) has no {wanted}. Registered models are: {names or 'none'}."
        numbers = sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'"))
    versions = ", ".join(map(str, numbers)) or "none"
    aliases = ", ".join(f"{alias} (version {version})" for alias, version in sorted(model.aliases.items())) or "none"
    return (
        f"MLflow ({mlflow_api.shown()}) has no {wanted}. {name} has the versions {versions} and the aliases {aliases}."
    )


def training_run(facts: Mapping[str, Any]) -> Run | None:
    """Returns the MLflow run of a training; None if it had none, or it was deleted."""
    if facts.get("mlflow_run_id") is None:
        return None
    with mlflow_api.mlflow_client() as client:
        run = mlflow_api.find_run(client, facts["mlflow_run_id"])
    return run if run is not None and mlflow_api.is_active(run) else None


@cache
def download(location: str, path: str) -> Path:
    """Returns a local folder of artifacts, or downloads it from a server; the copy is removed when the command ends."""
    import mlflow

    if (folder := mlflow_api.local_folder(location)) is not None:
        return folder / path
    copy = tempfile.mkdtemp(prefix="visual_grpo_adapters_")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return Path(mlflow.artifacts.download_artifacts(f"{location}/{path}", dst_path=copy))


@cache
def _adapters_of_version(named: str, uri: str) -> Path:
    """Looks a version up once in a command: an alias that is moved meanwhile would mix two adapters."""
    return find_version(named).adapters()


@cache
def _adapters_of_run(named: str, uri: str) -> Path:
    with mlflow_api.mlflow_client() as client:
        runs = mlflow_api.search(client)
        matches = [run for run in runs if _matches(run, named)]
        if len(matches) == 1:
            folder = download(matches[0].info.artifact_uri, "adapters")
            if (folder / FACTS).is_file():
                return folder
            raise UserError(f"adapter: the MLflow run {named!r} has no adapters: unfinished, or they were deleted.")
    if matches:
        ids = "\n".join(f"  {run.info.run_id}  {run.info.run_name}" for run in matches[:10])
        raise UserError(f"adapter: {len(matches)} MLflow runs are named {named!r}; name one by its id:\n{ids}")
    names = [run.info.run_name for run in runs if run.info.run_name and TRAINING_DIGEST in run.data.tags]
    raise UserError(
        f"adapter: there is no folder and no MLflow run {named!r}.{nearest_hint(named, names)} All runs are in"
        f" {mlflow_api.shown()}; `make ui` lists them. A registered adapter is named models:/NAME@ALIAS."
    )


def _matches(run: Run, named: str) -> bool:
    """Returns True if ``named`` is the run's name, or the beginning of its id or key."""
    ids = (run.info.run_id, run.data.tags.get(mlflow_api.KEY, ""))
    return run.info.run_name == named or (len(named) >= _SHORTEST_ID and any(key.startswith(named) for key in ids))
