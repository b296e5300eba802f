"""Refuses what the provenance of somebody else's adapters would run, reach, read and use (`config.stated`).

The provenance of adapters or of a checkpoint comes with the folder, whoever made that. What reaches something counts
only where the present parameters have the same value, where MLflow knows the provenance as this project's own, or
where the parameter ``trust`` names the folder's digest.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from visual_grpo.adapter_folder import adapter_digest
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import require_no_links
from visual_grpo.config import Parameters
from visual_grpo.config.presets import with_rewards
from visual_grpo.config.stated import parameters_digest, reaching
from visual_grpo.config.validation import ParameterError, validate
from visual_grpo.models.lora_lookup import without_commit
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.adapter_lookup import versions_with
from visual_grpo.tracking.sync import DIGEST

PARAMETERS = "parameters.digest"
"""Tag of a run: `parameters_digest` of the training, by which its checkpoints are known."""
_KINDS = {
    "variable": re.compile(r"\$\w"),
    "address": re.compile("://"),
    "code": re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*"),
}
"""Kind of a value -> its pattern; the first that matches counts."""
_DIGITS = 32
"""Digits of the digest that a refusal tells; ``trust`` takes no fewer."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_LORAS = (("model", "lora"), ("train", "start"))
ASKING_A_SERVER = ("http", "vlm_judge")
"""Built-in rewards that send prompts and samples to a server, by default one of this machine."""


def require_version(folder: Path, parameters: Mapping[str, Any]) -> None:
    """Raises UserError if this version of the project does not have the parameters that made ``folder``."""
    try:
        validate(parameters)
    except ParameterError as error:
        raise UserError(
            f"The provenance in {folder} is of a different version of this project, or is damaged. {error}"
        ) from error


def require_adapters(
    folder: Path,
    adopted: Mapping[str, Any],
    present: Parameters,
    *,
    given: Mapping[str, Any] = _NOTHING,
    also: Sequence[str] = (),
) -> None:
    """Raises UserError if the ``adopted`` parameters, of the adapters in ``folder``, reach what they may not.

    Args:
        present: the command's own parameters.
        given: the parameters of ``--params`` before validation.
        also: lines about what else the command takes from a folder that is not this project's own.
    """
    if taken := [*also, *_taken(adopted, present, given)]:
        digest = adapter_digest(folder)
        _require(folder, digest, (DIGEST, digest), taken, present.trust)


def require_checkpoint(
    folder: Path,
    digest: str,
    trained_with: Mapping[str, Any],
    adopted: Mapping[str, Any],
    present: Parameters,
    given: Mapping[str, Any],
) -> None:
    """Like `require_adapters`, for a checkpoint of the parameters ``trained_with``; its files have the ``digest``."""
    if taken := _taken(adopted, present, given):
        _require(folder, digest, (PARAMETERS, parameters_digest(trained_with)), taken, present.trust)


def _taken(adopted: Mapping[str, Any], present: Parameters, given: Mapping[str, Any]) -> list[str]:
    own, typed = reaching(present.model_dump(mode="json")), reaching(given)
    taken = [
        _line(".".join(path), value)
        for path, value in reaching(adopted).items()
        if not any(named in (own.get(path), typed.get(path)) for named in _names(path, value))
    ]
    rewards = with_rewards(adopted)["rewards"]  # With those that a preset adds.
    servers = [name for name in ASKING_A_SERVER if name in rewards and name not in present.rewards]
    return taken + [f"address: rewards.{name}, which asks a server" for name in servers]


def _names(path: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    """Returns the value, and of a LoRA at a commit of the hub the names by which a user gives it."""
    return (value, *without_commit(value)) if path in _LORAS and isinstance(value, str) else (value,)


def _line(name: str, value: object) -> str:
    """Names one parameter with its value and what that looks like."""
    text, shown = str(value), repr(value)
    found = ((kind, pattern.search(text)) for kind, pattern in _KINDS.items())
    kind, match = next(((kind, match) for kind, match in found if match), ("file, model or text", None))
    if kind == "code" and match and not _is_there(module := re.split("[.:]", match[0])[0]):
        shown += f" (the module {module} does not exist here)"
    return f"{kind}: {' '.join(name.split())} = {shown}"


def _is_there(module: str) -> bool:
    """Imports nothing, since ``module`` has no dot."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # Of a module that runs.
        return True


def _require(folder: Path, digest: str, known_by: tuple[str, str], taken: Sequence[str], trust: Sequence[str]) -> None:
    listed = "".join(f"\n  {line}" for line in taken)
    if any(digest.startswith(trusted) for trusted in trust):
        require_no_links(folder)  # The digest does not cover what they lead to.
        console.note(f"Taken from {folder}, which trust names:{listed}")
        return
    doubt = "which is not known as this project's own"
    try:
        if _is_own(*known_by):
            return
    except UserError as error:
        doubt = f"and MLflow could not tell whether it belongs to this project: {error}"
    other = f"trust is {', '.join(trust)}, but the digest of {folder} is {digest}. " if trust else ""
    raise UserError(
        f"{other}This command would take the following from {folder}, {doubt}:{listed}\n"
        "Nothing was run, opened or sent. If you trust whoever made this folder and accept the whole list, allow it for"
        f" the files that are in it now: --params=trust={digest[:_DIGITS]}. Otherwise give"
        " parameters of your own (--params), or do not use this folder."
    )


def _is_own(tag: str, digest: str) -> bool:
    """Returns whether a run, also a deleted one, or a registered version has the tag."""
    with mlflow_api.mlflow_client() as client:
        if mlflow_api.search(client, f"tags.`{tag}` = '{digest}'", deleted=True):
            return True
    return tag == DIGEST and bool(versions_with(digest))
