"""Loading saved models with clear errors, and telling what a saved model is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import ModelConfig
from visual_grpo.grpo.distributed import sharding
from visual_grpo.models.offload import enable_offload
from visual_grpo.models.quantized import check_base_weights, quantize

PIPELINE_FILE = "model_index.json"
MODEL_FILE = "config.json"

M = TypeVar("M")


def load_pipeline(
    pipeline_class: str,
    path: str,
    config: ModelConfig,
    parts: Sequence[str],
    without: Sequence[str] = (),
    prepare: Callable[[Any], object] = lambda pipeline: None,
) -> Any:
    """A diffusers pipeline by plain ``from_pretrained``: frozen, in evaluation mode, on the device.

    Args:
        pipeline_class: its name in diffusers.
        parts: components that must be there; raises UserError where one is missing.
        without: components that are not loaded even where they are there.
        prepare: what is done to the pipeline's networks before they are on the device.
    """
    check_parts(path, parts)
    device = resolve_device(config.device)
    check_base_weights(config.base_weights, device)
    loader = getattr(diffusers, pipeline_class)
    with loading(path):
        # diffusers loads a pipeline that was saved without a component only where it is told so.
        described = loader.load_config(path, revision=config.revision)
        saved = {name for name, entry in described.items() if entry == [None, None]}
        absent = dict.fromkeys(sorted(saved.union(without)))
        pipeline = loader.from_pretrained(
            path, dtype=getattr(torch, config.dtype), revision=config.revision, use_safetensors=True, **absent
        )
    missing = [part for part in parts if getattr(pipeline, part, None) is None]
    if missing:
        raise _incomplete(path, missing)
    pipeline.set_progress_bar_config(disable=True)
    for network in networks_of(pipeline).values():
        network.eval().requires_grad_(False)
    prepare(pipeline)
    kept = torch.device("cpu") if config.offload != "none" and device.type != "meta" else device
    networks = networks_of(pipeline)
    # The VAE's convolutions and pixels need their precision.
    frozen = {name: network for name, network in networks.items() if name != "vae"}
    quantize(frozen, config.base_weights, device, kept=kept)
    place(networks, device, config.offload)
    return pipeline


def place(networks: Mapping[str, Any], device: torch.device, offload: str = "none") -> None:
    """Puts the frozen ``networks`` on ``device``: whole, in turns, or this process's part of them (`sharding`)."""
    if sharding.active():
        sharding.shard(networks, device)
    elif offload != "none":
        enable_offload(networks, device)
    else:
        for network in networks.values():
            network.to(device)


def networks_of(pipeline: Any) -> dict[str, Any]:
    """Returns the networks by the names of the pipeline's components."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turns what the hub's client and the model libraries raise into a UserError.

    A folder loads in a moment and shows no progress bar; a download keeps its bars.
    """
    with hidden_progress_bars() if Path(path).exists() else nullcontext():
        try:
            yield
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise UserError(
                f"The model {path!r} cannot be loaded: {error}\n"
                "A hub id needs a network or a download made before; a folder must be complete: each component with its"
                " configuration and its whole .safetensors files."
            ) from error


def check_parts(path: str, parts: Sequence[str]) -> None:
    """Raises UserError naming each component that a saved pipeline's folder lacks; a hub id is not looked at."""
    folder = Path(path)
    if not (folder / PIPELINE_FILE).is_file():
        return
    index = _json(folder / PIPELINE_FILE)
    missing = [part for part in parts if not any(index.get(part) or [None]) or not (folder / part).is_dir()]
    if missing:
        raise _incomplete(path, missing)


def saved_class(path: str) -> str | None:
    """The class that a saved model's folder or hub id names; None where it names none.

    Raises UserError where nothing can be read at ``path``.
    """
    for file in (PIPELINE_FILE, MODEL_FILE):
        facts = _facts(path, file)
        if facts is not None:
            if not isinstance(facts, dict):
                raise UserError(
                    f"model.path is {path}, whose {file} is damaged: it holds no object. Save the model again."
                )
            return facts.get("_class_name") or next(iter(facts.get("architectures") or []), None)
    raise UserError(
        f"model.path is {path}, which holds neither {PIPELINE_FILE} nor {MODEL_FILE}; expected a folder saved by"
        " save_pretrained, a hub id that is reachable or downloaded, or null for the starter's model."
    )


def _facts(path: str, file: str) -> dict[str, Any] | None:
    if (Path(path) / file).is_file():
        return _json(Path(path) / file)
    if not may_be_hub_id(path):
        return None
    try:
        return _json(Path(huggingface_hub.hf_hub_download(path, file)))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"The family of the model {path!r} cannot be told: the hub cannot be reached and the model was not"
            " downloaded before. Set model.family, or give a folder."
        ) from error
    except (EntryNotFoundError, HfHubHTTPError, OSError):
        return None


def _json(file: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}. Save or download the model again.") from error
    return facts


def _incomplete(path: str, missing: Sequence[str]) -> UserError:
    return UserError(
        f"The pipeline {path!r} lacks {', '.join(missing)}. Save it whole with save_pretrained, or download it again."
    )
