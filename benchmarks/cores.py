"""Compares a rollout on one core with a rollout on all available cores: time, CPU time, equality of the images.

Uses conf/base, alternates between both in one process and prints medians.

    python benchmarks/cores.py
    GLIBC_TUNABLES=glibc.malloc.perturb=0 python benchmarks/cores.py    # with glibc's default handling of freed memory
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from step import base_config, brightness, distinct_prompts

from visual_grpo import components, third_party_output
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import PromptRecord, Sample


def main() -> None:
    third_party_output.silence_libraries()
    arguments = _arguments()
    config = base_config("all", arguments.model)
    model = components.build_model(config, arguments.model)
    plan = components.make_plan(config, arguments.model)
    trainer = components.build_trainer(config, plan, model, RewardSet({"brightness": (brightness, 1.0)}))
    every = os.sched_getaffinity(0)
    print("| module | cores | seconds | CPU seconds | images |\n|---|---|---|---|---|")
    for module, module_trainer in trainer.modules.items():
        records = distinct_prompts(module_trainer.config.prompts_per_step)
        measured: dict[int, list[tuple[float, float]]] = {1: [], len(every): []}
        images: dict[int, list[Sample]] = {}
        for number in range(arguments.rounds + 1):
            for cores in measured:
                os.sched_setaffinity(0, sorted(every)[:cores])
                seconds, images[cores] = _rollout(module_trainer, records)
                if number:  # The first round is a warm-up.
                    measured[cores].append(seconds)
        for cores, rounds in measured.items():
            wall, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            same = all(map(torch.equal, images[1], images[cores]))
            print(f"| {module} | {cores} | {wall:.2f} | {cpu:.2f} | {'equal' if same else 'different'} |")


def _rollout(trainer: GRPOTrainer[Any], records: list[PromptRecord]) -> tuple[tuple[float, float], list[Sample]]:
    """Seconds and CPU seconds of a rollout with a fixed seed, and its images."""
    wall, cpu = time.perf_counter(), time.process_time()
    rollout = trainer.policy.rollout(records, trainer.config.group_size, torch.Generator().manual_seed(0))
    return (time.perf_counter() - wall, time.process_time() - cpu), list(rollout.samples)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/06_models/base", help="folder of a GlmImagePipeline")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
