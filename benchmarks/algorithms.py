"""Trains a module by several algorithms at equal CPU time, and compares them on held-out prompts.

Each seed needs a clone in FOLDER/seed-SEED in which starter and data_preparation have run with
``--params=seed=SEED,output=data`` and the same ``--env``, if any (`seeds.py` makes such clones). ``--cost`` prints the
CPU seconds of a step of variants, measured in turns in one process; ``--steps`` then gives each variant those that
cost the same. Rollouts are drawn with the trained weights, whatever is saved, so that one training gives both rows of a
variant: its last weights, and their average (``train.ema_decay``; null = none). Evaluation is not counted. What is done
is not done again. ``--every`` also evaluates each so many steps, to tell how far a training ends below its best
evaluation. ``--signal`` prints how much of a gradient is no noise: the mean cosine between the gradients of so
many independent rollouts, of the same prompts for all variants, before any training.

    python benchmarks/algorithms.py 0 --env sd3_small --folder FOLDER --cost default nft
    python benchmarks/algorithms.py 0 --env sd3_small --folder FOLDER --signal 12 default nft
    python benchmarks/algorithms.py 3 4 5 --env sd3_small --folder FOLDER --steps default=50 dppo=50 nft=25
    python benchmarks/algorithms.py 3 4 5 --folder FOLDER --params policy.train=dit --steps default=40 dppo=40

A reward in ``--params``, such as ``rewards.jpeg_size.weight=1``, takes the place of the world's; give that a folder of
its own.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import project
import torch
from phases import Seconds, phases_of_methods

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.comparison import join
from visual_grpo.evaluation.paired import PairedDifference, paired_difference
from visual_grpo.evaluation.samples import generate_and_score, plan_images, read_scores
from visual_grpo.grpo.sampling import PromptOrder
from visual_grpo.grpo.signal_check import mean_of_pairs, probe_gradient, update_cosines
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.transitions import ode_step
from visual_grpo.models.run_spec import resolve
from visual_grpo.training import components
from visual_grpo.training.ema import AdapterAverage

NFT = "grpo.loss=nft,grpo.nft_beta=0.5"
VARIANTS = {
    "default": "",
    "dppo": "grpo.loss=dppo,grpo.nft_beta=null",
    "nft": f"{NFT},grpo.learning_rate=0.0016",  # Twice the rate of sd3_small and of words.
    "awm": "grpo.loss=awm,grpo.nft_beta=null",
    "target_kl": "grpo.target_kl=0.001",
}
SHARED = "output=data,train.ema_decay=0.9,rewards.edge_density.weight=0,rewards.colour_entropy.weight=0"
RESULTS, BASE, AFTER = Path("results/algorithms"), "base", " after "
RIGHT, GUARDS = "part/shapes/all", ("reward/edge_density", "reward/colour_entropy")


class Training:
    """One training of a clone."""

    def __init__(self, folder: Path, env: str | None, seed: int, params: str) -> None:
        given = ",".join(filter(None, [SHARED, f"seed={seed}", params]))
        arguments = argparse.Namespace(folder=folder, params=given, env=env)
        self.config: Parameters
        self.records: RecordTable
        self.config, self.records = project.load(arguments)
        spec = resolve(self.config)
        self.scorer = components.build_scorer(spec)
        self.model: Any = components.build_model(spec)
        self.trainer: Any = components.build_trainer(spec, self.model, self.scorer)
        (self.module,) = spec.modules
        self.average = AdapterAverage(self.trainer, self.config.train.ema_decay)
        self.history: list[dict[str, float]] = []
        self._steps: Iterator[StepMetrics] = self.trainer.fit(self.records.split("train"))

    def step(self) -> bool:
        """Takes a step; False if all are done."""
        metrics = next(self._steps, None)
        if metrics is not None:
            self.history.append({"step": metrics.step, **metrics.values})
        return metrics is not None

    def keep(self, folder: Path, *, base: bool = False, averaged: bool = False) -> None:
        """Draws and scores the held-out prompts; the folder is complete if it exists."""
        fresh = folder.with_name(f".{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        evaluation, adapter = self.config.evaluation, self.model.adapters[self.module]
        held_out = self.records.split("held_out")
        settings = evaluation.model_copy(update={"seed": 0, "images_per_prompt": 4, "max_prompts": None})
        asked = plan_images({"held_out": held_out}, settings, {"eval": self.config.sampling.eval})
        with self.average.in_place() if averaged else adapter.disabled() if base else nullcontext():
            size = evaluation.batch_size
            generate_and_score(self.model, self.scorer, asked, fresh, batch_size=size)
            norm = self.velocity_norm()
        pd.DataFrame(self.history).to_csv(fresh / "training.csv", index=False)
        facts = {
            "steps": len(self.history),
            "samples": sum(row["samples"] for row in self.history),
            "cpu": sum(row["seconds/cpu"] for row in self.history),
            "velocity_norm": norm,
            "grpo": self.config.grpo.model_dump(mode="json"),
            "flow": self.config.policy.flow.model_dump(mode="json"),
        }
        (fresh / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # Of a training that was interrupted.
        fresh.rename(folder)

    @torch.no_grad()
    def velocity_norm(self) -> float:
        """Mean of |v| with the adapter over |v| without it, at the states of the base model's ODE; NaN of tokens."""
        if self.model.modules[self.module].kind == "tokens":
            return math.nan
        records = list(self.records.split("held_out"))[:32]
        steps, guidance = self.config.sampling.eval.denoising()
        flow = self.model.part(self.module, self.config.sampling.eval)
        schedule = flow.schedule(steps)
        velocity = flow.velocity(flow.conditions(records, range(32), guidance), torch.arange(len(records)))
        state = Denoiser(flow, self.config.policy).start_noise(range(len(records)))
        ratios = []
        for step, timestep in enumerate(schedule.timesteps):
            trained = velocity(state, timestep).flatten(1).norm(dim=1)
            with self.model.adapters[self.module].disabled():
                base = velocity(state, timestep)
            ratios.append(trained / base.flatten(1).norm(dim=1))
            state = ode_step(base, state, schedule.sigmas[step], schedule.sigmas[step + 1])
        return float(torch.stack(ratios).mean())


