"""Runs the signal check with the project's configured rewards and with a random reward; prints verdict and cost.

Needs a folder in which the pipelines starter and data_preparation have run, such as the clones of seeds.py.

    python benchmarks/check_signal.py
    python benchmarks/check_signal.py --folder CLONE --params seed=1,data.task=i2i
    python benchmarks/check_signal.py --folder CLONE --params seed=1 --env text
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import project
import torch

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.config import RewardConfig
from visual_grpo.grpo.checks import measure_signal, useful_cosine
from visual_grpo.training import components

_chance = torch.Generator().manual_seed(0)


def chance(prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> list[float]:
    """A random reward."""
    return torch.rand(len(samples), generator=_chance).tolist()


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    config, records = project.load(arguments)
    print("| module | reward | cosine | verdict | CPU s |\n|---|---|---|---|---|")
    blind = {"chance": RewardConfig(function="check_signal:chance")}
    for reward, own in (("its own", config), ("chance", config.model_copy(update={"rewards": blind}))):
        path = own.model.path or own.starter.model
        spec, model = components.make_run_spec(own, path), components.build_model(own, path)
        trainer = components.build_trainer(own, spec, model, components.build_scorer(own, spec.modules))
        most, useful = own.policy.signal_check.most(own.grpo.steps), useful_cosine(own.grpo.steps)
        for module, one in trainer.modules.items():
            started = time.process_time()
            signal = measure_signal(one, records.split("train"), most=most, useful=useful)
            seconds = time.process_time() - started
            print(f"| {module} | {reward} | {signal} | {signal.verdict(useful)} | {seconds:.0f} |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    project.add_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
