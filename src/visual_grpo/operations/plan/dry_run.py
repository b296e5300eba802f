"""Builds any model from its configuration files, without weights, and runs a step and evaluation batches on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError
from PIL import Image
from torch import Tensor, nn

from visual_grpo.common.device import resolve_device
from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.types import Needs, PromptRecord, Sample
from visual_grpo.config import DataConfig, Parameters, RewardConfig, SamplerConfig
from visual_grpo.grpo.distributed.sharding import layers_of
from visual_grpo.models.execution import set_execution
from visual_grpo.models.family import find_family
from visual_grpo.models.model import Model
from visual_grpo.models.offload import copied_bytes, device_tensors, move_to_host
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.models.without_weights import network_of, without_weights
from visual_grpo.operations.plan.meter import Meter
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.reward import FunctionReward
from visual_grpo.rewards.segmentation import KINDS
from visual_grpo.training import components
from visual_grpo.training.ema import AdapterAverage

_RELEASED = Path(__file__).with_name("released")
"""Configuration files of released models by hub id, as the installed libraries write them, with the published sizes.

The tokenizers are made up and only count words; those that are released have other classes and files
(tests/models/released.py)."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    spec: RunSpec
    model: Model
    networks: dict[str, nn.Module]
    """Networks by the name of the model's part."""
    source: str
    """Origin of the weights or sizes, in words."""


def planned_model(config: Parameters, *, measured: bool = False) -> PlannedModel:
    """Builds the model on the meta device; one that is measured has its weights, or random ones where none are here.

    Raises UserError where the configuration files are not on this machine.
    """
    folder, source = configuration_folder(config.model.path)
    # A merged LoRA leaves all sizes as they are.
    family, model = find_family(config.model.family, folder), config.model.model_copy(update={"lora": None})
    spec = resolve(config, family=family)
    if not measured:
        with without_weights("meta"):
            loaded = family.load(folder, model.model_copy(update={"device": "meta"}))
    elif has_weights(folder):
        loaded, source = family.load(folder, model), f"the weights in {folder}"
    else:  # Offloaded networks are copied to the GPU from the host.
        built_on = str(resolve_device(model.device)) if model.offload == "none" else "cpu"
        source = f"random weights, sizes from {source}"
        with without_weights(built_on):
            loaded = family.load(folder, model)
    parts = loaded.components if hasattr(loaded, "components") else {"model": loaded[0]}
    networks = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    built = spec.build(loaded)
    if measured:
        set_execution(built.adapters.networks, built.modules, model)
    return PlannedModel(spec=spec, model=built, networks=networks, source=source)


def segmenter_of(rewards: Mapping[str, RewardConfig]) -> dict[str, nn.Module]:
    """Returns the SAM that a reward keeps on the card, without weights; {} where there is none."""
    reward = rewards.get("negative_points")
    options: Any = {} if reward is None else reward.options.get("segmenter")
    kind: Any = options.get("kind") if isinstance(options, dict) else None
    model_class = getattr(resolve_name(KINDS[kind]), "model_class", None) if kind in KINDS else None
    if model_class is None:
        return {}
    folder, _ = configuration_folder(options["path"])
    dtype = getattr(torch, options.get("dtype", "float32"))
    return {"segmenter": network_of(getattr(transformers, model_class), Path(folder), dtype, "meta")}


def configuration_folder(path: str) -> tuple[str, str]:
    """Returns the folder with a model's configuration files, and their origin in words."""
    folder, released = Path(path), [f"{each.parent.name}/{each.name}" for each in _RELEASED.glob("*/*")]
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except IncompleteSnapshotError as error:  # Without its weights, or the files that no model is loaded from.
            folder = Path(error.snapshot_path)
        except (HFValidationError, LocalEntryNotFoundError):
            pass
    # Looking up a model's class downloads a single file of it.
    if path in released and not has_weights(folder):
        return str(_RELEASED / path), f"the published configuration of {path}"
    if folder.is_dir():
        return str(folder), f"the configuration files in {folder}"
    raise UserError(
        f"{path} has no configuration files on this machine.{nearest_hint(path, released)} Name a folder, make the"
        " starter's model, or download them without the weights:\n"
        f"hf download {path} --exclude '*.safetensors' --exclude '*.bin'",
        remedy="starter",
    )


def has_weights(folder: str | Path) -> bool:
    return any(Path(folder).rglob("*.safetensors"))


_WORDS = ("red", "round", "small", "bright", "distant")


