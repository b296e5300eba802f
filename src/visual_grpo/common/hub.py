"""Why the hub does not give a model, a dataset or a LoRA, and what to do: the first reason that a user reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import huggingface_hub
from huggingface_hub import DatasetInfo, ModelInfo, constants, get_session
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from visual_grpo.common.errors import UserError, nearest

Kind = Literal["model", "dataset", "LoRA"]
REFUSALS = (HTTPError, HFValidationError, OSError)
"""Exceptions of the client when the hub does not give it what it asks for."""
_LATER = {408: "too slow", 429: "too many requests", 500: "an error of the hub"}
_LATER |= dict.fromkeys((502, 503, 504), "the hub is down or overloaded")
"""Status -> its meaning, of answers that pass."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str | None) -> bool:
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def refusal(kind: Kind, named: str, path: str, revision: str | None, error: BaseException) -> str:
    """Says why the hub does not give a file of ``path``, a hub id.

    Args:
        named: the parameter whose value is ``path``.
        error: one of `REFUSALS`.
    """
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HTTPError | OSError):
        error = error.__cause__
    if why := silence(error):
        here, of_folder = ("is not a folder on this machine, it ", " of the folder") if kind == "model" else ("", "")
        return (
            f"{named}: {path} {here}was not downloaded before, and {why}. Check the name{of_folder}, or download"
            f" the {kind} where there is a network."
        )
    logged_in = huggingface_hub.get_token() is not None
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{path}"
    if isinstance(error, GatedRepoError):
        who = "the account of your token has no access yet" if logged_in else "this machine has no token"
        login = "" if logged_in else ", then run `hf auth login` or set HF_TOKEN"
        return f"{named}: {path} is gated, and {who}. Accept its licence at {page}{login}."
    if isinstance(error, RevisionNotFoundError):
        place = {"dataset": "data.revision", "LoRA": f"the commit in {named}"}.get(
            kind, f"{named.rpartition('.')[0]}.revision"
        )
        return f"{place} is {revision!r}, which is not a branch, tag or commit of {path} ({page}/commits)."
    if isinstance(error, RepositoryNotFoundError):
        who = "your token does not show it to you" if logged_in else "it needs a token (`hf auth login`, or HF_TOKEN)"
        missing = f"the hub has no {kind} {path}; or it is private, and {who}. Check the name at {page}."
        return f"{named}: {missing}{_nearest(kind, path)}"
    if isinstance(error, HFValidationError):
        return (
            f"{named} is {path!r}, which is neither a folder on this machine nor a hub id. Expected OWNER/NAME,"
            " as in the address of its page."
        )
    if isinstance(error, HfHubHTTPError):
        return f"{named}: the hub answers {_answer(path, error)}"
    if isinstance(error, OSError) and error.errno is not None:
        return not_stored(named, path, error)
    return f"{named}: {path} cannot be looked up on the hub: {error}"


def silence(error: BaseException) -> str | None:
    """Says why nobody answered, such as without a network; None for an error that is an answer."""
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError) and constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, LocalEntryNotFoundError) or (
        isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError)
    ):
        return f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__})"
    return None


Coming = dict[str, tuple[str, int]]
"""Repository -> the parameter that names it, and the bytes that are to be downloaded of it."""
_coming: Coming | None = None
"""Files that the command will download; None outside `added_up`."""


@contextmanager
def added_up() -> Iterator[Coming]:
    """Within the block, `require_space` asks for space for all that it was asked for since the block began."""
    global _coming
    before, _coming = _coming, {}
    try:
        yield _coming
    finally:
        _coming = before


