"""Finds a LoRA that a parameter names: a file of this machine, or one on the hub, which is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from visual_grpo.common.digests import SINGLE_FILES, on_hub
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import settled
from visual_grpo.common.hub import REFUSALS, downloaded, refusal, require_space, silence

SAFETENSORS = ".safetensors"
_HUB_ID = r"[\w-][\w.-]*/[\w.-]+"
_HUB_FILE = re.compile(rf"(?P<repository>{_HUB_ID})(?:/(?P<file>.+))?")
_HUB_ADDRESS = re.compile(
    rf"(?P<repository>{_HUB_ID})(?:@(?P<commit>[0-9a-f]{{40}}))?(?:/(?:(?:blob|resolve|tree)/main/?)?(?P<file>.+)?)?"
)
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""Default name of the file to which diffusers saves a LoRA."""


def lora_file(named: str, parameter: str) -> Path | None:
    """Returns the file of the LoRA that ``parameter`` names, downloaded if need be; None if it names no such file.

    It is a file here, or on the hub as OWNER/NAME, OWNER/NAME/FILE, their address or what `lora_at_commit` returns.
    Raises UserError for one that is not there, or is not safetensors.
    """
    if (found := _on_hub(named, parameter)) is not None:
        return found[0]
    path = settled(Path(named).expanduser())
    if not path.is_file() and not named.endswith(SINGLE_FILES):
        return None
    if not named.endswith(SAFETENSORS):
        raise UserError(f"{parameter} is {named}: only {SAFETENSORS} is read, since other files can bring code.")
    if not path.is_file():
        raise UserError(f"{parameter} is {named}, a file that does not exist.")
    return path


def merged_lora(named: str) -> Path:
    """Returns the file that ``model.lora`` names. Raises UserError as `lora_file` does, and for any other name."""
    if (file := lora_file(named, "model.lora")) is None:
        raise UserError(
            f"model.lora is {named}, which names no LoRA: expected FILE{SAFETENSORS}, or OWNER/NAME or"
            f" OWNER/NAME/FILE{SAFETENSORS} of the hub. Adapters of a training here are a start: train.start={named}"
        )
    return file


def cached_lora(named: str) -> Path | None:
    """Returns the file of a LoRA at a commit of the hub (`lora_at_commit`), if this machine has it. Asks nobody."""
    if (parts := _file_at_commit(named)) is None:
        return None
    known = huggingface_hub.try_to_load_from_cache(parts["repository"], parts["file"], revision=parts["commit"])
    return Path(known) if isinstance(known, str) else None


def without_commit(named: str) -> tuple[str, ...]:
    """Returns the names by which a user gives a LoRA at a commit of the hub: OWNER/NAME and OWNER/NAME/FILE."""
    parts = _file_at_commit(named)
    return () if parts is None else (parts["repository"], f"{parts['repository']}/{parts['file']}")


def _file_at_commit(named: str) -> re.Match[str] | None:
    parts = _HUB_ADDRESS.fullmatch(on_hub(named) or "")
    return parts if parts is not None and parts["commit"] is not None and parts["file"] is not None else None


def lora_at_commit(named: str, parameter: str) -> str:
    """Returns the address of a LoRA on the hub at the commit that its main is at, hf://OWNER/NAME@COMMIT/FILE; a file
    here as it is ``named``. Raises UserError as `lora_file` does."""
    found = _on_hub(named, parameter)
    return named if found is None else found[1]


def _on_hub(named: str, parameter: str) -> tuple[Path, str] | None:
    """Downloads what ``named`` is on the hub; returns the file and its address at a commit."""
    if (address := on_hub(named)) is not None:
        if (parts := _HUB_ADDRESS.fullmatch(address)) is None:
            raise UserError(f"{parameter} is {named}, which is not the address of a LoRA: expected OWNER/NAME/FILE.")
        return _downloaded(parts["repository"], parts["file"], parts["commit"], parameter)
    path = settled(Path(named).expanduser())
    parts = None if path.exists() else _HUB_FILE.fullmatch(named)
    if parts is None or (parts["file"] is not None and (path.parent.is_dir() or not named.endswith(SAFETENSORS))):
        return None
    if parts["file"] is None and named.endswith(SINGLE_FILES):
        return None
    return _downloaded(parts["repository"], parts["file"], None, parameter)


def _downloaded(repository: str, file: str | None, commit: str | None, parameter: str) -> tuple[Path, str]:
    """Downloads ``file``, by default the one that diffusers would load. Raises UserError if it cannot."""
    known = huggingface_hub.try_to_load_from_cache(repository, file or _DIFFUSERS_FILE, revision=commit)
    chosen = file or _DIFFUSERS_FILE
    if commit is None or not isinstance(known, str):
        try:
            info = huggingface_hub.model_info(
                repository, revision=commit, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
            sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
            chosen = _chosen(repository, file, [name for name in sizes if name.endswith(SAFETENSORS)], parameter)
            if not isinstance(huggingface_hub.try_to_load_from_cache(repository, chosen, revision=info.sha), str):
                require_space("LoRA", parameter, repository, sizes[chosen])
            known = huggingface_hub.hf_hub_download(repository, chosen, revision=commit)
            downloaded(repository)
        except REFUSALS as error:
            if not isinstance(known, str):
                raise UserError(_refused(repository, file, commit, parameter, error)) from error
    snapshot = Path(known).parents[chosen.count("/")]
    return Path(known), f"hf://{repository}@{snapshot.name}/{chosen}"


def _refused(repository: str, file: str | None, commit: str | None, parameter: str, error: BaseException) -> str:
    why = refusal("LoRA", parameter, repository, commit, error)
    if silence(error) or (isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)):
        why += " It is neither a folder nor a file here."
        why += "" if file else f" If it was downloaded, name its file: {parameter}=OWNER/NAME/FILE."
    return why


def _chosen(repository: str, file: str | None, listed: list[str], parameter: str) -> str:
    chosen = file or (listed[0] if len(listed) == 1 else _DIFFUSERS_FILE)
    if chosen in listed:
        return chosen
    shown, named = ", ".join(listed[:10]) or f"none in {SAFETENSORS}", f"/{file}" if file else ""
    lacks = "a file that the hub does not have" if file else "which does not say which of its files is meant"
    raise UserError(
        f"{parameter} is {repository}{named}, {lacks}. Its files of weights are: {shown}. Name one, as"
        f" {parameter}=OWNER/NAME/FILE."
    )