class DryRunner:
    """Runs parts of a training by the project's own code and counts them."""

    def __init__(self, planned: PlannedModel) -> None:
        self.config, self.planned = planned.spec.config, planned
        self.networks = planned.networks | segmenter_of(self.config.rewards)
        self.trainer = planned_trainer(planned)
        self.average = AdapterAverage(self.trainer, self.config.train.ema_decay)
        move_to_host(*planned.networks.values())  # Offloaded networks came to get their adapters.
        with self.counting() as meter:
            pass
        self.weights: int = meter.live
        """Bytes of the model with its adapters."""
        with self.counting():  # The optimiser's moments, which all steps but the first have.
            for own in self.trainer.modules.values():
                for parameter in own.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                own.optimizer.adamw.step()
                own.optimizer.zero_grad()

    def step(self) -> Meter:
        """Counts rollout, rewards that cost nothing, reference, replay, gradient and optimiser."""
        plan = self.config.plan
        count = max(self.config.grpo_of(module).prompts_per_step for module in self.planned.spec.modules)
        with records_for(self.config.data, plan.prompt_words, count, plan.sources) as records, self.counting() as meter:
            next(iter(self.trainer.fit(records)))
        return meter

    def evaluation(self, sampler: SamplerConfig, count: int) -> Meter:
        plan = self.config.plan
        with records_for(self.config.data, plan.prompt_words, count, plan.sources) as records, self.counting() as meter:
            self.planned.model.generate(records, list(range(count)), sampler)
        return meter

    @contextmanager
    def counting(self) -> Iterator[Meter]:
        """Counts what happens inside, with weights and the optimiser's state there from the start."""
        meter, networks = Meter(), self.planned.networks.values()
        for network in self.networks.values():
            meter.hold(device_tensors(network))
        if self.config.distributed.sharded:
            blocks = [block for network in networks for block in layers_of(network)]
            meter.live -= on_other_cards(blocks, self.config.distributed.processes)
        for own in self.trainer.modules.values():
            kept = (value for state in own.optimizer.adamw.state.values() for value in state.values())
            meter.hold(value for value in kept if isinstance(value, Tensor) and value.is_meta)
            if own.average is not None:
                meter.hold(own.average.weights)
        meter.hold(self.average.state().values())
        before = copied_bytes(*networks)
        with meter.counting():
            yield meter
        meter.copied_from_host = copied_bytes(*networks) - before


def on_other_cards(blocks: Sequence[torch.nn.Module], count: int) -> int:
    """Bytes of frozen blocks that one of ``count`` cards does not hold; it holds two whole blocks at a time."""
    sizes = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in blocks]
    return sum(sizes) - sum(sizes) // count - 2 * max(sizes, default=0)


def planned_trainer(planned: PlannedModel) -> Any:
    """Builds a trainer whose only reward costs nothing."""
    config = planned.spec.config
    modules = {name: own.model_copy(update={"rewards": {}}) for name, own in config.modules.items()}
    reward = FunctionReward("planned", unequal_scores)
    reward.needs = Needs(video=config.data.frames is not None)
    config = config.model_copy(update={"rewards": {"planned": RewardConfig()}, "modules": modules})
    return components.build_trainer(
        replace(planned.spec, config=config), planned.model, RewardSet({"planned": (reward, 1.0)})
    )


def unequal_scores(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
    """[len(samples)] float32; they differ within every group, so that there is something to learn."""
    return torch.arange(len(samples), dtype=torch.float32) % 7


@contextmanager
def records_for(data: DataConfig, words: int, count: int, sources: int = 1) -> Iterator[list[PromptRecord]]:
    """Yields distinct prompts of about ``words`` tokens; of edits, each with ``sources`` blank pictures.

    Mixed ones are edits too: a batch has records of one kind, and theirs take the most memory and time.
    """
    with TemporaryDirectory() as folder:
        number_of = {"i2i": sources, "mixed": sources, "segmentation": 1}
        pictures = [Path(folder, f"{n}.png") for n in range(number_of.get(data.task, 0))]
        for picture in pictures:
            Image.new("RGB", (data.width, data.height)).save(picture)
        yield [
            PromptRecord(id=str(number), prompt=prompt_of(words, number), source_images=tuple(pictures))
            for number in range(count)
        ]


def prompt_of(words: int, number: int) -> str:
    """Prompts of different numbers have different lengths, as real ones do."""
    count = max(words - number % 5, 1)
    return " ".join(_WORDS[(place + number) % len(_WORDS)] for place in range(count))