def cost(folder: Path, env: str | None, seed: int, params: str, names: Sequence[str]) -> None:
    """Prints CPU seconds of a step, the mean of four after the first of each, and of the trained steps in its rollout,
    which a rollout that keeps its graph would spare."""
    trainings = {name: Training(folder, env, seed, f"{VARIANTS[name]},{params}") for name in names}
    for training in trainings.values():
        training.step()
    sampled: Seconds = {}
    methods = [
        (own.trainer.policy.denoiser, method, name)
        for name, own in trainings.items()
        for method in ("_transition", "_velocities")
    ]
    with phases_of_methods(sampled, methods):
        for _ in range(4):
            for training in trainings.values():
                training.step()
    for name, training in trainings.items():
        step = sum(row["seconds/cpu"] for row in training.history[1:]) / 4
        print(name, f"{step:.2f} CPU s a step, {sampled[name] / 4:.2f} of them sample the trained steps")


def signal(folder: Path, env: str | None, seed: int, params: str, names: Sequence[str], rollouts: int) -> None:
    """Prints a row for each variant, with the standard error of the cosine and the CPU seconds of a gradient."""
    print("| variant | cosine | CPU s |\n|---|---|---|")
    for name in names:
        training = Training(folder, env, seed, ",".join(filter(None, [VARIANTS[name], params])))
        trainer, prompts = training.trainer, training.records.split("train")
        order, generator = PromptOrder(prompts, seed), torch.Generator().manual_seed(seed)
        began, gradients = time.process_time(), []
        for _ in range(rollouts):
            chosen = [prompts[i] for i in order.take(trainer.config.prompts_per_step)]
            gradients.append(probe_gradient(trainer, chosen, generator))
        cosine, error = mean_of_pairs(update_cosines(torch.stack(gradients)))
        spent = (time.process_time() - began) / rollouts
        print(f"| {name} | {cosine:.3f} ± {error:.3f} | {spent:.2f} |", flush=True)


def train(folder: Path, env: str | None, seed: int, name: str, params: str, every: int | None) -> None:
    found = folder / RESULTS
    if (found / name).exists():
        return
    training = Training(folder, env, seed, params)
    if not (found / BASE).exists():
        training.keep(found / BASE, base=True)
    while training.step():
        done = len(training.history)
        if every and done % every == 0 and done < training.config.grpo.steps:
            training.keep(found / f"{name}{AFTER}{done}")
    if training.config.train.ema_decay is not None:
        training.keep(found / f"{name} ema", averaged=True)
    training.keep(found / name)


