"""Runs the pipelines with several seeds, each in a separate clone, and prints tables of the results.

A clone pretrains and generates its baseline once; then every choice of modules (policy.train) is trained and evaluated
on it. Completed parts are not run again, so that an interrupted call can be repeated.

    python benchmarks/seeds.py 0 1 2 --folder /somewhere
    python benchmarks/seeds.py 0 1 2 --folder /somewhere --train all ar@180 dit    # ar with 180 steps
    python benchmarks/seeds.py 0 1 2 --folder /elsewhere --params data.task=i2i --jobs 2
    python benchmarks/seeds.py 0 1 2 --folder /third --env negative_points    # its only module: vl
    python benchmarks/seeds.py 0 1 2 --folder /fourth --env sd3_small    # its only module: dit
    python benchmarks/seeds.py 0 1 2 --folder /fifth --env text    # with the workers that are installed here as judges
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo.common import quiet_libraries
from visual_grpo.config.validation import validate
from visual_grpo.evaluation.comparison import compare
from visual_grpo.evaluation.samples import read_scores
from visual_grpo.models.run_spec import resolve
from visual_grpo.rewards.remote.local_worker import ENVIRONMENTS
from visual_grpo.starter.world_defaults import with_world

ROOT = Path(__file__).parents[1]
BEFORE = ("starter", "data_preparation", "baseline")
AFTER = ("train", "evaluate")


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    clones = {seed: arguments.folder.resolve() / f"seed-{seed}" for seed in arguments.seeds}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda seed: _seed(seed, clones[seed], arguments), arguments.seeds))
    for choice in arguments.train:
        if modules(clones, choice) == ["vl"]:
            print(masks(clones, choice))
    pictures = [choice for choice in arguments.train if modules(clones, choice) != ["vl"]]
    if pictures:
        print(markdown(clones, pictures))
        print(f"\nAgainst the base model at its best other setting, held-out prompts\n\n{controls(clones, pictures)}")
        if rows := judges(clones, pictures):
            print(f"\nBy what was optimised and by judges, held-out prompts\n\n{rows}")
    for other in pictures:
        if other.startswith("ar") and "all" in pictures:
            print(f"\n{trained(clones, 'all')} minus {trained(clones, other)}, held-out prompts\n")
            print(difference(clones, other, "all"))


def _seed(seed: int, clone: Path, arguments: argparse.Namespace) -> None:
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (clone / ENVIRONMENTS).symlink_to(ROOT / ENVIRONMENTS)
    shared = f"output=data,seed={seed}" + (f",{arguments.params}" if arguments.params else "")
    for pipeline in BEFORE:
        if not (clone / f"{pipeline}.done").exists():
            _kedro(clone, pipeline, shared, arguments.env)
            (clone / f"{pipeline}.done").touch()
    for choice in arguments.train:
        name, _, steps = choice.partition("@")
        params = f"{shared},policy.train={name}" + (f",grpo.steps={steps}" if steps else "")
        result = clone / "results" / choice
        if not result.exists():
            for pipeline in AFTER:
                _kedro(clone, pipeline, params, arguments.env)
            _keep(clone / "data", result)


def _kedro(clone: Path, pipeline: str, params: str, env: str | None) -> None:
    kedro = Path(sys.executable).with_name("kedro")
    command = [str(kedro), "run", f"--pipeline={pipeline}", f"--params={params}", *([f"--env={env}"] if env else [])]
    # The code of the clone, because this checkout may change in the meantime.
    environment = os.environ | {"PYTHONPATH": str(clone / "src")}
    with (clone / "run.log").open("a") as log:
        print(f"$ {' '.join(command[1:])}", file=log, flush=True)
        subprocess.run(command, cwd=clone, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)


def _keep(data: Path, result: Path) -> None:
    """Keeps the files that the tables need; renamed at the end, so that an existing folder is complete."""
    fresh = result.with_name(f".{result.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(data / "06_models" / "adapters", fresh / "adapters")
    shutil.copytree(data / "07_model_output" / "trained", fresh / "trained")
    for report in ("evaluation.json", "training.csv"):
        shutil.copy(data / "08_reporting" / report, fresh / report)
    fresh.rename(result)


def modules(clones: dict[int, Path], choice: str) -> list[str]:
    """What ``policy.train=choice`` trained."""
    clone = next(iter(clones.values()))
    return sorted(folder.name for folder in (clone / "results" / choice / "adapters" / "best").iterdir())


def trained(clones: dict[int, Path], choice: str) -> str:
    """The modules as the tables show them, with the number of steps where the choice names one."""
    _, at, steps = choice.partition("@")
    return " + ".join(modules(clones, choice)) + at + steps


def markdown(clones: dict[int, Path], choices: list[str], split: str = "held_out") -> str:
    """One row per choice of modules, seed and sampler: the optimised total, and the share of images with everything
    correct."""
    lines = [
        "| trained | seed | sampler | reward: base | trained | difference [95%] | all right: base | trained"
        " | train CPU s | samples |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for choice in choices:
        for seed, clone in clones.items():
            folder = clone / "results" / choice
            result = json.loads((folder / "evaluation.json").read_text())
            cpu = pd.read_csv(folder / "training.csv")["seconds/cpu"].sum()
            for sampler in ("sde" if modules(clones, choice) == ["dit"] else "rollout", "eval"):
                chosen = {
                    entry["name"]: entry
                    for entry in result["rewards"]
                    if (entry["split"], entry["sampler"]) == (split, sampler)
                }
                if not chosen:  # nft trains on samples of ODE steps: there is no other sampler to show.
                    continue
                cells = [
                    trained(clones, choice),
                    str(seed),
                    sampler,
                    *_cells(chosen),
                    f"{cpu:.0f}",
                    str(result["training"]["samples"]),
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def controls(clones: dict[int, Path], choices: list[str]) -> str:
    """One row per choice and seed: what the base model's settings give by themselves, and the samples that could not be
    scored."""
    lines = [
        "| trained | seed | base's best setting | its reward | trained | difference [95%] | unscored: base, trained |",
        "|---|---|---|---|---|---|---|",
    ]
    for choice in choices:
        for seed, clone in clones.items():
            found = json.loads((clone / "results" / choice / "evaluation.json").read_text())["headline"]
            best = found["control"]
            if best is None:  # evaluation.controls is empty.
                continue
            means = f"{best['baseline']:.3f} | {best['trained']:.3f} | {_interval(best)}"
            unscored = f"{found['unscored_baseline']} / {found['unscored_trained']} of {found['samples']}"
            lines.append(f"| {trained(clones, choice)} | {seed} | {best['sampler']} | {means} | {unscored} |")
    return "\n".join(lines)


def judges(clones: dict[int, Path], choices: list[str]) -> str:
    """One row per choice, seed and score of a judge, or of the reward that is judged: the mean, and the task's measure
    (``/accuracy``); beside the base model and beside its setting that is best by this score. Empty without judges."""
    lines = []
    for choice in choices:
        for seed, clone in clones.items():
            result = json.loads((clone / "results" / choice / "evaluation.json").read_text())
            opinions = result["headline"]["judges"]
            names = dict.fromkeys([*(judge["judge_of"] for judge in opinions), *(judge["name"] for judge in opinions)])
            beside = {
                entry["name"]: entry
                for entry in result["rewards"]
                if (entry["split"], entry["sampler"]) == ("held_out", "eval")
            }
            for name in (f"{name}{part}" for name in names for part in ("", "/accuracy")):
                if name not in beside:
                    continue
                entry = beside[name]
                settings = [found for found in result["controls"] if found["name"] == name]
                best = max(settings, key=lambda found: found["baseline"], default=None)
                control = "|" if best is None else f"{best['baseline']:.3f} | {_interval(best)}"
                means = f"{entry['baseline']:.3f} | {entry['trained']:.3f} | {_interval(entry)}"
                lines.append(f"| {trained(clones, choice)} | {seed} | {name} | {means} | {control} |")
    heads = "trained | seed | score | base | trained | difference [95%] | base's best setting | over it [95%]"
    return "\n".join([f"| {heads} |", "|---" * 8 + "|", *lines]) if lines else ""


def masks(clones: dict[int, Path], choice: str, split: str = "held_out") -> str:
    """One row per seed and sampler for negative points: gIoU, cIoU and contrast before and after, with intervals."""
    scores = ("gIoU", "cIoU", "contrast")
    heads = [head for name in scores for head in (f"{name}: base", "trained", "difference [95%]")]
    columns = ["seed", "sampler", *heads, "train CPU s", "samples"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for seed, clone in clones.items():
        folder = clone / "results" / choice
        result = json.loads((folder / "evaluation.json").read_text())
        cpu = pd.read_csv(folder / "training.csv")["seconds/cpu"].sum()
        for sampler in ("rollout", "eval"):
            chosen = {
                entry["name"].rpartition("/")[2]: entry
                for entry in result["rewards"]
                if (entry["split"], entry["sampler"]) == (split, sampler)
            }
            cells = [cell for name in scores for cell in _cells({"total": chosen[name]})[:3]]
            lines.append(f"| {seed} | {sampler} | {' | '.join(cells)} | {cpu:.0f} | {result['training']['samples']} |")
    return "\n".join(lines)


def difference(clones: dict[int, Path], before: str, after: str) -> str:
    """Paired difference of two trained policies on the same prompts and image seeds, with the eval sampler."""
    lines = ["| seed | all right: first | second | difference [95%] |", "|---|---|---|---|"]
    for seed, clone in clones.items():
        one, two = (read_scores(clone / "results" / name / "trained") for name in (before, after))
        for entry in compare(one, two, bootstrap_samples=5000, seed=seed):
            if (entry["split"], entry["sampler"]) == ("held_out", "eval") and entry["name"].endswith("/all"):
                means = f"{entry['baseline']:.3f} | {entry['trained']:.3f}"
                lines.append(f"| {seed} | {means} | {_interval(entry)} |")
    return "\n".join(lines)


def _cells(chosen: dict[str, dict[str, Any]]) -> list[str]:
    total = chosen["total"]
    right = next((entry for name, entry in chosen.items() if name.endswith(("/all", "/accuracy"))), None)
    return [
        f"{total['baseline']:.3f}",
        f"{total['trained']:.3f}",
        _interval(total),
        f"{right['baseline']:.2f}" if right else "",
        f"{right['trained']:.2f}" if right else "",
    ]


def _interval(entry: dict[str, Any]) -> str:
    return f"{entry['difference']:+.3f} [{entry['ci_low']:+.3f}, {entry['ci_high']:+.3f}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, required=True, help="where the clones are made and kept")
    parser.add_argument(
        "--train",
        nargs="+",
        help="choices of policy.train, with @STEPS for other steps; default: each module, and all of several",
    )
    parser.add_argument("--params", default="", help="further parameters, as for kedro run")
    parser.add_argument("--env", help="the Kedro environment, as for kedro run")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    arguments = parser.parse_args()
    arguments.train = arguments.train or _choices(arguments.env)
    return arguments


def _choices(env: str | None) -> list[str]:
    from kedro.config import OmegaConfigLoader

    from visual_grpo.settings import CONFIG_LOADER_ARGS

    loader = OmegaConfigLoader(str(ROOT / "conf"), env=env or "local", **CONFIG_LOADER_ARGS)
    names = list(resolve(validate(with_world(loader["parameters"], env))).family.modules)
    return [*names, "all"] if len(names) > 1 else names


if __name__ == "__main__":
    main()
