"""A model on the hub, looked up once before any work: its commit, its class, and what is still to be downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import ModelInfo, constants
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from visual_grpo.common.errors import UserError
from visual_grpo.common.hub import REFUSALS, is_commit, missing_bytes, refusal, require_space, shown_size
from visual_grpo.models.without_weights import class_of

PIPELINE_FILE, MODEL_FILE = "model_index.json", "config.json"
"""The file that names the class of a pipeline of diffusers, and of a model of transformers."""
_DESCRIPTIONS = (PIPELINE_FILE, MODEL_FILE)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
_SHARDS = ".safetensors.index.json"
_WHOLE = "tokenizer.json"
"""A vocabulary in one file."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A repository at a commit."""

    path: str
    commit: str
    name: str
    """The repository's name on the hub now; differs from ``path`` where it was renamed."""
    to_download: int = 0
    """Bytes of weights that are not in the cache; 0 without a network, too."""
    cached: int = 0
    """Bytes of weights in the cache."""

    @property
    def notes(self) -> Iterator[str]:
        """Yields the notes for the user: a new name, and the size of a download."""
        if self.name != self.path:
            yield f"model.path: {self.path} is called {self.name} on the hub now; the old name still leads there."
        if self.to_download:
            yield (
                f"Downloads {shown_size(self.to_download)} of weights of {self.path} (commit {self.commit[:12]}) into"
                f" {constants.HF_HUB_CACHE}"
            )


def look_up(path: str, revision: str | None) -> HubModel:
    """Finds the commit that ``revision`` (None = main) is at now; from the cache where there is no network.

    Raises UserError for whatever a download would end in: no such repository or revision, no access, no model, weights
    that are not safetensors, a part that is missing, a cache that is full or cannot be written.
    """
    info, file = _found(path, revision)
    if file is None:
        raise UserError(
            f"model.path is {path}, a repository on the hub that holds neither {PIPELINE_FILE} nor {MODEL_FILE}:"
            " expected a model in the format of diffusers or transformers. Single files of weights (.safetensors,"
            " .gguf) are not read."
        )
    commit, described = file.parent.name, read_described(file)
    found = HubModel(path=path, commit=commit, name=path, cached=weights_bytes(file.parent))
    if info is None:  # What is in the cache may do.
        return found
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    weights = _weights(path, commit, sizes, described)
    missing = missing_bytes(info, path, weights)
    if missing:
        _require_access(path, info)
        require_space("model", "model.path", path, missing)
    return replace(found, name=info.id, to_download=missing)


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def model_file(path: str, revision: str | None) -> Path | None:
    """Downloads the file that says what the model at a hub id is; None if the repository has none.

    Raises UserError where the hub refuses, or does not answer and the file is not in the cache.
    """
    cached = _cached(path, revision)
    return cached if cached and is_commit(revision) else _found(path, revision)[1]