def table(clones: dict[int, Path], names: Sequence[str]) -> str:
    """Each variant, and its difference to the last weights of the default; all seeds pooled, each with its prompts."""
    folders = {(seed, name): clone / RESULTS / name for seed, clone in clones.items() for name in (BASE, *names)}
    scores = {key: read_scores(folder) for key, folder in folders.items() if folder.exists()}
    heads = (
        "variant (seeds)",
        "total",
        "minus default",
        "all right",
        "minus default",
        "guards",
        "velocity norm",
        "training reward: best, last",
        "held out: best, last minus best",
        "CPU s",
    )
    lines = [f"| {' | '.join([*heads, 'steps'])} |", "|---" * (len(heads) + 1) + "|"]
    for name in (BASE, *names):
        done = [seed for seed in clones if {(seed, BASE), (seed, "default"), (seed, name)} <= scores.keys()]
        if not done:
            continue
        facts = [json.loads((folders[seed, name] / "facts.json").read_text()) for seed in done]
        cells = [f"{name} ({', '.join(map(str, done))})"]
        for column in ("total", RIGHT):
            if column not in scores[done[0], name]:  # Another reward is optimised.
                cells += ["", ""]
                continue
            found = compared(scores, done, "default", name, column)
            cells += [f"{found.trained:.3f}"]
            cells += [f"{found.difference:+.3f} [{found.ci_low:+.3f}, {found.ci_high:+.3f}]"]
        guards = [compared(scores, done, BASE, name, column) for column in GUARDS]
        cells += [", ".join(f"{guard.difference / guard.baseline:+.1%}" for guard in guards)]
        cells += [f"{sum(fact['velocity_norm'] for fact in facts) / len(facts):.3f}"]
        cells += ["" if name == BASE else ", ".join(best_and_last([folders[seed, name] for seed in done]))]
        cells += ["; ".join(held_out_end(clones[seed] / RESULTS, name, scores[seed, name]) for seed in done)]
        cells += [f"{sum(fact['cpu'] for fact in facts) / len(facts):.0f}", str(facts[0]["steps"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_and_last(folders: Sequence[Path]) -> list[str]:
    """Means over the trainings of the highest and the last running mean of five steps' rewards."""
    curves = [pd.read_csv(folder / "training.csv")["reward/total"].rolling(5).mean() for folder in folders]
    return [f"{sum(values) / len(curves):.3f}" for values in zip(*((c.max(), c.iloc[-1]) for c in curves), strict=True)]


def held_out_end(found: Path, name: str, last: pd.DataFrame) -> str:
    """The mean of a training's best evaluation, and the paired difference of the last to it; empty without others."""
    others = [read_scores(folder) for folder in found.glob(f"{name}{AFTER}*")]
    best = max([last, *others], key=lambda scores: scores["total"].mean())
    end = compared({(0, "best"): best, (0, name): last}, [0], "best", name, "total")
    return f"{end.baseline:.3f}, {end.difference:+.3f} [{end.ci_low:+.3f}, {end.ci_high:+.3f}]" if others else ""


def compared(
    scores: dict[tuple[int, str], pd.DataFrame], seeds: Sequence[int], before: str, after: str, column: str
) -> PairedDifference:
    pairs = pd.concat([join(scores[seed, before], scores[seed, after]).assign(base=seed) for seed in seeds])
    clusters = [f"{base}/{unit}" for base, unit in zip(pairs["base"], pairs["unit"], strict=True)]
    return paired_difference(pairs[f"{column}_baseline"], pairs[f"{column}_trained"], clusters)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, required=True, help="where the clones are")
    parser.add_argument("--env", help="the Kedro environment, as for kedro run")
    parser.add_argument("--steps", nargs="+", default=[], help="VARIANT=STEPS of each variant to train")
    parser.add_argument("--every", type=int, help="steps between evaluations of a training")
    parser.add_argument("--name", help="of the results, where it is not the variant's")
    parser.add_argument("--params", default="", help="further parameters, as for kedro run")
    parser.add_argument("--signal", nargs="+", default=[], help="rollouts, and the variants to compare")
    parser.add_argument("--cost", nargs="+", default=[], help="variants whose CPU seconds of a step are printed")
    return parser.parse_args()


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    clones = {seed: arguments.folder.resolve() / f"seed-{seed}" for seed in arguments.seeds}
    for seed, clone in clones.items():
        if arguments.signal:
            rollouts, *names = arguments.signal
            signal(clone, arguments.env, seed, arguments.params, names, int(rollouts))
        if arguments.cost:
            cost(clone, arguments.env, seed, arguments.params, arguments.cost)
        for variant, steps in (given.split("=") for given in arguments.steps):
            params = ",".join(filter(None, [VARIANTS[variant], f"grpo.steps={steps}", arguments.params]))
            train(clone, arguments.env, seed, arguments.name or variant, params, arguments.every)
    first = next(iter(clones.values())) / RESULTS
    found = sorted(folder.name for folder in first.glob("[!.]*") if folder.name != BASE and AFTER not in folder.name)
    if "default" in found:
        print(table(clones, ["default", *(name for name in found if name != "default")]))


if __name__ == "__main__":
    main()
