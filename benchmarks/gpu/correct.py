"""Small models of the real classes on the device: the project's own checks, and trainings against each other.

A model's process shares the card with those of the others, so times mean nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from cases import SIZE, SMALL, Tree, small, small_folder
from recording import Machine, Recorder
from torch import Tensor

from tests.rewards.segmentation.small_sam2 import save_sam2
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import ModelConfig, Parameters
from visual_grpo.models.family import find_family
from visual_grpo.models.family_check import check_family
from visual_grpo.models.tokens import generation
from visual_grpo.operations.plan.dry_run import planned_model, planned_trainer, records_for
from visual_grpo.rewards.segmentation import PointPrompt
from visual_grpo.rewards.segmentation.sam2 import Sam2Segmenter

MODULES: Mapping[str, tuple[str, ...]] = {"glm_image": ("ar", "dit"), "qwen2_5_vl": ("vl",)}
"""Trained modules of the models that are no plain pipeline; those have a ``dit``."""
STEPS = 2
GUIDANCE = 4.0
ALGORITHM: Tree = {
    "gpu_check": {"prompts": 2, "steps": STEPS},
    "grpo": {"updates_per_rollout": 2, "learning_rate": 1e-3, "kl_weight": 0.1},
}
State = dict[str, Tensor]


def run(rows: Recorder, machine: Machine, name: str) -> None:
    if name == "sam2":
        _segmenter(rows, machine)
        return
    dtypes = ["float32"] if machine.tiny else ["float32", "bfloat16", *(["float16"] if name == "sd3" else [])]
    for dtype in dtypes:
        if name not in MODULES:
            with rows.guarded(f"{name} {dtype}: pipeline"):
                _pipeline(rows, machine, name, dtype)
        for module in MODULES.get(name, ("dit",)):
            with rows.guarded(f"{name} {module} {dtype}: trainings"):
                _trainings(rows, machine, name, module, dtype)
            if module != "dit":
                with rows.guarded(f"{name} {module} {dtype}: tokens"):
                    _tokens(rows, machine, name, module, dtype)


def _pipeline(rows: Recorder, machine: Machine, name: str, dtype: str) -> None:
    """The checks of `check_model` against diffusers' own pipeline."""
    _, options = SMALL[name]
    family, folder = find_family(name), str(small_folder(name, machine))
    config = ModelConfig.model_validate({"path": folder, "device": machine.device, "dtype": dtype})
    findings = check_family(family, folder, config, SIZE, family.options(**options), GUIDANCE)
    for finding in findings:
        row = {"check": finding.name, "difference": finding.difference, "limit": finding.limit}
        rows.add("checks" if finding.passed else "failed checks", model=name, dtype=dtype, **row)
    passed = sum(finding.passed for finding in findings)
    rows.add("against diffusers", model=name, dtype=dtype, passed=f"{passed} of {len(findings)} checks")


def _trainings(rows: Recorder, machine: Machine, name: str, module: str, dtype: str) -> None:
    """One training, and how far from its adapter others end that must end there, but for the order of sums."""
    folder = small_folder(name, machine)

    def config(**model: Any) -> Parameters:
        changes = {**ALGORITHM, "model": {"device": machine.device, "dtype": dtype, **model}}
        return small(name, module, folder, changes)

    first, steps = trained(config())
    finite = all(math.isfinite(value) for step in steps for value in step.values.values())
    moved = [bool(value.any()) for key, value in first.items() if "lora_B" in key]
    row: dict[str, Any] = {"model": f"{name} {module}", "dtype": dtype, "finite": "yes" if finite else "NO"}
    row |= {"moved": f"{sum(moved)}/{len(moved)}", "log_ratio": steps[0].values["ratio/first_max_abs_log"]}
    kept = config().policy
    other = kept.model_copy(update={"gradient_checkpointing": not kept.gradient_checkpointing})
    works: dict[str, Callable[[], State]] = {
        "again": lambda: trained(config())[0],
        "resumed": lambda: trained(config(), stop=STEPS // 2)[0],
        "checkpointing": lambda: trained(config().model_copy(update={"policy": other}))[0],
    }
    if "flow" in find_family(name).kinds():  # Of several networks.
        works["offload"] = lambda: trained(config(offload="phases"))[0]
    if machine.is_cuda and dtype == "float32":
        works["cpu"] = lambda: trained(config(device="cpu"))[0]
    for what, work in works.items():
        with rows.guarded(f"{name} {module} {dtype}: {what}"):
            row[what] = difference(first, work())
    rows.add("trainings", **row)


def _tokens(rows: Recorder, machine: Machine, name: str, module: str, dtype: str) -> None:
    """Tokens by the CUDA graph beside those with a cache that grows; both grow on a CPU."""
    changes = {**ALGORITHM, "model": {"device": machine.device, "dtype": dtype}}
    config = small(name, module, small_folder(name, machine), changes)
    policy = _trainer(config).policy
    with records_for(config.data, config.plan.prompt_words, 2) as records:

        def drawn() -> Any:
            return policy.rollout([records[0], records[1]], 4, torch.Generator().manual_seed(0))

        ours = drawn()
        with patch.object(generation, "token_steps", generation.TokenSteps):
            growing = drawn()
    same = ours.trajectory.tokens == growing.trajectory.tokens
    far = (ours.log_probs - growing.log_probs)[same.cpu()].abs().max()
    columns = {"same_rows": f"{int(same.all(1).sum())} of {len(same)}", "log_probs_differ": float(far)}
    rows.add("tokens by a graph and growing", model=f"{name} {module}", dtype=dtype, **columns)


def trained(config: Parameters, stop: int | None = None) -> tuple[State, list[StepMetrics]]:
    """The adapter on the CPU and the metrics of the steps; after ``stop`` a new model goes on from the state."""
    with records_for(config.data, config.plan.prompt_words, config.grpo.prompts_per_step) as records:
        trainer = _trainer(config)
        steps = trainer.fit(records)
        done = [next(steps) for _ in range(stop or config.grpo.steps)]
        if stop is not None:
            state = trainer.state()
            trainer = _trainer(config)
            trainer.load_state(*state)
            done += list(trainer.fit(records))
    return {name: value.cpu() for name, value in trainer.policy.adapter_state_dict().items()}, done


def _trainer(config: Parameters) -> Any:
    torch.manual_seed(0)
    return planned_trainer(planned_model(config, measured=True))


def difference(one: State, other: State) -> float:
    """0 if bit for bit the same; else the norm of the difference over that of ``one``."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return math.sqrt(apart / sum(float(value.double().square().sum()) for value in one.values()))


def _segmenter(rows: Recorder, machine: Machine) -> None:
    """The masks of the reward negative_points' SAM 2, beside the CPU's."""
    folder = save_sam2(machine.work / "sam2")
    image = torch.randint(0, 256, (3, 96, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    prompt = PointPrompt(positives=((20.0, 30.0),), negatives=((40.0, 70.0),), box=None)
    masks = []
    for device in ("cpu", machine.device):
        segmenter = Sam2Segmenter(str(folder), device=device)
        masks.append(segmenter.masks(segmenter.embed(image), [prompt]))
    share = float((masks[0] != masks[1]).float().mean())
    rows.add("SAM 2 against the CPU", share_of_other_pixels=share)