def _found(path: str, revision: str | None) -> tuple[ModelInfo | None, Path | None]:
    """Asks the hub once, without the client's retries, which take minutes; returns its answer and `model_file`.

    Without an answer, what is in the cache counts.
    """
    try:
        info = huggingface_hub.HfApi().model_info(
            path, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except REFUSALS as error:
        if cached := _cached(path, revision):
            return None, cached
        raise UserError(refusal("model", "model.path", path, revision, error)) from error
    listed = {entry.rfilename for entry in info.siblings or ()}
    name = next((name for name in _DESCRIPTIONS if name in listed), None)
    return info, _downloaded(path, name, revision) if name else None


def _cached(path: str, revision: str | None) -> Path | None:
    found = (huggingface_hub.try_to_load_from_cache(path, name, revision=revision) for name in _DESCRIPTIONS)
    with suppress(HFValidationError):
        return next((Path(file) for file in found if isinstance(file, str)), None)
    return None


def _downloaded(path: str, name: str, revision: str | None) -> Path:
    """Raises UserError where the hub refuses, or the cache cannot be written."""
    try:
        return Path(huggingface_hub.hf_hub_download(path, name, revision=revision))
    except REFUSALS as error:
        raise UserError(refusal("model", "model.path", path, revision, error)) from error


def _require_access(path: str, info: ModelInfo) -> None:
    """Anyone may look at a gated repository."""
    try:
        if info.gated:
            huggingface_hub.auth_check(path)
    except REFUSALS as error:
        raise UserError(refusal("model", "model.path", path, None, error)) from error


def read_described(file: Path) -> Mapping[str, Any]:
    """Reads a pipeline's or a model's description; raises UserError for a damaged file."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no object")
        return facts
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}. Save or download the model again.") from error


def _weights(path: str, commit: str, sizes: Mapping[str, int], described: Mapping[str, Any]) -> list[str]:
    """Returns the files of weights that will be read; raises UserError for a part that lacks a file."""
    if "_class_name" not in described:
        return _weights_in("", path, commit, sizes)
    parts = {name: entry for name, entry in described.items() if isinstance(entry, list) and any(entry)}
    if absent := sorted(parts.keys() - {name.partition("/")[0] for name in sizes}):
        raise UserError(f"model.path: {path} lacks the folders {', '.join(absent)}, which its {PIPELINE_FILE} names.")
    found = []
    for folder, (library, kind) in sorted(parts.items()):
        try:
            part = class_of(library, kind)
        except (ImportError, AttributeError):  # A family of one's own may load it.
            weighty = any(PurePosixPath(name).suffix in _WEIGHTS for name in sizes if name.startswith(f"{folder}/"))
            found += _weights_in(f"{folder}/", path, commit, sizes) if weighty else []
            continue
        if issubclass(part, torch.nn.Module):
            if (file := f"{folder}/{MODEL_FILE}") not in sizes:
                raise UserError(f"model.path: {path} lacks {file}, the description of its {kind}.")
            found += _weights_in(f"{folder}/", path, commit, sizes)
        elif lacking := missing_vocabulary(part, {*_files_in(f"{folder}/", sizes)}.__contains__):
            raise UserError(f"model.path: {folder} in {path} has no vocabulary for its {kind}: {lacking}.")
    return found


def _files_in(folder: str, sizes: Mapping[str, int]) -> list[str]:
    inside = (name.removeprefix(folder) for name in sizes if name.startswith(folder))
    return [name for name in inside if "/" not in name]


def missing_vocabulary(part: type[Any], has: Callable[[str], bool]) -> str | None:
    """Names the files of a vocabulary, one of which a tokenizer needs, where its folder ``has`` none of them; without
    them, transformers makes a vocabulary up."""
    if not issubclass(part, PreTrainedTokenizerBase):
        return None
    names: list[str] = sorted(part.vocab_files_names.values(), key=_WHOLE.__eq__)
    if not names:
        return None
    *parts, whole = names
    if has(whole) or (parts and all(map(has, parts))):
        return None
    return whole + (f", or {' and '.join(parts)}" if parts else "")


def _weights_in(folder: str, path: str, commit: str, sizes: Mapping[str, int]) -> list[str]:
    """``folder`` ends with a slash, or is empty."""
    here = [PurePosixPath(folder, name) for name in _files_in(folder, sizes)]
    files = [file for file in here if file.suffix in _WEIGHTS]
    plain = [str(file) for file in files if file.suffix == ".safetensors" and not _variant(file)]
    if not plain:
        kinds = sorted({file.suffix if not (v := _variant(file)) else f".{v}{file.suffix}" for file in files})
        are = f"are there as {', '.join(kinds)} only" if kinds else "are missing"
        raise UserError(
            f"model.path: the weights{f' of {folder[:-1]}' if folder else ''} in {path} {are}: expected .safetensors"
            " without a variant. Choose a repository, or a model.revision, that has them."
        )
    for index in (str(file) for file in here if file.name.endswith(_SHARDS)):
        if not _variant(PurePosixPath(index.removesuffix(".index.json"))):
            shards = set(read_described(_downloaded(path, index, commit)).get("weight_map", {}).values())
            if lacking := sorted({f"{folder}{shard}" for shard in shards} - sizes.keys()):
                raise UserError(f"model.path: {path} lacks {', '.join(lacking)}, which {index} names.")
    return plain


def _variant(file: PurePosixPath) -> str | None:
    """``fp16`` of ``model.fp16.safetensors`` and of ``model.fp16-00001-of-00002.safetensors``."""
    parts = file.name.removesuffix(file.suffix).split("-")[0].split(".")
    return parts[1] if len(parts) > 1 else None
