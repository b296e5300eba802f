"""A dataset of the hub, at the commit that its branch is at; never a local folder, a different configuration or an
earlier version in its place."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import DatasetInfo, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

from visual_grpo.common.errors import UserError, chain
from visual_grpo.common.hub import downloaded, is_commit, missing_bytes, not_stored, refusal, require_space
from visual_grpo.config import DataConfig
from visual_grpo.config.data import HUB
from visual_grpo.data.record import shorten
from visual_grpo.data.splits import ALL

_DISK = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}


def at_commit(data: DataConfig) -> DataConfig:
    """Returns ``data`` with the commit that its branch is at as its revision: what is read in turns is of one commit.

    Data that are not on the hub, or cannot be looked up without a network, stay as they are. Raises UserError where the
    hub refuses.
    """
    if not data.path.startswith(HUB):
        return data
    info = _looked_up(data)
    return data if info is None else data.model_copy(update={"revision": info.sha})


def commit_of(data: DataConfig) -> str | None:
    """Returns the commit of a dataset on the hub; None if it is not known, and for other data."""
    return data.revision if data.path.startswith(HUB) and is_commit(data.revision) else None


def load_hub_dataset(data: DataConfig) -> dict[str | None, Any]:
    """Downloads the dataset at ``data.path`` and returns it by its splits.

    Raises UserError where the hub refuses, the dataset is a script, or ``data.config`` does not name one of several.
    Without a network, what was downloaded before is read.
    """
    name, loaded = data.path.removeprefix(HUB), dict[str | None, Any]()
    info = _looked_up(data)
    with _storing(data):
        builder = _builder(data, name, None if info is None else info.sha)
        # What the dataset's own description names may be files of this machine.
        listed = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
        if odd := [file for file in listed if not file.startswith(("hf://", "https://")) or "::" in file]:
            raise ValueError(f"it names {shorten(odd[0])!r}, which is not a file of the hub")
        if info is not None:
            start = f"{HUB}{info.id}@{info.sha}/"
            own = (file.removeprefix(start) for file in listed if file.startswith(start))
            require_space("dataset", data.parameter, name, missing_bytes(info, str(info.id), own))
        builder.download_and_prepare()
        downloaded(name)
    for split in {None} if data.split in (None, ALL) else {data.split, data.held_out_split or data.split}:
        dataset = builder.as_dataset(split=split)  # Also a part of one: train[:100].
        loaded |= dataset if isinstance(dataset, dict) else {split: dataset}
    return loaded


@contextmanager
def _storing(data: DataConfig) -> Iterator[None]:
    """Turns errors of the disk and of the connection, which the library wraps in its own, into a UserError."""
    from datasets import config

    name = data.path.removeprefix(HUB)
    try:
        yield
    except Exception as error:
        causes = [*chain(error)]
        lost = next(
            (each for each in causes if isinstance(each, HTTPError) and not isinstance(each, HfHubHTTPError)), None
        )
        if lost is not None:
            raise UserError(
                f"{data.parameter}: the download of {name} broke off: {lost}. Start the command again: it continues"
                " with the files that are still missing."
            ) from error
        of_system = (each for each in causes if isinstance(each, OSError))
        # A connection that is reset has a number, too.
        disk = (each for each in of_system if each.errno in _DISK or str(each).startswith("Not enough disk space"))
        if (found := next(disk, None)) is None:
            raise
        raise UserError(not_stored(data.parameter, name, found, config.HF_DATASETS_CACHE)) from error


def _looked_up(data: DataConfig) -> DatasetInfo | None:
    """Returns what the hub has at ``data.revision`` (None = main); None without a network."""
    hub, name = huggingface_hub.HfApi(), data.path.removeprefix(HUB)
    try:
        info = hub.dataset_info(
            name, revision=data.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if info.gated:  # Anyone may look at it.
            hub.auth_check(name, repo_type="dataset")
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(refusal("dataset", data.parameter, name, data.revision, error)) from error
    except (HTTPError, OSError) as error:
        if _cached(name):
            return None
        raise UserError(refusal("dataset", data.parameter, name, data.revision, error)) from error
    script = f"{name.rpartition('/')[2]}.py"
    branch = ", or a data.revision of it, such as refs/convert/parquet" if data.parameter == "data.path" else ""
    if any(file.rfilename == script for file in info.siblings or []):
        raise UserError(
            f"{data.parameter}: {name} is a script, {script}, which would have to be run; only tables and images are"
            f" read. Choose a dataset that holds them{branch}."
        )
    return info


def _builder(data: DataConfig, name: str, commit: str | None) -> Any:
    import datasets

    try:
        # By its address, and at a commit: a name may be a local folder's, and only main has tables of its own.
        builder = datasets.load_dataset_builder(data.path, data.config, revision=commit or data.revision)
    except ValueError as error:
        names = datasets.get_dataset_config_names(data.path, revision=commit or data.revision)
        if data.config in names or (data.config is None and len(names) < 2):
            raise
        raise UserError(_which(data, names)) from error
    # Where the hub gives nothing, the library takes what it read last.
    if commit is None and data.config is None and len(cached := _cached(name)) > 1:
        raise UserError(_which(data, cached))
    wanted = commit or commit_of(data)
    if wanted is not None and builder.hash != wanted:
        raise UserError(
            f"{data.parameter}: {name} cannot be read at commit {wanted}: only {builder.hash} is on this machine."
        )
    return builder


def _cached(name: str) -> list[str]:
    """The configurations that were read before."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, own = name.rpartition("/")
    folder = Path(config.HF_DATASETS_CACHE, f"{owner}___{camelcase_to_snakecase(own)}")
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _which(data: DataConfig, names: list[str]) -> str:
    has = f"{data.parameter}: {data.path} has the configurations {', '.join(names)}"
    if data.parameter != "data.path":
        return (
            f"{has}, and data.config chooses one of the training data alone: save the records that you want in a file."
        )
    got = "none is named" if data.config is None else f"data.config is {data.config!r}"
    return f"{has}, and {got}: set data.config to one."
