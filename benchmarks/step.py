"""Measures the CPU seconds of a training step by phase and compares them with a minimal reference implementation.

The reference (the floor) is in floors.py. Step and floor alternate in one process, with conf/base and a reward of
negligible cost; prints a table of median process CPU times for each module.

    python benchmarks/step.py                              # both modules of the default model
    python benchmarks/step.py --module dit --model PATH --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from floors import BareFlow, ar_floor, decode_by_pipeline, dit_floor, update_dit
from phases import Seconds, medians, phase, phases_of_methods
from rich.console import Console
from rich.table import Table

from visual_grpo.common import quiet_libraries
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import Parameters
from visual_grpo.grpo.sampling import PromptOrder
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.families.glm_image.model import GlmImage
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.run_spec import resolve
from visual_grpo.models.tokens import token_policy
from visual_grpo.models.tokens.token_policy import TokenPolicy
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.starter.shapes.render import COMBINATIONS
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.training import components

CONF = Path(__file__).parents[1] / "conf" / "base" / "parameters.yml"


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    config = base_config(arguments.module, arguments.model)
    spec = resolve(config)
    image: Any = components.build_model(spec)
    trainer = components.build_trainer(spec, image, RewardSet({"brightness": (brightness, 1.0)}))
    console = Console(width=120)
    for module, module_trainer in trainer.modules.items():
        records = distinct_prompts(module_trainer.config.prompts_per_step)
        console.print(f"{module}, CPU seconds per step: {_shape(config, module_trainer)}", highlight=False)
        measured = Measured(image=image, trainer=module_trainer, config=config, records=records)
        console.print(_table(*_measure(measured, arguments.rounds)))
        if isinstance(module_trainer.policy, FlowPolicy):
            for line in _dit_lines(measured, module_trainer.policy, arguments.rounds):
                console.print(line, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A module's trainer and what it is measured with."""

    image: GlmImage
    trainer: GRPOTrainer[Any]
    config: Parameters
    records: list[PromptRecord]


def _measure(measured: Measured, rounds: int) -> tuple[Seconds, Seconds]:
    """Median CPU seconds by phase of the project's step and of the floor."""
    steps, floors = [], []
    for number in range(rounds + 1):
        step, floor = _step(measured.trainer, measured.records), _floor(measured)
        if number:  # The first round is a warm-up.
            steps.append(step)
            floors.append(floor)
    return medians(steps), medians(floors)


def _step(trainer: GRPOTrainer[Any], records: list[PromptRecord]) -> Seconds:
    """A training step of the project, by phase."""
    seconds: Seconds = {}
    whole: Seconds = {}
    with phases_of_methods(seconds, [*_methods(trainer.policy), (trainer, "update", "updates")]), phase(whole, "step"):
        trainer.take_step(records, PromptOrder(records, trainer.seed))
    return seconds | {"everything else": whole["step"] - sum(seconds.values())}


def _methods(policy: object) -> list[tuple[object, str, str]]:
    """(object, method name, phase) of the phases of a rollout."""
    if isinstance(policy, TokenPolicy):
        return [
            (token_policy, "sample_with_adapter", "tokens"),
            (policy, "reference_log_probs", "reference"),
            (policy.model, "samples", "decode"),
        ]
    assert isinstance(policy, FlowPolicy)
    return [
        (policy.model, "sample_tokens", "tokens"),
        (policy.model, "conditions_of", "denoising"),
        (policy.denoiser, "sample_path", "denoising"),
        (policy, "reference_means", "reference"),
        (policy.denoiser, "pixels", "pixels"),
    ]


def _floor(measured: Measured) -> Seconds:
    policy, grpo = measured.trainer.policy, measured.trainer.config
    if isinstance(policy, TokenPolicy):
        return ar_floor(measured.image, policy, grpo, measured.records)
    assert isinstance(policy, FlowPolicy)
    return dit_floor(measured.image, policy, measured.config.sampling.eval, grpo, measured.records)


