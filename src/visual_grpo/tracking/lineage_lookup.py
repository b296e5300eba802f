"""What MLflow and DVC know of where a training's adapters and data come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.errors import UserError
from visual_grpo.tracking import lineage
from visual_grpo.tracking.model_ref import find_adapters, run_of
from visual_grpo.tracking.registry_client import Server, tracking_uri
from visual_grpo.tracking.tracker import Tracker
from visual_grpo.tracking.versions import DIGEST, Registered, registered
from visual_grpo.trained_adapters import adapter_digest, read_facts

if TYPE_CHECKING:
    pass

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


def input_tags(inputs: Sequence[str], project: Path) -> dict[str, str]:
    """``dvc.<path>`` -> hash of what DVC tracks in ``inputs`` (files and folders) and is now as DVC recorded it.

    The active run's tags are corrected: it has none of what it replaces itself.
    """
    kept = {
        tag: digest
        for tag, digest in lineage.dvc_tags(project).items()
        if _is_in(Path(tag.removeprefix(_HASH)), [Path(path) for path in inputs])
    }
    tracker = Tracker.active()
    tracker.remove_tags({f"{_HASH}{path}" for path in lineage.recorded(project)} - kept.keys())
    tracker.tags(kept)
    return kept


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)
