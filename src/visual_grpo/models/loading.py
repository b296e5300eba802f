"""Loading saved models with clear errors, and telling what a saved model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
from safetensors import SafetensorError

from visual_grpo.common.device import resolve_device
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import ModelConfig
from visual_grpo.grpo.distributed import sharding
from visual_grpo.models.hub import MODEL_FILE, PIPELINE_FILE, model_file, read_described
from visual_grpo.models.offload import enable_offload
from visual_grpo.models.quantized import check_base_weights, quantize
from visual_grpo.models.without_weights import unread_networks

_POINTER = "adapter_config.json"
"""The file by which transformers loads the model that it names, which may be on the hub, with an adapter."""

M = TypeVar("M")


def load_pipeline(
    pipeline_class: str,
    path: str,
    config: ModelConfig,
    *,
    optional: Sequence[str] = (),
    without: Sequence[str] = (),
    prepare: Callable[[Any], object] = lambda pipeline: None,
) -> Any:
    """A diffusers pipeline by plain ``from_pretrained``: frozen, in evaluation mode, on the device.

    Args:
        pipeline_class: its name in diffusers.
        optional: components that a saved pipeline may lack, in addition to those that diffusers knows of.
        without: components that are not loaded even where they are there.
        prepare: what is done to the pipeline's networks before they are on the device.
    """
    device = resolve_device(config.device)
    check_base_weights(config.base_weights, device)
    loader = getattr(diffusers, pipeline_class)
    with loading(path):
        # diffusers loads a pipeline that was saved without a component only where it is told so.
        described = loader.load_config(path, revision=config.revision)
        absent = {name for name in optional if described.get(name) == [None, None]}.union(without)
        named = {name for name, entry in described.items() if isinstance(entry, list) and any(entry)} - absent
        if Path(path).is_dir() and (missing := [name for name in sorted(named) if not Path(path, name).is_dir()]):
            raise FileNotFoundError(f"it lacks {', '.join(missing)}.")  # transformers makes up a missing tokenizer.
        dtype = getattr(torch, config.dtype)
        pipeline = loader.from_pretrained(
            path,
            dtype=dtype,
            revision=config.revision,
            use_safetensors=True,
            **unread_networks({name: described[name] for name in named}, path, dtype),
            **dict.fromkeys(sorted(absent)),
        )
    pipeline.set_progress_bar_config(disable=True)
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for network in networks.values():
        network.eval().requires_grad_(False)
    prepare(pipeline)
    kept = torch.device("cpu") if config.offload != "none" and device.type != "meta" else device
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


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turns what the hub's client and the model libraries raise into a UserError.

    A folder loads in a moment and shows no progress bar; a download keeps its bars.
    """
    with hidden_progress_bars() if Path(path).exists() else nullcontext():
        try:
            if pointers := [*Path(path).glob(_POINTER), *Path(path).glob(f"*/{_POINTER}")]:
                raise ValueError(f"{pointers[0]} names a different model, to which it belongs. Merge the two.")
            yield
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise UserError(
                f"The model {path!r} cannot be loaded: {error}\n"
                "A hub id needs a network or a download made before; a folder must be complete: each component with its"
                " configuration and its whole .safetensors files."
            ) from error


def saved_class(path: str, revision: str | None = None) -> str | None:
    """The class that a saved model's folder or hub id names; None where it names none.

    Raises UserError where nothing can be read at ``path``.
    """
    here = (Path(path) / name for name in (PIPELINE_FILE, MODEL_FILE))
    file = model_file(path, revision) if may_be_hub_id(path) else next(filter(Path.is_file, here), None)
    if file is None:
        holds = f"holds neither {PIPELINE_FILE} nor {MODEL_FILE}" if Path(path).exists() else "does not exist"
        raise UserError(
            f"model.path is {path}, which {holds}; expected a folder saved by"
            " save_pretrained, a hub id that is reachable or downloaded, or null for the starter's model."
        )
    described = read_described(file)
    return described.get("_class_name") or next(iter(described.get("architectures") or []), None)
