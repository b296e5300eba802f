"""Versions of a registered model: looked up, and the adapters in them brought to this machine."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.tracking.registry_client import MissingError, Server, local_folder
from visual_grpo.trained_adapters import FACTS, adapter_digest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
DIGEST = "adapter.digest"
"""Tag of a version and of its model: `trained_adapters.adapter_digest`."""
INSIDE = "data/visual_grpo"
"""Where a version's model has what `served_model` loads."""
ADAPTERS = f"{INSIDE}/adapters"
_URI = re.compile(r"models:/(?P<name>[^/]+?)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version of a registered model: the adapters of one training."""

    tracking_uri: str
    name: str
    version: int
    run_id: str | None
    """The MLflow run of the training; None if it had none."""
    tags: Mapping[str, str]
    location: str
    """Where MLflow keeps the version's files."""

    @property
    def digest(self) -> str | None:
        """Of the weights; None of a version that something else registered."""
        return self.tags.get(DIGEST)

    @property
    def uri(self) -> str:
        """As MLflow's functions and the parameter ``adapter`` take it."""
        return f"{SCHEME}{self.name}/{self.version}"

    def adapters(self, *, whatever_they_are: bool = False) -> Path:
        """The folder of the adapters on this machine; a temporary copy where MLflow keeps them elsewhere.

        Args:
            whatever_they_are: also where the weights are not those that were registered.

        Raises:
            UserError: the files are gone, not those that were registered, or the server does not give them.
        """
        folder = _adapters_at(self.tracking_uri, self.location, self.uri)
        if not whatever_they_are and self.digest is not None and adapter_digest(folder) != self.digest:
            raise UserError(
                f"The weights of {self.uri} in {folder} are not those that were registered (its tag {DIGEST} is"
                " another): they were changed since. Put the files back, or name another version."
            )
        return folder


def find_version(
    server: Server, name: str, *, alias: str | None = None, version: int | None = None
) -> Registered | None:
    """The version that ``alias`` points to, or the one with the number; None where there is no such.

    Raises:
        UserError: the server does not answer, or refuses the name.
    """
    if server.is_empty:
        return None
    if version is None:
        model = server.get(lambda client: client.get_registered_model(name))
        pointed_to = None if model is None else model.aliases.get(alias)
        if pointed_to is None:
            return None
        version = int(pointed_to)
    found = server.get(lambda client: client.get_model_version(name, str(version)))
    return None if found is None else registered(server, found)


def registered(server: Server, found: ModelVersion) -> Registered:
    """What MLflow found, with the place of its files."""
    location = server.ask(lambda client: client.get_model_version_download_uri(found.name, found.version))
    return Registered(
        tracking_uri=server.uri,
        name=found.name,
        version=int(found.version),
        run_id=found.run_id or None,
        tags=dict(found.tags),
        location=location,
    )


def named_version(uri: str, tracking_uri: str) -> Registered:
    """The version that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names.

    Raises:
        UserError: another form, no such version or alias (with those that there are), or the server does not answer.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise UserError(
            f"adapter is {uri!r}. Expected models:/NAME@ALIAS, such as models:/visual_grpo@champion, or"
            " models:/NAME/VERSION, such as models:/visual_grpo/3."
        )
    server, name, alias = Server.registry(tracking_uri), parts["name"], parts["alias"]
    version = None if parts["version"] is None else int(parts["version"])
    found = find_version(server, name, alias=alias, version=version)
    if found is None:
        raise UserError(f"adapter: MLflow ({server.shown}) has no {uri}.{those_there_are(server, name)}")
    return found


def those_there_are(server: Server, name: str) -> str:
    """The versions and aliases of the registered model, or the nearest of the other names."""
    if server.is_empty:
        return " Its database does not exist yet."
    model = server.get(lambda client: client.get_registered_model(name))
    if model is None:
        names = [other.name for other in server.ask(lambda client: client.search_registered_models())]
        listed = f" Registered models are: {', '.join(names)}." if names else " No model is registered yet."
        return nearest_hint(name, names) or listed
    numbers = sorted(int(version.version) for version in versions_of(server, name))
    aliases = ", ".join(f"{alias} (version {version})" for alias, version in sorted(model.aliases.items()))
    return f" {name} has the versions {', '.join(map(str, numbers)) or 'none'} and the aliases {aliases or 'none'}."


def versions_of(server: Server, name: str) -> list[ModelVersion]:
    """All versions of a registered model that were not deleted."""
    quote = '"' if "'" in name else "'"
    return list(server.ask(lambda client: client.search_model_versions(f"name = {quote}{name}{quote}")))


@cache
def _adapters_at(tracking_uri: str, location: str, uri: str) -> Path:
    """Brought here once in a command, though several places ask for it."""
    here = local_folder(location)
    if here is None:
        server = Server.registry(tracking_uri)
        try:
            here = server.transfer(lambda _: downloaded(f"{location}/{ADAPTERS}", tracking_uri))
        except MissingError:
            here = Path(location)
    else:
        here /= ADAPTERS
    if not (here / FACTS).is_file():
        raise UserError(
            f"The files of {uri} are gone: {location} has no {ADAPTERS}/{FACTS}. Put them back, or name another"
            " version."
        )
    return here


def downloaded(artifacts: str, tracking_uri: str) -> Path:
    """A copy of a folder of artifacts, removed when the command ends."""
    import mlflow

    copy = tempfile.mkdtemp(prefix="visual_grpo_adapters_")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return Path(mlflow.artifacts.download_artifacts(artifacts, dst_path=copy, tracking_uri=tracking_uri))
