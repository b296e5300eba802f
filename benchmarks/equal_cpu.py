"""Trains a module by several algorithms, each with several updates per rollout, at equal CPU seconds.

The loops train in one process: the one that has spent the least CPU takes the next step, so that all of them meet the
same load of the machine. The learning rate is constant, because no loop knows how many steps it will take. After each
equal part of ``--cpu`` seconds a loop is evaluated on the held-out prompts, which is not counted. FOLDER/seed-SEED is a
clone as `algorithms.py` needs; ``--train-seed`` is another training on the same base model. The table also says how
many CPU seconds and scored samples a loop took to the first evaluation that is within 0.01 of the default's last total.
What is done is not done again, so that the same call adds loops.

    python benchmarks/equal_cpu.py 3 --env sd3_small --folder FOLDER --cpu 48 --loops default@2 nft@1 nft@2 nft@4 awm@2
    python benchmarks/equal_cpu.py 0 --folder FOLDER --params policy.train=dit --cpu 40 --loops default@2 nft@2
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import algorithms
import pandas as pd

from visual_grpo.common import quiet_libraries
from visual_grpo.evaluation.samples import read_scores

NEAR = 0.01
"""Of the total: a loop has reached another if it is at most this far below. Two evaluations differ by chance."""
RESULTS, BASE, DEFAULT = Path("results/equal_cpu"), "base", "default@2"
NEW_NOISE = "policy.flow.draws={updates}"
HALF = "grpo.prompts_per_step=4"
"""Half of the prompts of a rollout; of words, a quarter."""
AWM = "grpo.loss=awm,grpo.nft_beta=null"
LOOPS: dict[str, tuple[str, float]] = {
    "default": ("", 1.0),
    "default_twice": ("", 2.0),
    "default_half": (HALF, 1.0),
    "half_size": ("sampling.rollout.height=64,sampling.rollout.width=64", 1.0),
    "nft": (algorithms.NFT, 2.0),
    "nft_half": (f"{algorithms.NFT},{HALF}", 2.0),
    "nft_batch": (f"{algorithms.NFT},grpo.advantage_scale=batch", 2.0),
    "nft_all_levels": (f"{algorithms.NFT},policy.flow.window_steps=null", 2.0),
    "nft_new_noise": (f"{algorithms.NFT},{NEW_NOISE}", 2.0),
    "awm": (AWM, 1.0),
    "awm_twice": (AWM, 2.0),
    "awm_new_noise": (f"{AWM},{NEW_NOISE}", 2.0),
}
"""Parameters, and the learning rate over the configuration's."""


@dataclass
class Loop:
    """One algorithm with its number of updates per rollout."""

    name: str
    folder: Path
    training: algorithms.Training
    budget: float
    """CPU seconds."""
    parts: int
    """Evaluations, each after an equal part of the budget."""
    done: int = 0

    @property
    def spent(self) -> float:
        return sum(row["seconds/cpu"] for row in self.training.history)

    def step(self) -> None:
        self.training.step()
        if self.spent >= self.budget * (self.done + 1) / self.parts:
            self.done += 1
            self.training.keep(self.folder / f"{self.name} {self.done}")


def train(clone: Path, found: Path, arguments: argparse.Namespace, seed: int) -> None:
    names = [name for name in arguments.loops if not (found / f"{name} {arguments.evaluations}").exists()]
    loops = []
    for name in names:
        kind, _, updates = name.partition("@")
        given, rate = LOOPS[kind]
        shared = f"train.ema_decay=null,grpo.schedule=constant,grpo.steps=100000,{arguments.params}"
        if arguments.train_seed is not None:
            shared += f",train.seed={arguments.train_seed}"
        usual = algorithms.Training(clone, arguments.env, seed, shared)
        own = usual.config.grpo_of(usual.module).learning_rate * rate
        params = [shared, given.format(updates=updates), f"grpo.updates_per_rollout={updates}"]
        params += [f"modules.{usual.module}.learning_rate={own}"]
        training = algorithms.Training(clone, arguments.env, seed, ",".join(filter(None, params)))
        if not (found / BASE).exists():
            training.keep(found / BASE, base=True)
        loops.append(Loop(name, found, training, arguments.cpu, arguments.evaluations))
    while running := [loop for loop in loops if loop.done < loop.parts]:
        min(running, key=lambda loop: loop.spent).step()


