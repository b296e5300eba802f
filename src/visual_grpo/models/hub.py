"""A model on the hub, looked up once before any work: its commit, its class, and what is still to be downloaded."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    HTTPError,
    LocalEntryNotFoundError,
)

from visual_grpo.common.errors import UserError
from visual_grpo.common.hub import REFUSALS, refusal

PIPELINE_FILE, MODEL_FILE = "model_index.json", "config.json"
"""The file that names the class of a pipeline of diffusers, and of a model of transformers."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
_SHARDS = ".safetensors.index.json"
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A repository at a commit."""

    path: str
    commit: str
    to_download: int = 0
    """Bytes of weights that are not in the cache; 0 without a network, too."""
    cached: int = 0
    """Bytes of weights in the cache."""

    @property
    def note(self) -> str | None:
        """What will be downloaded, for the user; None if nothing is."""
        if not self.to_download:
            return None
        size = (
            f"{self.to_download / _GB:.1f} GB" if self.to_download >= _GB / 10 else f"{self.to_download / 1e6:.1f} MB"
        )
        return f"Downloads {size} of weights of {self.path} (commit {self.commit[:12]}) into {constants.HF_HUB_CACHE}"


def look_up(path: str, revision: str | None) -> HubModel:
    """Finds the commit that ``revision`` (None = main) is at now; from the cache where there is no network.

    Raises UserError for whatever a download would end in: no such repository or revision, no access, no model, weights
    that are not safetensors or lack a part, a full disk.
    """
    file = model_file(path, revision)
    if file is None:
        raise UserError(
            f"model.path is {path}, a repository on the hub that holds neither {PIPELINE_FILE} nor {MODEL_FILE}:"
            " expected a model in the format of diffusers or transformers. Single files of weights (.safetensors,"
            " .gguf) are not read."
        )
    commit, described = file.parent.name, read_described(file)
    missing = 0
    try:
        listed = huggingface_hub.HfApi().model_info(path, revision=commit, files_metadata=True).siblings or []
    except (HTTPError, OSError):  # No network, or a hub that is busy: what is in the cache may do.
        listed = []
    sizes = {entry.rfilename: entry.size or 0 for entry in listed}
    if sizes:
        weights = list(_weights(path, commit, sizes, described))
        missing = sum(sizes[name] for name in weights if not _is_cached(path, name, commit))
    found = HubModel(path=path, commit=commit, to_download=missing, cached=weights_bytes(file.parent))
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free
    if missing > free:
        raise UserError(
            f"model.path: {missing / _GB:.1f} GB of {path} are to be downloaded into {cache}, where {free / _GB:.1f} GB"
            " are free. Free some space, or set HF_HOME to a folder on a larger disk."
        )
    return found


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def model_file(path: str, revision: str | None) -> Path | None:
    """Downloads the file that says what the model at a hub id is; None if the repository has none.

    Raises UserError where the hub refuses, or does not answer and the file is not in the cache.
    """
    found = (_download(path, name, revision) for name in (PIPELINE_FILE, MODEL_FILE))
    return next(filter(None, found), None)


def _download(path: str, name: str, revision: str | None) -> Path | None:
    try:
        return Path(huggingface_hub.hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError as error:
        known = huggingface_hub.try_to_load_from_cache(path, name, revision=revision)  # Not a path: it has none.
        if isinstance(error, LocalEntryNotFoundError) and known is None:  # Nobody answers, or a busy hub.
            raise UserError(refusal("model", path, revision, error)) from error
        return None
    except REFUSALS as error:
        raise UserError(refusal("model", path, revision, error)) from error


def read_described(file: Path) -> Mapping[str, Any]:
    """Reads a pipeline's or a model's description; raises UserError for a damaged file."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no object")
        return facts
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}. Save or download the model again.") from error


def _weights(path: str, commit: str, sizes: Mapping[str, int], described: Mapping[str, Any]) -> Iterator[str]:
    """Yields the files of weights that will be read; raises UserError where a network has none."""
    parts = described.items() if "_class_name" in described else ()  # A model of transformers lists other things.
    components = {name for name, entry in parts if isinstance(entry, list) and any(entry)}
    if lacking := sorted(components - {name.partition("/")[0] for name in sizes}):
        raise UserError(f"model.path: {path} lacks the folders {', '.join(lacking)}, which its {PIPELINE_FILE} names.")
    by_folder = defaultdict[str, list[PurePosixPath]](list)
    for name in map(PurePosixPath, sizes):
        if name.suffix in _WEIGHTS and (str(name.parent) in components if components else str(name.parent) == "."):
            by_folder[str(name.parent)].append(name)
    for folder, files in by_folder.items():
        plain = [str(file) for file in files if file.suffix == ".safetensors" and not _variant(file)]
        if not plain:
            kinds = sorted({file.suffix if not (v := _variant(file)) else f".{v}{file.suffix}" for file in files})
            where = "" if folder == "." else f" of {folder}"
            raise UserError(
                f"model.path: the weights{where} in {path} are there as {', '.join(kinds)} only: expected .safetensors"
                " without a variant. Choose a repository, or a model.revision, that has them."
            )
        for index in (name for name in sizes if name.endswith(_SHARDS) and str(PurePosixPath(name).parent) == folder):
            if _variant(PurePosixPath(index.removesuffix(".index.json"))):
                continue
            file = _download(path, index, commit)
            assert file is not None, "it is listed"
            shards = set(read_described(file).get("weight_map", {}).values())
            named = {str(PurePosixPath(folder) / shard) for shard in shards}
            if lacking := sorted(named - sizes.keys()):
                raise UserError(f"model.path: {path} lacks {', '.join(lacking)}, which {index} names.")
        yield from plain


def _variant(file: PurePosixPath) -> str | None:
    """``fp16`` of ``model.fp16.safetensors`` and of ``model.fp16-00001-of-00002.safetensors``."""
    parts = file.name.removesuffix(file.suffix).split("-")[0].split(".")
    return parts[1] if len(parts) > 1 else None


def _is_cached(path: str, name: str, commit: str) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(path, name, revision=commit), str)
