"""Why the hub does not give a model, a dataset or a LoRA, and what to do: the first reason that a user reads."""

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

Kind = Literal["model", "dataset", "LoRA"]
REFUSALS = (HTTPError, HFValidationError, OSError)
"""What the client raises where it is not given what it asks for."""
_NAMED_BY = {"model": "model.path", "dataset": "data.path", "LoRA": "train.start"}
"""Kind -> the parameter that names it."""


def refusal(kind: Kind, path: str, revision: str | None, error: BaseException) -> str:
    """Says why the hub does not give a file of ``path``, a hub id.

    Args:
        error: one of `REFUSALS`.
    """
    if isinstance(error, LocalEntryNotFoundError):
        if not isinstance(error.__cause__, HfHubHTTPError):
            return unreachable(kind, path)
        error = error.__cause__
    named, logged_in = _NAMED_BY[kind], huggingface_hub.get_token() is not None
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{path}"
    if isinstance(error, GatedRepoError):
        who = "the account of your token has no access yet" if logged_in else "this machine has no token"
        login = "" if logged_in else ", then run `hf auth login` or set HF_TOKEN"
        return f"{named}: {path} is gated, and {who}. Accept its licence at {page}{login}."
    if isinstance(error, RevisionNotFoundError):
        section = named.partition(".")[0]
        return f"{section}.revision is {revision!r}, which is not a branch, tag or commit of {path} ({page}/commits)."
    if isinstance(error, RepositoryNotFoundError):
        who = "your token does not show it to you" if logged_in else "it needs a token (`hf auth login`, or HF_TOKEN)"
        return f"{named}: the hub has no {kind} {path}; or it is private, and {who}. Check the name at {page}."
    if isinstance(error, HFValidationError):
        return (
            f"{named} is {path!r}, which is neither a folder on this machine nor a hub id. Expected OWNER/NAME,"
            " as in the address of its page."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        later = {429: "too many requests", 500: "an error of the hub", 503: "the hub is overloaded"}
        return f"{named}: the hub answers {status} for {path} ({later.get(status, 'refused')}). Try again later."
    return f"{named}: {path} cannot be looked up on the hub: {error}"


def unreachable(kind: Kind, path: str) -> str:
    """Says that ``path``, a hub id, is neither in the cache nor to be had without a network."""
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
    here, of_folder = ("is not a folder on this machine, it ", " of the folder") if kind == "model" else ("", "")
    return (
        f"{_NAMED_BY[kind]}: {path} {here}was not downloaded before, and {why}. Check the name{of_folder}, or download"
        f" the {kind} where there is a network."
    )
