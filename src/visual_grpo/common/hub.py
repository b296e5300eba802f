"""Why the hub does not give a model or a dataset, and what to do: the first reason that a user reads."""

from __future__ import annotations

from typing import Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

Kind = Literal["model", "dataset"]
REFUSALS = (HTTPError, HFValidationError, OSError)
"""What the client raises where it is not given what it asks for."""
_SECTIONS = {"model": "model", "dataset": "data"}
"""Kind -> the section of the parameters that name it."""


def refusal(kind: Kind, path: str, revision: str | None, error: BaseException) -> str:
    """Says why the hub does not give a file of ``path``, a hub id.

    Args:
        error: one of `REFUSALS`.
    """
    if isinstance(error, LocalEntryNotFoundError):
        if not isinstance(error.__cause__, HfHubHTTPError):
            return unreachable(kind, path)
        error = error.__cause__
    section, logged_in = _SECTIONS[kind], huggingface_hub.get_token() is not None
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{path}"
    if isinstance(error, GatedRepoError):
        who = "the account of your token has no access yet" if logged_in else "this machine has no token"
        login = "" if logged_in else ", then run `hf auth login` or set HF_TOKEN"
        return f"{section}.path: {path} is gated, and {who}. Accept its licence at {page}{login}."
    if isinstance(error, RevisionNotFoundError):
        return f"{section}.revision is {revision!r}, which is not a branch, tag or commit of {path} ({page}/commits)."
    if isinstance(error, RepositoryNotFoundError):
        who = "your token does not show it to you" if logged_in else "it needs a token (`hf auth login`, or HF_TOKEN)"
        return f"{section}.path: the hub has no {kind} {path}; or it is private, and {who}. Check the name at {page}."
    if isinstance(error, HFValidationError):
        return (
            f"{section}.path is {path!r}, which is neither a folder on this machine nor a hub id. Expected OWNER/NAME,"
            " as in the address of its page."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        later = {429: "too many requests", 500: "an error of the hub", 503: "the hub is overloaded"}
        return f"{section}.path: the hub answers {status} for {path} ({later.get(status, 'refused')}). Try again later."
    return f"{section}.path: {path} cannot be looked up on the hub: {error}"


def unreachable(kind: Kind, path: str) -> str:
    """Says that ``path``, a hub id, is neither in the cache nor to be had without a network."""
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
    here, named = ("is not a folder on this machine, it ", " of the folder") if kind == "model" else ("", "")
    return (
        f"{_SECTIONS[kind]}.path: {path} {here}was not downloaded before, and {why}. Check the name{named}, or download"
        f" the {kind} where there is a network."
    )
