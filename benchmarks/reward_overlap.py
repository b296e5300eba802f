"""Measures what it saves to draw while a worker scores: wall-clock time with overlap against without.

A worker process takes a given time for each image. A training step (``grpo.rollout_prompts``) and an evaluation are
timed in pairs that alternate, after a warm-up; prints medians, and whether the evaluations' scores were the same.

    python benchmarks/reward_overlap.py                              # the default model
    python benchmarks/reward_overlap.py --seconds 0.2 --rounds 9
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step import base_config, distinct_prompts

from visual_grpo.common import quiet_libraries
from visual_grpo.common.errors import UserError
from visual_grpo.evaluation.samples import generate_and_score, plan_images
from visual_grpo.grpo.sampling import PromptOrder
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.training import components

WORKERS = Path(__file__).parents[1] / "workers"
WORKER = """
import sys, time
from PIL import ImageStat
from serve import serve

seconds = float(sys.argv.pop())

def score(request):
    time.sleep(seconds * len(request.images))
    return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in request.images]

serve("brightness-1", lambda: score)
"""


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    config = base_config(arguments.module, arguments.model)
    part = config.grpo.model_copy(update={"rollout_prompts": arguments.rollout_prompts})
    config = config.model_copy(update={"grpo": part})
    image: Any = components.build_model(config, arguments.model)
    spec = components.make_run_spec(config, arguments.model)
    with _worker(arguments.seconds) as url:
        reward = HttpReward(url, batch_size=64, concurrency=1)
        rewards = RewardSet({"brightness": (reward, 1.0)})
        trainer = components.build_trainer(config, spec, image, rewards).modules[arguments.module]
        records = distinct_prompts(trainer.config.prompts_per_step)
        order = PromptOrder(records, trainer.seed)
        requests = plan_images({"held_out": records}, seed=0, images_per_prompt=4, max_prompts=None)
        totals: list[list[float]] = []

        def evaluate() -> None:
            with tempfile.TemporaryDirectory() as folder:
                sampler = {"rollout": config.sampling.rollout}
                table = generate_and_score(image, rewards, requests, sampler, Path(folder), batch_size=4, conditions={})
                totals.append(table["total"].tolist())

        table = Table()
        for column in ("", "images", "without, s", "with overlap, s", "with overlap / without"):
            table.add_column(column, justify="right" if column else "left")
        work: dict[str, tuple[int, Callable[[], object]]] = {
            "training step": (
                len(records) * trainer.config.group_size,
                lambda: trainer.take_step(records, order),
            ),
            "evaluation": (len(requests), evaluate),
        }
        for name, (images, once) in work.items():
            without, overlapping = _pairs(reward, once, arguments.rounds)
            ratio = statistics.median(one / other for one, other in zip(overlapping, without, strict=True))
            medians = [f"{statistics.median(times):.2f}" for times in (without, overlapping)]
            table.add_row(name, str(images), *medians, f"{ratio:.2f}")
    console = Console(width=120)
    console.print(
        f"{arguments.module}, a worker with {arguments.seconds:g} s an image, {arguments.rounds} pairs", highlight=False
    )
    console.print(table)
    console.print(f"the evaluations' scores are the same: {all(own == totals[0] for own in totals)}", highlight=False)


def _pairs(reward: Any, once: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Wall-clock seconds without and with overlap; who goes first alternates."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for waits in (False, True) if number % 2 else (True, False):
            reward.waits = waits
            start = time.perf_counter()
            once()
            if number:  # The first round is a warm-up.
                times[waits].append(time.perf_counter() - start)
    return times[False], times[True]


@contextmanager
def _worker(seconds: float) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, "--port=0", str(seconds)],
        env={**os.environ, "PYTHONPATH": str(WORKERS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[1].rstrip(",")
        process.stdout.readline()
        yield url
    finally:
        process.kill()
        process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", choices=("ar", "dit"), default="dit")
    parser.add_argument("--model", default="data/06_models/base", help="folder or hub id of a GlmImagePipeline")
    parser.add_argument("--seconds", type=float, default=0.05, help="that the worker takes for an image")
    parser.add_argument("--rollout-prompts", type=int, default=1, help="prompts that are drawn at a time")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"Error: {error}")
