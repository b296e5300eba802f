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
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

Kind = Literal["model", "dataset", "LoRA"]
REFUSALS = (HTTPError, HFValidationError, OSError)
"""What the client raises where the hub does not give it what it asks for."""
_LATER = {408: "too slow", 429: "too many requests", 500: "an error of the hub"}
_LATER |= dict.fromkeys((502, 503, 504), "the hub is down or overloaded")
"""Status -> its meaning, of answers that pass."""


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
        place = f"{named.rpartition('.')[0]}.revision"
        return f"{place} is {revision!r}, which is not a branch, tag or commit of {path} ({page}/commits)."
    if isinstance(error, RepositoryNotFoundError):
        who = "your token does not show it to you" if logged_in else "it needs a token (`hf auth login`, or HF_TOKEN)"
        return f"{named}: the hub has no {kind} {path}; or it is private, and {who}. Check the name at {page}."
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


def not_stored(named: str, path: str, error: OSError) -> str:
    """Says that the cache takes no files."""
    return (
        f"{named}: {path} cannot be stored in the hub's cache, {constants.HF_HUB_CACHE} ({error.strerror}). Set HF_HOME"
        " to a folder with space that you may write into."
    )


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
