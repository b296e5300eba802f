"""The whole project under several seeds, each in a fresh clone, and the README's table of their results.

A clone that holds a result already is not run again, so an interrupted call can be repeated.

    python benchmarks/seeds.py 0 1 2 3 4 --folder /somewhere
    python benchmarks/seeds.py 0 1 2 --folder /elsewhere --params grpo.loss=dapo
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = Path("data/08_reporting/evaluation.json")


def main() -> None:
    arguments = _arguments()
    clones = {seed: arguments.folder.resolve() / f"seed-{seed}" for seed in arguments.seeds}
    for seed, clone in clones.items():
        if not (clone / RESULT).is_file():
            _run(seed, clone, arguments.params)
    print(markdown({seed: json.loads((clone / RESULT).read_text()) for seed, clone in clones.items()}))


def _run(seed: int, clone: Path, params: str) -> None:
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kedro = Path(sys.executable).with_name("kedro")
    started = time.monotonic()
    with (clone / "run.log").open("w") as log:
        command = [str(kedro), "run", f"--params=seed={seed}" + (f",{params}" if params else "")]
        # The clone's own code, not this checkout's, which may change meanwhile.
        environment = os.environ | {"PYTHONPATH": str(clone / "src")}
        subprocess.run(command, cwd=clone, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
    print(f"seed {seed}: {time.monotonic() - started:.0f} s, {clone / 'run.log'}", file=sys.stderr)


def markdown(results: dict[int, dict[str, Any]], split: str = "held_out") -> str:
    """One row a seed and sampler: the optimised total, and the share of images with every attribute right."""
    lines = [
        "| seed | sampler | reward: base | trained | difference [95%] | wins | all right: base | trained | images |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, result in results.items():
        for sampler in ("rollout", "stock"):
            chosen = {
                entry["name"]: entry
                for entry in result["rewards"]
                if (entry["split"], entry["sampler"]) == (split, sampler)
            }
            lines.append(_row(seed, sampler, chosen))
    return "\n".join(lines)


def _row(seed: int, sampler: str, chosen: dict[str, dict[str, Any]]) -> str:
    total, right = chosen["total"], chosen.get("shapes/all")
    cells = [
        str(seed),
        sampler,
        f"{total['baseline_mean']:.3f}",
        f"{total['trained_mean']:.3f}",
        f"{total['difference']:+.3f} [{total['ci_low']:+.3f}, {total['ci_high']:+.3f}]",
        f"{total['win_rate']:.0%}",
        f"{right['baseline_mean']:.2f}" if right else "",
        f"{right['trained_mean']:.2f}" if right else "",
        str(total["images"]),
    ]
    return "| " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, required=True, help="where the clones are made and kept")
    parser.add_argument("--params", default="", help="further parameters, as for kedro run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
