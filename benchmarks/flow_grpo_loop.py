"""Trains the small Stable Diffusion 3 by Flow-GRPO's published loop and by conf/sd3_small, with equal CPU time.

Flow-GRPO (arXiv 2505.05470; yifan123/flow_grpo, config/base.py and config/grpo.py, geneval_sd3): groups of 24, ten
denoising steps, every one but the last trained, each sample from its own start noise, two updates a rollout on one
random half of it each, learning rate 3e-4, clip 1e-4, KL .04. `published` translates them. Both loops are run by
`GRPOTrainer` and `FlowPolicy` on one base with the same LoRA, reward and guidance, in turns and in one process, until
conf/sd3_small's steps are done: a busy machine slows both equally. Then Flow-GRPO's loop is run once more for as many
steps with conf/sd3_small's learning rate and schedule. Evaluation is not counted.

    python benchmarks/flow_grpo_loop.py 0 1 2 --folder /somewhere

Each seed has its clone, /somewhere/seed-SEED, which is made unless it is there; what is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project

from visual_grpo.common import quiet_libraries
from visual_grpo.common.types import PromptRecord, StepMetrics
from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.comparison import join
from visual_grpo.evaluation.paired import paired_difference
from visual_grpo.evaluation.samples import generate_and_score, plan_images, read_scores
from visual_grpo.grpo.metrics import Clock, UpdateMetrics, step_metrics
from visual_grpo.grpo.policy_loss import PolicyLoss
from visual_grpo.grpo.sampling import ScoredRollout
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.run_spec import resolve
from visual_grpo.training import components

ROOT = Path(__file__).parents[1]
BASELINE = Path("data/sd3_small/07_model_output/baseline")
RESULT = Path("results/flow_grpo_loop")
LOOPS = {"ours": "ours", "flow_grpo": "Flow-GRPO's", "flow_grpo_lr": "Flow-GRPO's, our learning rate"}
SHOWN = {"total": "shapes", "part/shapes/all": "all right"}
IMAGES_PER_PROMPT = 4

CLIP, KL, MAX_GRAD_NORM, STEPS = 1e-4, 0.04, 1.0, 10
"""Flow-GRPO's, in its units; the fourth is of denoising."""


class HalvesTrainer(GRPOTrainer):
    """Each update of a rollout sees its own random part of the rows, as gradient accumulation over half an epoch."""

    def update(
        self, informative: Sequence[ScoredRollout[Any]], scored: Sequence[ScoredRollout[Any]], clock: Clock
    ) -> StepMetrics:
        config, batches, updates = self.config, self.build_batches(informative), list[UpdateMetrics]()
        for number in range(config.updates_per_rollout):
            parts = []
            for batch in batches:
                shuffled = torch.randperm(len(batch.rows), generator=torch.Generator().manual_seed(self.step))
                parts.append(replace(batch, rows=batch.rows[shuffled.chunk(config.updates_per_rollout)[number]]))
            stats, policy_loss = UpdateMetrics(), PolicyLoss(config, parts)
            with clock.timed("update"):
                with self.optimizer.gradient_sums():
                    for batch, rows, decisions in self.replay(parts):
                        loss, metrics, counted = policy_loss(decisions, batch, rows)
                        stats.record(loss, metrics, counted)
                        self.optimizer.backward(loss)
                done = self.step * config.updates_per_rollout + number
                stats.grad_norm, stats.learning_rate = self.optimizer.step(done, self.step + 1, [])
                self.optimizer.zero_grad()
            updates.append(stats)
        self.step += 1
        drawn = [(part.rollout, part.scores) for part in scored]
        return step_metrics(self.step, drawn, batches, updates, clock, config, replays=False)


def published(config: Parameters, elements: int, step_length: float) -> Parameters:
    """Flow-GRPO's settings in our units.

    Our log-prob is the sum over a latent's D elements divided by sqrt(D), its the mean: ours, and with it the policy's
    gradient, is sqrt(D) times as much. So are clip and largest gradient norm, and the weight of a KL that is a mean in
    both; its KL leaves the step's length |dt| out of the variance, which the weight has to bring in.

    Args:
        elements: D.
        step_length: mean |dt| of the trained steps.
    """
    root = math.sqrt(elements)
    flow = config.policy.flow.model_copy(update={"noise": 0.7, "window_start": 0, "window_steps": None})
    algorithm = {
        "prompts_per_step": 3,  # 72 samples a rollout, where conf/sd3_small has 64
        "group_size": 24,
        "updates_per_rollout": 2,
        "learning_rate": 3e-4,
        "schedule": "constant",
        "betas": (0.9, 0.999),
        "weight_decay": 1e-4,
        "max_grad_norm": MAX_GRAD_NORM * root,
        "clip_low": CLIP * root,
        "clip_high": CLIP * root,
        "kl_weight": KL * root * step_length,
        "advantage_scale": "batch",
        "advantage_epsilon": 1e-4,
        "steps": 10_000,  # until the time is spent
    }
    rollout = config.sampling.rollout.model_copy(update={"steps": STEPS})
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"flow": flow, "share_start_noise": False}),
            "sampling": config.sampling.model_copy(update={"rollout": rollout}),
            "grpo": config.grpo.model_copy(update=algorithm),
        }
    )


