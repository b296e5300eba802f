"""Pretrained weights of rewards: where they are, whether they are whole, and how they are loaded and run."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.hardware.device import resolve_device
from visual_grpo.saved_model import check_snapshot, may_be_hub_id
from visual_grpo.third_party_output import hidden_progress_bars

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
CONFIG = ("config.json",)
WEIGHTS = ("model.safetensors", _INDEX)
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = ("tokenizer.json", "vocab.json")
"""Alternative files, one of which is needed. Weights are read as safetensors only, which hold no code."""

DTYPES = ("float32", "bfloat16", "float16")
_ACCELERATOR_BATCH = 16
_LOADED = ("*.json", "*.txt", "model*.safetensors")
_HUB_SECONDS = 5.0
"""Time in which the hub must answer a first question."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_models: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
"""Models in use: two rewards over one model hold its weights once."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model's folder or hub id, as an option of a reward names it."""

    reward: str
    option: str
    """Name of the option, for messages."""
    path: str
    revision: str | None = None
    """Branch, tag or commit of a hub id; None = main."""
    model_type: str | None = None
    """Expected ``model_type`` in config.json; None = any."""
    needed: Sequence[Sequence[str]]
    """One file of each entry is needed."""
    patterns: Sequence[str] = _LOADED
    """Files to download."""

    def check(self) -> None:
        """Raises UserError if files are missing and the hub does not answer, or they are damaged or another model's."""
        found = self._local()
        if found is None:
            self._ask_hub()
            log.info("The reward %s downloads %s when it scores its first sample.", self.reward, self.path)
        else:
            self._check_content(found)

    def folder(self) -> Path:
        """Returns the folder with the files, downloaded if need be. Raises UserError as `check` does."""
        found = self._local()
        if found is None:
            self._ask_hub()
            found = self._download()
        self._check_content(found)
        return found

    def commit(self) -> str | None:
        """Returns the commit of a hub id whose files are used; None for a folder. Raises UserError as `check` does."""
        if not may_be_hub_id(self.path):
            return None
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        found = self._local()
        return self._ask_hub() if found is None else found.name

    def _check_content(self, folder: Path) -> None:
        if self.revision is not None and may_be_hub_id(self.path):
            check_snapshot(self.path, self.revision, folder)
        if self.model_type is None:
            return
        try:
            config = json.loads((folder / CONFIG[0]).read_text(encoding="utf-8"))
            found = config.get("model_type")
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: no JSON object.
            raise UserError(f"{self.reward}: {folder} has no readable config.json: {error}") from error
        if found != self.model_type:
            classes = ", ".join(map(str, config.get("architectures") or ["no class"]))
            raise UserError(
                f"{self._named}, which must be a model of the type {self.model_type!r}, and holds one of the type"
                f" {found!r} ({classes})"
            )

    def _local(self) -> Path | None:
        """The folder if all of it is on this machine; None for a hub id that must be downloaded."""
        if not may_be_hub_id(self.path):
            folder = Path(self.path).expanduser()
            if not folder.is_dir():
                raise UserError(f"{self._named}, which is not a folder on this machine. {self._remedy}")
            if missing := _missing(folder, self.needed):
                raise UserError(f"{self._named}, and this folder lacks {', '.join(missing)}. {self._remedy}")
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            cached = Path(snapshot_download(self.path, revision=self.revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
        except HFValidationError as error:
            raise UserError(f"{self._named}, which is neither a folder on this machine nor a hub id") from error
        return None if _missing(cached, self.needed) else cached

    def _ask_hub(self) -> str | None:
        """Returns the commit that the hub would give now. Raises UserError if it does not answer."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.constants import is_offline_mode

        if is_offline_mode():
            raise self._unavailable("HF_HUB_OFFLINE is set")
        try:
            url = hf_hub_url(self.path, self.needed[0][0], revision=self.revision)
            return get_hf_file_metadata(url, timeout=_HUB_SECONDS).commit_hash
        except _hub_errors() as error:
            raise self._unavailable(error) from error

    def _download(self) -> Path:
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(self.path, revision=self.revision, allow_patterns=list(self.patterns))
        except _hub_errors() as error:
            raise self._unavailable(error) from error
        if missing := _missing(Path(found), self.needed):
            raise UserError(f"{self._named}, which has no {', '.join(missing)} on the hub. {self._remedy}")
        return Path(found)

    def _unavailable(self, why: object) -> UserError:
        first = (str(why).strip() or type(why).__name__).splitlines()[0].rstrip(".")
        return UserError(
            f"{self._named}, which is not on this machine and cannot be downloaded: {first}. {self._remedy}"
        )

    @property
    def _named(self) -> str:
        return f"{self.reward}: its {self.option} is {self.path!r}"

    @property
    def _remedy(self) -> str:
        how = f"Give a folder that holds {'; '.join(' or '.join(names) for names in self.needed)}"
        if may_be_hub_id(self.path):
            patterns = " ".join(f"--include '{pattern}'" for pattern in self.patterns)
            revision = f" --revision {self.revision}" if self.revision else ""
            how = f"Where there is a network: hf download {self.path}{revision} {patterns} --local-dir FOLDER"
        return f"{how}; then set rewards.{self.reward}.options.{self.option} to the folder's path"


def _missing(folder: Path, needed: Sequence[Sequence[str]]) -> list[str]:
    """Needed files that a folder lacks, and shards that its index of weights names."""
    missing = [" or ".join(names) for names in needed if not any((folder / name).is_file() for name in names)]
    index = folder / _INDEX
    if WEIGHTS in needed and index.is_file() and not (folder / WEIGHTS[0]).is_file():
        shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
        missing += [name for name in sorted(set(shards)) if not (folder / name).is_file()]
    return missing


def _hub_errors() -> tuple[type[BaseException], ...]:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError, OSError, ValueError


class Compute:
    """The options ``device``, ``dtype`` and ``batch_size`` of a reward. Raises UserError for impossible values."""

    def __init__(self, reward: str, device: str, dtype: str, batch_size: int | None) -> None:
        if dtype not in DTYPES:
            raise UserError(f"{reward}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if batch_size is not None and batch_size < 1:
            raise UserError(f"{reward}: batch_size must be at least 1 or null, got {batch_size}")
        self.reward = reward
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._device = device
        self._batch_size = batch_size

    @property
    def device(self) -> torch.device:
        """Raises UserError if this machine does not have it."""
        return resolve_device(self._device, f"the option device of the reward {self.reward}")

    @property
    def batch_size(self) -> int:
        return self._batch_size or (1 if self.device.type == "cpu" else _ACCELERATOR_BATCH)

    def rows(self, model: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Applies ``model`` to B inputs of one shape without gradient; returns [B, ...] float32 on the CPU.

        Every batch has ``batch_size`` rows, the last one filled up with copies: a matrix product may round differently
        for another number of rows, and then a score would depend on the samples beside it.
        """
        size = self.batch_size
        found = []
        for start in range(0, len(inputs), size):
            rows = list(inputs[start : start + size])
            batch = torch.stack(rows + rows[-1:] * (size - len(rows))).to(self.device, self.dtype)
            with torch.no_grad():
                found.append(model(batch)[: len(rows)].float().cpu())
        return torch.cat(found) if found else torch.zeros(0)


def load_model(origin: Origin, compute: Compute, model_class: str) -> Any:
    """Loads a model of transformers, frozen, onto the device; each once in a process.

    Raises:
        UserError: files are missing or damaged, or they are another model's.
    """
    folder = origin.folder()
    key = (folder.resolve(), model_class, compute.dtype, str(compute.device))
    model = _models.get(key)
    if model is None:
        # Layers are drawn before they are filled; that must not move the generator that others draw from.
        with torch.random.fork_rng():
            model = _load(origin.reward, folder, model_class, compute)
        _models[key] = model
    return model


def _load(reward: str, folder: Path, model_class: str, compute: Compute) -> Any:
    import transformers
    from safetensors import SafetensorError

    with hidden_progress_bars():
        try:
            model, report = getattr(transformers, model_class).from_pretrained(
                folder, dtype=compute.dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: weights of other shapes.
            raise UserError(
                f"{reward}: the {model_class} in {folder} cannot be loaded: {error}\nIts files are damaged or do"
                " not belong together. Save or download it again"
            ) from error
    if missing := sorted(report["missing_keys"]):  # They would be drawn at random.
        raise UserError(
            f"{reward}: {folder} is no complete {model_class}: it lacks {len(missing)} of its weights, for"
            f" example {missing[0]}. Save or download it again"
        )
    return model.eval().requires_grad_(False).to(compute.device)


def load_processor(origin: Origin, name: str) -> Any:
    """Loads an image processor, tokenizer or both, by its class name in transformers. Raises UserError."""
    import transformers

    folder, processor_class = origin.folder(), getattr(transformers, name)
    try:
        return processor_class.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{origin.reward}: the {name} in {folder} cannot be loaded: {error}. Save or download it again"
        ) from error


def read_weights(reward: str, file: Path) -> dict[str, Tensor]:
    """Reads tensors by name from a ``.safetensors`` file or one that ``torch.save`` wrote; neither can run code.

    Raises:
        UserError: the file is missing, damaged or holds anything but tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(f"{reward}: {file} cannot be read as weights: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{reward}: {file} must hold weights by name, it holds {type(found).__name__}")
    return found
