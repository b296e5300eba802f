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

from visual_grpo.adapter_folder import BASE, FACTS, LATEST, NONE, adapter_digest, read_facts
from visual_grpo.common.digests import digest_once
from visual_grpo.common.errors import Remedy, UserError, nearest_hint
from visual_grpo.common.files import settled
from visual_grpo.models.lora_lookup import lora_file
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.sync import DIGEST, TRAINING_DIGEST, made_others

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
WEIGHTS = "weights.digest"
"""Tag of a version: `adapter_folder.weights_digest`."""
ADAPTERS = "data/visual_grpo/adapters"
"""Folder of the adapters among a version's files (`served_model`)."""
_URI = re.compile(r"models:/(?P<name>[^/]+?)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


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
    def weights(self) -> str | None:
        """Digest of its weights; None for a version that a different program registered."""
        return self.tags.get(WEIGHTS)

    @property
    def uri(self) -> str:
        """The address that MLflow's functions and the parameter ``adapter`` take."""
        return f"{SCHEME}{self.name}/{self.version}"

    def adapters(self, *, check: bool = True) -> Path:
        """Returns the folder of the adapters; a temporary copy if MLflow keeps its artifacts on a server.

        Raises UserError if the files are gone or, with ``check``, are not those that were registered.
        """
        with mlflow_api.mlflow_client() as client:
            folder = download(client.get_model_version_download_uri(self.name, str(self.version)), ADAPTERS)
        if check and self.tags.get(DIGEST) not in (None, adapter_digest(folder)):
            raise UserError(
                f"The adapters of {self.uri} in {folder} are gone, or differ from what was registered: weights or"
                f" {FACTS} were edited. Register them again, or name a different version."
            )
        return folder


def find_adapters(named: str, latest: Path) -> Path:
    """Returns the folder of the adapters; raises UserError if there are none, or several runs have the name.

    Args:
        named: ``latest``, a folder, the id (at least its first 6 characters) or name of an MLflow run, or a version of
            a registered model: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        latest: the folder that the train pipeline writes.
    """
    if named == LATEST:
        return latest
    if not named.startswith(SCHEME) and settled(folder := Path(named).expanduser()).is_dir():
        return folder
    return _adapters_in_mlflow(named, mlflow_api.tracking_uri())


def adapters_or_base(named: str, latest: Path) -> Path | None:
    """Returns what `find_adapters` does; None for the base model, which is named none, or base in ``train.start``.

    Raises UserError if the folder does not come from a training.
    """
    if named in (NONE, BASE):
        return None
    folder = find_adapters(named, latest)
    read_facts(folder)
    return folder


def start_of_training(named: str, latest: Path) -> Path | None:
    """Returns what ``train.start`` names: a file of a LoRA, the folder of a training's adapters, or None for the base.

    Raises UserError as `adapters_or_base` and `models.lora_lookup.lora_file` do.
    """
    return lora_file(named, "train.start") or adapters_or_base(named, latest)


def start_digest(start: Path | None) -> str | None:
    """sha256 of what `start_of_training` gives, 64 hex digits; None of None."""
    if start is None:
        return None
    return digest_once(start) if start.is_file() else adapter_digest(start)


def find_start(named: str, digest: str, latest: Path, run: str | None = None) -> Path:
    """Returns the adapters, or the file, with ``digest`` that a training started from; raises UserError if no place has
    them.

    ``named`` is its ``train.start``, which may have changed; ``run`` the MLflow run that made them, if known.
    """
    for name in filter(None, (named, run)):
        with suppress(UserError):
            start = start_of_training(name, latest)
            if start is not None and start.exists() and start_digest(start) == digest:
                return start.absolute()
    for version in versions_with(digest):
        with suppress(UserError):
            return version.adapters().resolve()
    places = "train.start names different adapters now, and neither their MLflow run nor a registered version has them"
    raise UserError(f"The adapters that the run started from ({named}, {digest[:12]}) are gone: {places}.")


def find_version(uri: str) -> Registered:
    """Returns the version that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names; raises UserError if none."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise UserError(
            f"{uri!r} is not the address of a registered adapter. Expected {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION"
        )
    name, alias, number = parts.group("name", "alias", "version")
    with mlflow_api.mlflow_client() as client:
        if alias is None:
            version = mlflow_api.get(client.get_model_version, name, number)
        else:
            version = mlflow_api.get(client.get_model_version_by_alias, name, alias)
    if version is None:
        raise UserError(
            f"MLflow ({mlflow_api.shown()}) has no {uri}. Its page lists all models and their versions.",
            remedy=Remedy(make="ui"),
        )
    return Registered.of(version)


def versions_with(digest: str, tag: str = DIGEST) -> list[Registered]:
    """Returns the versions of all registered models with this digest, which is of the adapters or of their weights."""
    with mlflow_api.mlflow_client() as client:
        return [Registered.of(version) for version in client.search_model_versions(f"tags.`{tag}` = '{digest}'")]


def training_run(facts: Mapping[str, Any]) -> Run | None:
    """Returns the MLflow run of a training; None if it had none, or it was deleted."""
    if facts.get("mlflow_run_id") is None:
        return None
    with mlflow_api.mlflow_client() as client:
        run = mlflow_api.find_run(client, facts["mlflow_run_id"])
    return run if run is not None and mlflow_api.is_active(run) else None


def own_run(adapters: Path) -> Run | None:
    """Returns `training_run`; None if that run made other adapters, since a provenance may name any run."""
    run = training_run(read_facts(adapters))
    return None if run is not None and made_others(run, adapter_digest(adapters)) else run


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
def _adapters_in_mlflow(named: str, uri: str) -> Path:
    """Looks a name up once in a command, since an alias that moves meanwhile would mix two adapters.

    ``uri`` is part of the cache's key only.
    """
    if named.startswith(SCHEME):
        return find_version(named).adapters()
    with mlflow_api.mlflow_client() as client:
        runs = mlflow_api.search(client)
        matches = [run for run in runs if _matches(run, named)]
        if len(matches) == 1:
            folder = download(matches[0].info.artifact_uri, "adapters")
            if (folder / FACTS).is_file():
                return folder
            raise UserError(f"The MLflow run {named!r} has no adapters: unfinished, or they were deleted.")
    if matches:
        ids = ", ".join(run.info.run_id for run in matches)
        raise UserError(f"{len(matches)} MLflow runs are named {named!r}; name one by its id: {ids}")
    names = [run.info.run_name for run in runs if run.info.run_name and TRAINING_DIGEST in run.data.tags]
    raise UserError(
        f"{named!r} is neither a folder of adapters nor an MLflow run.{nearest_hint(named, names)} A registered adapter"
        f" is named models:/NAME@ALIAS. The page of MLflow ({mlflow_api.shown()}) lists all runs.",
        remedy=Remedy(make="ui"),
    )


def _matches(run: Run, named: str) -> bool:
    """Returns True if ``named`` is the run's name, or the beginning of its id or key."""
    ids = (run.info.run_id, run.data.tags.get(mlflow_api.KEY, ""))
    return run.info.run_name == named or (len(named) >= 6 and any(key.startswith(named) for key in ids))