class Loop:
    """One training, of which only the CPU seconds of its steps count."""

    def __init__(self, config: Parameters, *, halves: bool) -> None:
        spec = resolve(config)
        self.scorer = components.build_scorer(spec)
        self.model: Any = components.build_model(spec)
        trainer = components.build_trainer(spec, self.model, self.scorer)
        (module,) = trainer.modules
        self.trainer: GRPOTrainer = trainer.modules[module]
        if halves:
            parts = (self.trainer.policy, self.trainer.scorer, self.trainer.config)
            self.trainer = HalvesTrainer(*parts, seed=config.seed, module=module)
        self.spent = 0.0
        self.history: list[dict[str, float]] = []
        self._steps: Iterator[StepMetrics] = iter(())

    @property
    def done(self) -> bool:
        return self.trainer.step >= self.trainer.config.steps

    def step(self, prompts: Sequence[PromptRecord]) -> None:
        if not self.history:
            self._steps = self.trainer.fit(prompts)
        started = time.process_time()
        metrics = next(self._steps)
        self.spent += time.process_time() - started
        self.history.append({"step": metrics.step, "spent": self.spent, **metrics.values})

    def keep(self, folder: Path, config: Parameters, records: RecordTable) -> None:
        """Evaluates, and writes everything that the tables need; renamed at the end, so that a folder is complete."""
        fresh = folder.with_name(f".{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        self.model.adapters.save(fresh / "adapters")
        pd.DataFrame(self.history).to_csv(fresh / "training.csv", index=False)
        changes = {"seed": config.seed, "images_per_prompt": IMAGES_PER_PROMPT, "max_prompts": None}
        settings = config.evaluation.model_copy(update=changes)
        asked = plan_images({"held_out": records.split("held_out")}, settings, {"eval": config.sampling.eval})
        size = config.evaluation.batch_size
        generate_and_score(self.model, self.scorer, asked, fresh, batch_size=size)
        facts = {
            "steps": self.trainer.step,
            "updates": self.trainer.step * self.trainer.config.updates_per_rollout,
            "samples": int(sum(row["samples"] for row in self.history)),
            "cpu": self.spent,
            "grpo": self.trainer.config.model_dump(mode="json"),
        }
        (fresh / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        fresh.rename(folder)


def train(clone: Path, seed: int) -> None:
    """All loops of one seed, into the clone's ``RESULT``."""
    config, records = _project(clone, seed)
    missing = [name for name in LOOPS if not (RESULT / name).exists()]
    prompts = records.split("train")
    if {"ours", "flow_grpo"} & set(missing):
        ours, theirs = Loop(config, halves=False), Loop(translated(config), halves=True)
        while not ours.done:
            ours.step(prompts)
            while theirs.spent < ours.spent:
                theirs.step(prompts)
            _show(seed, {"ours": ours, "flow_grpo": theirs})
        ours.keep(RESULT / "ours", config, records)
        theirs.keep(RESULT / "flow_grpo", config, records)
    if "flow_grpo_lr" in missing:
        steps = json.loads((RESULT / "flow_grpo" / "facts.json").read_text())["steps"]
        own = config.grpo
        changes = {"steps": steps, "learning_rate": own.learning_rate, "schedule": own.schedule}
        other = translated(config)
        loop = Loop(other.model_copy(update={"grpo": other.grpo.model_copy(update=changes)}), halves=True)
        while not loop.done:
            loop.step(prompts)
            _show(seed, {"flow_grpo_lr": loop})
        loop.keep(RESULT / "flow_grpo_lr", config, records)


def translated(config: Parameters) -> Parameters:
    """`published` for the model of ``config``."""
    policy = Loop(config, halves=False).trainer.policy
    assert isinstance(policy, FlowPolicy)
    sigmas = policy.model.schedule(STEPS).sigmas
    trained = STEPS - 1
    return published(config, math.prod(policy.model.latent_shape), (sigmas[0] - sigmas[trained]) / trained)


def tables(clones: dict[int, Path]) -> str:
    """Every completed loop against the base, and ours against Flow-GRPO's, paired by prompt and image seed."""
    folders = {(seed, name): clone / RESULT / name for seed, clone in clones.items() for name in LOOPS}
    folders |= {(seed, "base"): clone / BASELINE for seed, clone in clones.items()}
    scores = {key: _scores(folder) for key, folder in folders.items() if folder.exists()}
    lines = [
        "| seed | loop | steps | updates | samples | CPU s | shapes: base | trained | difference [95%]"
        " | all right: base | trained | difference [95%] |",
        "|" + "---|" * 12,
    ]
    for name, shown in LOOPS.items():
        for seed in (seed for seed in clones if (seed, name) in scores):
            facts = json.loads((folders[seed, name] / "facts.json").read_text())
            cells = [str(seed), shown, *(str(facts[key]) for key in ("steps", "updates", "samples"))]
            cells += [f"{facts['cpu']:.0f}", *_compared(scores, [seed], "base", name)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| seed | ours against | shapes: theirs | ours | difference [95%] | all right: theirs | ours"
        " | difference [95%] |",
        "|" + "---|" * 8,
    ]
    for name in [name for name in LOOPS if name != "ours"]:
        done = [seed for seed in clones if {(seed, name), (seed, "ours")} <= scores.keys()]
        for seeds in [[seed] for seed in done] + [done] * (len(done) > 1):
            label = ", ".join(map(str, seeds))
            lines.append(f"| {' | '.join([label, LOOPS[name], *_compared(scores, seeds, name, 'ours')])} |")
    return "\n".join(lines)


def _compared(scores: dict[tuple[int, str], pd.DataFrame], seeds: Sequence[int], before: str, after: str) -> list[str]:
    """Means and difference of each shown score; several seeds are pooled, each with its own prompts."""
    pairs = pd.concat([join(scores[seed, before], scores[seed, after]).assign(base=seed) for seed in seeds])
    clusters = [f"{base}/{unit}" for base, unit in zip(pairs["base"], pairs["unit"], strict=True)]
    cells = []
    for column in SHOWN:
        one, two = pairs[f"{column}_baseline"], pairs[f"{column}_trained"]
        found = paired_difference(one, two, clusters)
        cells += [f"{found.baseline:.3f}", f"{found.trained:.3f}"]
        cells += [f"{found.difference:+.3f} [{found.ci_low:+.3f}, {found.ci_high:+.3f}]"]
    return cells


def _scores(folder: Path) -> pd.DataFrame:
    """The held-out samples of the eval sampler."""
    scores = read_scores(folder)
    chosen = (scores["sampler"] == "eval") & (scores["split"] == "held_out") & (scores["index"] < IMAGES_PER_PROMPT)
    kept = scores[chosen]
    kept.attrs = scores.attrs
    return kept


def _prepare(clone: Path, seed: int) -> None:
    """Clone, base model, records and baseline."""
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    if not (clone / BASELINE).exists():
        kedro = Path(sys.executable).with_name("kedro")
        pipelines = "--pipelines=starter,data_preparation,baseline"
        command = [str(kedro), "run", "--env=sd3_small", pipelines, f"--params=seed={seed}"]
        environment = os.environ | {"PYTHONPATH": str(clone / "src")}
        subprocess.run(command, cwd=clone, env=environment, check=True)


def _project(clone: Path, seed: int) -> tuple[Parameters, RecordTable]:
    os.chdir(clone)
    bootstrap_project(clone)
    with KedroSession.create(clone, env="sd3_small", runtime_params={"seed": seed}) as session:
        context = session.load_context()  # type: ignore[attr-defined]  # the abstract session lacks it
        return Parameters.model_validate(context.config_loader["parameters"]), context.catalog.load("records")


def _show(seed: int, loops: dict[str, Loop]) -> None:
    """One line on stderr."""
    parts = [
        f"{name} step {loop.trainer.step} reward {loop.history[-1]['reward/total']:.3f} {loop.spent:.0f} CPU s"
        for name, loop in loops.items()
    ]
    print(f"seed {seed}: {'; '.join(parts)}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, required=True, help="where the clones are made and kept")
    parser.add_argument("--tables", action="store_true", help="only print the tables of what is done")
    return parser.parse_args()


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    clones = {seed: arguments.folder.resolve() / f"seed-{seed}" for seed in arguments.seeds}
    for seed, clone in () if arguments.tables else clones.items():
        _prepare(clone, seed)
        train(clone, seed)
    print(tables(clones))


if __name__ == "__main__":
    main()