def table(folders: Sequence[Path], against: str) -> str:
    """The base model, and each loop at the last evaluation that all of ``folders`` have of it and of the loop that it
    is judged ``against``; folders are pooled."""
    right = [name for name in read_scores(folders[0] / BASE).columns if re.fullmatch("part/.*/all", name)]
    heads = ["loop", "steps", "samples", "CPU s", "total", f"minus {against} [95%]"]
    heads += ["all right", f"minus {against} [95%]"] * len(right)
    heads += [*(name.rpartition("/")[2] for name in judges(folders)), f"CPU s, samples to the total of {against}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    loops = sorted({found.name.rpartition(" ")[0] for found in folders[0].glob("[!.]*@*")}, key=order)
    for name in (BASE, *loops):
        compared = (against,) if name == BASE else (name, against)
        last = min(evaluations(folder, each) for folder in folders for each in compared)
        if not last:
            continue
        places = {"own": BASE if name == BASE else f"{name} {last}", "other": f"{against} {last}"}
        scores = {(n, key): read_scores(f / own) for n, f in enumerate(folders) for key, own in places.items()}
        facts = [json.loads((folder / places["own"] / "facts.json").read_text()) for folder in folders]
        cells = [name, *(f"{sum(fact[key] for fact in facts) / len(facts):.0f}" for key in ("steps", "samples", "cpu"))]
        for column in ("total", *right, *judges(folders)):
            found = algorithms.compared(scores, range(len(folders)), "other", "own", column)
            cells += [f"{found.trained:.3f}"] if column in ("total", *right) else []
            cells += [f"{found.difference:+.3f} [{found.ci_low:+.3f}, {found.ci_high:+.3f}]"]
        cells += ["; ".join(reached(folder, name, against) for folder in folders)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def order(name: str) -> tuple[bool, str]:
    return name != DEFAULT, name


def evaluations(folder: Path, name: str) -> int:
    """Those that are done."""
    return len(list(folder.glob(f"{name} [0-9]*")))


def judges(folders: Sequence[Path]) -> list[str]:
    """The scores that are only reported, by their columns."""
    shown = read_scores(folders[0] / BASE).columns
    return [name for name in ("reward/outline", "reward/delta_e", *algorithms.GUARDS) if name in shown]


def reached(folder: Path, name: str, against: str) -> str:
    """CPU seconds and samples to the first evaluation near the last one of ``against``."""
    aim = read_scores(folder / f"{against} {evaluations(folder, against)}")["total"].mean() - NEAR
    for number in range(1, evaluations(folder, name) + 1):
        own = folder / f"{name} {number}"
        if read_scores(own)["total"].mean() >= aim:
            facts = json.loads((own / "facts.json").read_text())
            return f"{facts['cpu']:.0f}, {facts['samples']:.0f}"
    return "not reached"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, required=True, help="where the clones are")
    parser.add_argument("--env", help="the Kedro environment, as for kedro run")
    parser.add_argument("--params", default="", help="further parameters, as for kedro run")
    parser.add_argument("--cpu", type=float, required=True, help="CPU seconds of each loop")
    parser.add_argument("--evaluations", type=int, default=4, help="of each loop")
    parser.add_argument("--train-seed", type=int, help="of the training; default: the clone's seed")
    parser.add_argument("--table", action="store_true", help="print the table of what is done; train nothing")
    parser.add_argument("--against", default=DEFAULT, help="the loop that the others are compared with")
    parser.add_argument("--loops", nargs="+", default=[], help=f"LOOP@UPDATES; a loop of {', '.join(LOOPS)}")
    return parser.parse_args()


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    folders = []
    for seed in arguments.seeds:
        clone = arguments.folder.resolve() / f"seed-{seed}"
        own = "" if arguments.train_seed is None else f"-{arguments.train_seed}"
        folders.append(clone / RESULTS.with_name(f"{RESULTS.name}{own}"))
        if not arguments.table:
            train(clone, folders[-1], arguments, seed)
    print(pd.Timestamp.now().strftime("%H:%M"), table(folders, arguments.against), sep="\n")


if __name__ == "__main__":
    main()
