"""Does a judge tell a gain that carries over from one that does not, and how often does it speak for nothing?

Without ``--folder``: simulated evaluations in which, by every judge, the trained model is as good as the base model.
The reward's gain is real, so that each judge that errs confirms or contradicts it.

With ``--folder``: two stories with the demo's token generator, for each seed trained, evaluated and brought to the gate
by the commands that a user has. *Gain*: ``shapes`` is optimised, which measures the object that it has cut out; the
judge compares whole pictures with drawings. *Hack*: ``jpeg_size`` is optimised, which an empty picture wins; ``shapes``
is the judge. The folder is a clone in which starter and data_preparation have run with ``output=data``; a run takes
about four minutes of CPU time.

    python benchmarks/judges.py
    python benchmarks/judges.py --folder CLONE --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.evaluation.comparison import compare
from visual_grpo.evaluation.verdict import change, summarise
from visual_grpo.starter.shapes.render import ATTRIBUTES, COMBINATIONS, draw_all

PROMPTS, EACH = 34, 6
SHAPES = "function=visual_grpo.starter.shapes.shapes_reward:ShapesReward"
STORIES = {
    "gain": f"rewards.shapes.{SHAPES},rewards.drawings.function=judges:nearest_drawing,rewards.drawings.judge=true",
    "hack": f"rewards.jpeg_size.weight=1,rewards.shapes.{SHAPES},rewards.shapes.judge=true,grpo.kl_weight=0,"
    "grpo.learning_rate=0.003",
}
SMALL = "policy.train=ar,policy.signal_check.rollouts=0,grpo.steps=24,evaluation.every=3,evaluation.images_per_prompt=2"
_SIDE = 32


def nearest_drawing(prompts: Sequence[PromptRecord], images: Sequence[Tensor]) -> list[float]:
    """Share of the asked attributes that the most similar of all drawings has, by squared differences of pixels."""
    drawings = _drawings(*images[0].shape[-2:])
    scores = []
    for record, image in zip(prompts, images, strict=True):
        distances = (drawings - _small(image[None])).square().mean((1, 2, 3))
        found = COMBINATIONS[int(distances.argmin())]
        right = [getattr(found, name) == record.metadata[name] for name in ATTRIBUTES]
        scores.append(sum(right) / len(right))
    return scores


@cache
def _drawings(height: int, width: int) -> Tensor:
    return _small(draw_all(1, height, width, seed=0)[:, 0])


def _small(images: Tensor) -> Tensor:
    return F.interpolate(images.float() / 255, size=(_SIDE, _SIDE), mode="area")


def simulated(runs: int, judges: int, seed: int = 0) -> pd.DataFrame:
    """How often any of ``judges`` confirms or contradicts a real gain by the total, of which they see nothing.

    Scores differ by prompt, by judge and by sample, as in an evaluation of `PROMPTS` prompts with `EACH` samples.
    """
    rng, names = np.random.default_rng(seed), [f"judge{number}" for number in range(judges)]
    said = []
    for _ in range(runs):
        before, after = _table(rng, names, gain=0.0), _table(rng, names, gain=0.5)
        outcomes = [
            judge["outcome"] for judge in summarise(compare(before, after, bootstrap_samples=100, seed=0))["judges"]
        ]
        said.append({outcome: outcome in outcomes for outcome in ("carries over", "contradicted")})
    return pd.DataFrame(said)


def _table(rng: np.random.Generator, judges: Sequence[str], gain: float) -> pd.DataFrame:
    ids = np.repeat([f"p{number}" for number in range(PROMPTS)], EACH)
    rows = pd.DataFrame({"sampler": "eval", "split": "held_out", "id": ids, "index": np.tile(range(EACH), PROMPTS)})
    rows = rows.assign(prompt=ids, unit=ids, seed=range(len(ids)), file="")
    for name in ("total", *judges):
        column = name if name == "total" else f"reward/{name}"
        of_prompts = np.repeat(rng.normal(0, 0.3, PROMPTS), EACH)  # Of a side, so that samples of a prompt are alike.
        rows[column] = of_prompts + rng.normal(0, 0.3, len(rows)) + gain * (name == "total")
    rows["reward/optimised"] = rows["total"]
    rows.attrs = {"weights": {"optimised": 1.0, **dict.fromkeys(judges, 0.0)}, "judges": dict.fromkeys(judges, "total")}
    return rows


def main() -> None:
    arguments = _arguments()
    if arguments.folder is None:
        print("| judges | runs | any confirms | any contradicts | together |\n|---|---|---|---|---|")
        for judges in (1, 2, 4):
            said = simulated(arguments.runs, judges)
            shares = [said["carries over"].mean(), said["contradicted"].mean(), said.any(axis=1).mean()]
            print(f"| {judges} | {len(said)} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)
        return
    print("| story | seed | optimised: difference [95%] | judge: difference [95%] | headline | alarm | gate |")
    print("|---|---|---|---|---|---|---|")
    for story, rewards in STORIES.items():
        for seed in arguments.seeds:
            shared = f"output=data,train.seed={seed},{SMALL},{rewards}"
            _kedro(arguments.folder, "baseline,train,evaluate", shared)
            _kedro(arguments.folder, "promote", f"{shared},promotion.model=judges-{story}-{seed}")
            print(f"| {story} | {seed} | {' | '.join(_cells(arguments.folder / 'data/08_reporting'))} |", flush=True)


def _cells(reports: Path) -> list[str]:
    evaluation, gate = (json.loads((reports / name).read_text()) for name in ("evaluation.json", "promotion.json"))
    headline, alarms = evaluation["headline"], evaluation["training"]["alarms"]
    alarm = f"step {alarms[0]['step']}: {alarms[0]['sentence']}" if alarms else "none"
    decision = "promoted" if gate["promoted"] else f"refused: {', '.join(_failed(gate))}"
    (judge,) = headline["judges"]
    said = ", ".join(dict.fromkeys([headline["verdict"], judge["outcome"]]))
    return [change(headline), change(judge), said, alarm, decision]


def _failed(gate: dict[str, Any]) -> list[str]:
    (stage,) = gate["stages"].values()
    return [condition["name"] for condition in stage["conditions"] if not condition["holds"]]


def _kedro(folder: Path, pipelines: str, params: str) -> None:
    kedro = str(Path(sys.executable).with_name("kedro"))
    paths = [str(folder.resolve() / "src"), str(Path(__file__).parent)]  # The judge is here.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [kedro, "run", f"--pipelines={pipelines}", f"--params={params}"]
    with (folder / "judges.log").open("a") as log:
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="the clone; default: only simulated runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