def _dit_lines(own: Measured, policy: FlowPolicy[Any], rounds: int) -> list[str]:
    """The cost of a gradient through the unconditional branch, and of a plain pipeline call."""
    image, sampling = own.image, own.config.sampling
    rollout = policy.rollout(own.records, own.trainer.config.group_size, torch.Generator().manual_seed(0))
    flow = BareFlow.of(image, policy, own.records, rollout.trajectory)
    tokens = image.sample_tokens(rollout.prompts, range(len(rollout.prompts)), sampling.eval)
    measured: list[Seconds] = []
    for _ in range(rounds + 1):
        seconds: Seconds = {}
        with phase(seconds, "without"):
            update_dit(policy, flow, rollout.trajectory)
        with phase(seconds, "with"):
            update_dit(policy, flow, rollout.trajectory, unconditional_gradient=True)
        with phase(seconds, "pipeline"):
            decode_by_pipeline(image, rollout.prompts, tokens.trajectory.tokens, sampling.rollout)
        measured.append(seconds)
    middle = medians(measured[1:])
    ratio = statistics.median(seconds["with"] / seconds["without"] for seconds in measured[1:])
    return [
        f"unconditional branch: a replay with gradient through it {middle['with']:.3f} s, without"
        f" {middle['without']:.3f} s: {ratio:.2f}x",
        f"plain pipeline call (all steps ODE, VAE in one batch) instead of denoising and pixels:"
        f" {middle['pipeline']:.3f} s",
    ]


def base_config(train: str, model: str) -> Parameters:
    """conf/base with a brightness reward and one torch thread; ``all`` alternates, so that each module has a step."""
    tree = yaml.safe_load(CONF.read_text())
    tree["seed"] = 0  # A reference in the file, which only Kedro resolves.
    tree["model"] |= {"path": model, "device": "cpu", "threads": 1}
    tree["policy"] |= {"train": train, "stages": "alternating"}
    tree["rewards"] = dict.fromkeys(tree["rewards"]) | {"brightness": {}}
    return Parameters.model_validate(with_world(tree))


def distinct_prompts(count: int) -> list[PromptRecord]:
    """Distinct prompts of drawn shapes, without quoted text."""
    spread = COMBINATIONS[:: max(1, len(COMBINATIONS) // count)][:count]
    return [PromptRecord(id=str(row), prompt=combination.prompt) for row, combination in enumerate(spread)]


def brightness(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> list[float]:
    return [float(sample.float().mean()) / 255 for sample in samples]


def _shape(config: Parameters, trainer: GRPOTrainer[Any]) -> str:
    grpo, sampler, flow = trainer.config, config.sampling.rollout, config.policy.flow
    shape = f"{grpo.prompts_per_step} prompts x {grpo.group_size}, {grpo.updates_per_rollout} updates"
    shape += f", {sampler.steps} denoising steps, guidance {sampler.guidance_scale}"
    if isinstance(trainer.policy, FlowPolicy):
        window = trainer.policy.denoiser.window(trainer.policy.steps, torch.Generator().manual_seed(0))
        shape += f", {len(window)} stochastic, {flow.train_share:.0%} of them trained"
    return shape


def _table(step: Seconds, floor: Seconds) -> Table:
    table = Table()
    for column in ("phase", "step", "floor", "step / floor"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, seconds in step.items():
        against = floor.get(name)
        ratio = f"{seconds / against:.2f}" if against else ""
        table.add_row(name, f"{seconds:.3f}", f"{against:.3f}" if against else "", ratio)
    total, bound = sum(step.values()), sum(floor.values())
    table.add_row("all", f"{total:.3f}", f"{bound:.3f}", f"{total / bound:.2f}", style="bold")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", choices=("ar", "dit", "all"), default="all")
    parser.add_argument("--model", default="data/06_models/base", help="folder or hub id of a GlmImagePipeline")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"Error: {error}")