def require_space(kind: Kind, named: str, path: str, missing: int) -> None:
    """Raises UserError where the cache cannot take ``missing`` bytes of ``path``."""
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=path, repo_type="dataset" if kind == "dataset" else "model") / "blobs"
    place = next(folder for folder in (blobs, *blobs.parents) if folder.exists())
    try:
        with TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        raise UserError(not_stored(named, path, error)) from error
    others = {} if _coming is None else {other: entry for other, entry in _coming.items() if other != path}
    if missing + _size(others) > free:
        beside = f" beside {_listed_sizes(others)}" if others else ""
        raise UserError(
            f"{named}: {shown_size(missing)} of {path} are to be downloaded{beside} into {cache}, where"
            f" {shown_size(free)} are free. Free some space, or set HF_HOME to a folder on a larger disk."
        )
    if _coming is not None and missing:
        _coming[path] = (named, missing)


def missing_bytes(info: ModelInfo | DatasetInfo, path: str, names: Iterable[str]) -> int:
    """Bytes of the files ``names`` of ``path``, at the commit that ``info`` is of, that the cache lacks."""
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    kind, cached = "dataset" if isinstance(info, DatasetInfo) else "model", huggingface_hub.try_to_load_from_cache
    lacking = (n for n in names if not isinstance(cached(path, n, repo_type=kind, revision=info.sha), str))
    return sum(sizes.get(name, 0) for name in lacking)


def in_all(coming: Coming) -> str | None:
    """Says what will be downloaded together; None where that is one repository, or nothing."""
    if len(coming) < 2:
        return None
    return f"Downloads {shown_size(_size(coming))} in all into {constants.HF_HUB_CACHE}: {_listed_sizes(coming)}"


def _size(coming: Coming) -> int:
    return sum(size for _, size in coming.values())


def _listed_sizes(coming: Coming) -> str:
    return " and ".join(f"{shown_size(size)} of {path} ({named})" for path, (named, size) in coming.items())


def downloaded(path: str) -> None:
    """Notes that the cache has ``path``, so that `require_space` no longer asks for space for it."""
    if _coming is not None:
        _coming.pop(path, None)


def shown_size(count: int) -> str:
    """``24.7 GB``, ``3.1 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def not_stored(named: str, path: str, error: OSError, cache: Path | None = None) -> str:
    """Says that the cache, by default that of models, takes no files."""
    return (
        f"{named}: {path} cannot be stored in the hub's cache, {cache or constants.HF_HUB_CACHE} ("
        f"{error.strerror or error}). Set HF_HOME to a folder with space that you may write into."
    )


def _nearest(kind: Kind, path: str) -> str:
    """Returns a hint at a repository of the owner with a similar name, or of a similar owner with the name; else ""."""
    owner, _, name = path.rpartition("/")
    with suppress(*REFUSALS, ValueError, LookupError, TypeError):  # It is a hint: an odd answer is none.
        near = nearest(name, [its_name for _, its_name in _listed(kind, author=owner)])
        if near not in (None, name):
            return f" Did you mean '{owner}/{near}'?"
        near = nearest(owner, [its_owner for its_owner, its_name in _listed(kind, search=name) if its_name == name])
        if near not in (None, owner):
            return f" Did you mean '{near}/{name}'?"
    return ""


def _listed(kind: Kind, **asked: str) -> list[tuple[str, str]]:
    """Owners and names of up to 1000 repositories."""
    url = f"{constants.ENDPOINT}/api/{'datasets' if kind == 'dataset' else 'models'}"
    headers, seconds = build_hf_headers(), constants.HF_HUB_ETAG_TIMEOUT
    answer = get_session().get(url, params=asked | {"limit": "1000"}, headers=headers, timeout=seconds)
    parts = (found["id"].partition("/") for found in answer.raise_for_status().json())
    return [(owner, name) for owner, _, name in parts]


def _answer(path: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in _LATER:
        return f"{status} for {path} ({_LATER[status]}). Try again later."
    why = f" ({error.server_message})" if error.server_message else ""
    if status in (401, 403):
        return (
            f"{status} for {path}: it does not accept your token{why}. Run `hf auth login` or set HF_TOKEN, with a"
            f" token that may read it ({constants.ENDPOINT}/settings/tokens)."
        )
    return f"{status} for {path}{why}."
