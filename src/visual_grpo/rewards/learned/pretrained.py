"""Pretrained models of rewards: where their files are, whether they are whole, and how they are loaded and run."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, get_args
from weakref import WeakValueDictionary

import huggingface_hub
import torch
import transformers
from huggingface_hub import ModelInfo, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from safetensors import SafetensorError
from torch import Tensor

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import may_be_hub_id, on_hub
from visual_grpo.common.errors import UserError
from visual_grpo.common.hub import REFUSALS, is_commit, missing_bytes, refusal, require_space, shown_size, silence
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import Dtype

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
CONFIG = ("config.json",)
WEIGHTS = ("model.safetensors", _INDEX)
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = ("tokenizer.json", "vocab.json")
"""Alternative files, one of which is needed. Weights are read as safetensors only, which hold no code."""

_ACCELERATOR_BATCH = 16
PROCESSING = ("*.json", "*.txt")
_LOADED = (*PROCESSING, "model*.safetensors")
_HUB_SECONDS = 5.0
"""Time in which the hub must answer a first question."""
_models: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
"""Models in use: two rewards over one model hold its weights once."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model's folder, or hub id or its address, as an option of a reward names it. Its methods raise UserError."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", on_hub(self.path) or self.path)  # The address of its page is a hub id's, too.

    def check(self) -> None:
        """Refuses missing files that the hub does not have either, and damaged ones or a different model's."""
        if (folder := self._local()) is not None:
            self._check_content(folder)
            return
        info = self._ask_hub()
        listed = (entry.rfilename for entry in info.siblings or ())
        missing = missing_bytes(info, self.path, filter_repo_objects(listed, allow_patterns=list(self.patterns)))
        require_space("model", self._parameter, self.path, missing)
        size = shown_size(missing)
        log.info("The reward %s downloads %s of %s when it scores its first sample.", self.reward, size, self.path)

    def folder(self) -> Path:
        """The checked folder with the files, downloaded if need be."""
        folder = self._local() or self._download()
        self._check_content(folder)
        return folder

    def commit(self) -> str | None:
        """The commit of a hub id whose files are used; None for a folder."""
        if not may_be_hub_id(self.path):
            return None
        if is_commit(self.revision):
            return self.revision
        folder = self._local()
        return self._ask_hub().sha if folder is None else folder.name

    def _check_content(self, folder: Path) -> None:
        if self.model_type is None:
            return
        try:
            config = json.loads((folder / CONFIG[0]).read_text(encoding="utf-8"))
            model_type = config.get("model_type")
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: no JSON object.
            raise UserError(f"{self.reward}: {folder} has no readable config.json: {error}") from error
        if model_type != self.model_type:
            classes = ", ".join(map(str, config.get("architectures") or ["no class"]))
            raise UserError(
                f"{self._named}, which must be a model of the type {self.model_type!r}, and holds one of the type"
                f" {model_type!r} ({classes})"
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
        try:
            # Without the patterns, the files that were left out of the download would count as missing.
            cached = self._snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        except HFValidationError as error:
            raise UserError(f"{self._named}, which is neither a folder on this machine nor a hub id") from error
        return None if _missing(cached, self.needed) else cached

    def _ask_hub(self) -> ModelInfo:
        """Returns what the hub would give now."""
        hub = huggingface_hub.HfApi()
        try:
            info = hub.model_info(self.path, revision=self.revision, files_metadata=True, timeout=_HUB_SECONDS)
            if info.gated:  # Anyone may look at it.
                hub.auth_check(self.path)
        except REFUSALS as error:
            raise self._unavailable(error) from error
        names = {entry.rfilename for entry in info.siblings or ()}
        self._require_listed(" or ".join(each) for each in self.needed if names.isdisjoint(each))
        return info

    def _download(self) -> Path:
        self._ask_hub()
        try:
            folder = self._snapshot()
        except REFUSALS as error:
            raise self._unavailable(error) from error
        self._require_listed(_missing(folder, self.needed))
        return folder

    def _require_listed(self, missing: Iterable[str]) -> None:
        if names := ", ".join(missing):
            raise UserError(
                f"{self._named}, which has no {names} on the hub. Choose a repository or a revision that has it"
            )

    def _snapshot(self, **options: Any) -> Path:
        folder = snapshot_download(self.path, revision=self.revision, allow_patterns=list(self.patterns), **options)
        return Path(folder)

    def _unavailable(self, error: BaseException) -> UserError:
        if why := silence(error):
            return UserError(f"{self._named}, which is not on this machine, and {why}. {self._remedy}")
        return UserError(refusal("model", self._parameter, self.path, self.revision, error))

    @property
    def _parameter(self) -> str:
        return f"rewards.{self.reward}.options.{self.option}"

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
        return f"{how}; then set {self._parameter} to the folder's path"


def _missing(folder: Path, needed: Sequence[Sequence[str]]) -> list[str]:
    """Needed files that a folder lacks, and shards that its index of weights names."""
    missing = [" or ".join(names) for names in needed if not any((folder / name).is_file() for name in names)]
    index = folder / _INDEX
    if WEIGHTS in needed and index.is_file() and not (folder / WEIGHTS[0]).is_file():
        shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
        missing += [name for name in sorted(set(shards)) if not (folder / name).is_file()]
    return missing


class Encoder:
    """A model of transformers and its processor, both loaded at the first use; options as in `EncoderReward`."""

    model_class: ClassVar[str]
    processor_class: ClassVar[str]

    def __init__(
        self, origin: Origin, device: str, dtype: str, batch_size: int | None = None, processing: Origin | None = None
    ) -> None:
        """``processing``: where the processor is, if not with the model."""
        if dtype not in get_args(Dtype):
            raise UserError(f"{origin.reward}: dtype must be one of {', '.join(get_args(Dtype))}, got {dtype!r}")
        if batch_size is not None and batch_size < 1:
            raise UserError(f"{origin.reward}: batch_size must be at least 1 or null, got {batch_size}")
        self.origin, self.processing = origin, processing or origin
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._device, self._batch_size = device, batch_size

    @property
    def device(self) -> torch.device:
        """Raises UserError if this machine does not have it."""
        return resolve_device(self._device, f"the option device of the reward {self.origin.reward}")

    @property
    def origins(self) -> Sequence[Origin]:
        return list(dict.fromkeys([self.origin, self.processing]))

    @cached_property
    def model(self) -> Any:
        """The frozen model on the device, shared by all rewards with the same weights, dtype and device."""
        folder = self.origin.folder()
        key = (folder.resolve(), self.model_class, self.dtype, str(self.device))
        if (model := _models.get(key)) is None:
            # from_pretrained initialises layers at random: keep the global generator's state.
            with torch.random.fork_rng(), hidden_progress_bars():
                model = _models[key] = self._load(folder)
        return model

    def _load(self, folder: Path) -> Any:
        with self._loading(self.model_class, folder):
            model, report = getattr(transformers, self.model_class).from_pretrained(
                folder,
                dtype=self.dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if missing := sorted(report["missing_keys"]):  # They would be initialised at random.
            raise UserError(
                f"{self.origin.reward}: {folder} is not a complete {self.model_class}: it lacks {len(missing)} of its"
                f" weights, for example {missing[0]}. Save or download it again"
            )
        return model.eval().requires_grad_(False).to(self.device)

    @cached_property
    def processor(self) -> Any:
        folder, processor_class = self.processing.folder(), getattr(transformers, self.processor_class)
        with self._loading(self.processor_class, folder):
            return processor_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    @contextmanager
    def _loading(self, class_name: str, folder: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{self.origin.reward}: the {class_name} in {folder} cannot be loaded: {error}\nIts files are damaged"
                " or do not belong together. Save or download it again"
            ) from error

    def pixels(self, image_processor: Any, samples: Sequence[Tensor]) -> list[Tensor]:
        """Resizes, crops and normalises uint8 images [3, height, width]; returns [3, s, s] float32 each."""
        return [
            image_processor(sample.cpu(), return_tensors="pt", input_data_format="channels_first")["pixel_values"][0]
            for sample in samples
        ]

    def rows(self, model: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Applies ``model`` to B inputs of one shape without gradient; returns [B, ...] float32 on the CPU.

        The last batch is filled up with copies: a matrix product may round differently for a different number of rows,
        and then a score would depend on the neighbouring samples.
        """
        size = self._batch_size or (1 if self.device.type == "cpu" else _ACCELERATOR_BATCH)
        outputs = []
        for start in range(0, len(inputs), size):
            rows = list(inputs[start : start + size])
            batch = torch.stack(rows + rows[-1:] * (size - len(rows))).to(self.device, self.dtype)
            with torch.no_grad():
                outputs.append(model(batch)[: len(rows)].float().cpu())
        return torch.cat(outputs) if outputs else torch.zeros(0)


@dataclass(kw_only=True, eq=False)
class EncoderReward:
    """The options that all rewards over an encoder have.

    Args:
        revision: branch, tag or commit of a hub id.
        device: ``auto`` is the accelerator if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: images at a time; null is 1 on a CPU and 16 on an accelerator. Scores do not depend on which
            images are in a batch.
    """

    name: ClassVar[str]
    model: str | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int | None = None
    encoder: Encoder = field(init=False)

    @property
    def origins(self) -> Sequence[Origin]:
        return self.encoder.origins

    def check_machine(self) -> None:
        _ = self.encoder.device
        for origin in self.origins:
            origin.check()


def read_weights(reward: str, file: Path) -> dict[str, Tensor]:
    """Reads tensors by name from a file that ``torch.save`` wrote; it cannot run code. Raises UserError if it is
    missing, damaged or holds anything else."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{reward}: {file} cannot be read as weights: {str(error).splitlines()[0]}") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{reward}: {file} must hold weights by name, it holds {type(weights).__name__}")
    return weights
