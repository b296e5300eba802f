"""Seconds of a training step with one process and with more, on this machine: whole commands, in turns.

    python benchmarks/processes.py FOLDER --processes 1 2 --rounds 3
    python benchmarks/processes.py FOLDER --env negative_points --processes 1 --busy 2
    GOMP_SPINCOUNT=300000 python benchmarks/processes.py FOLDER --env negative_points --processes 1 --busy 2

FOLDER is a checkout in which `kedro run --pipelines=starter,data_preparation,baseline` is done. The second line trains
beside two processes that keep a core busy each, the third as well, with libgomp's own count of spins. Each round trains
`--steps` steps with every number of processes; what counts is the wall time of a step from the second one on, as
training.csv has it: no start of a process, no evaluation, no signal check.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

GIVEN = "policy.signal_check.rollouts=0,evaluation.every=0,tracking.images_every=0,resume=never"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps ``count`` cores busy in the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def train(folder: Path, env: str | None, processes: int, steps: int, more: str) -> list[float]:
    """Seconds of each step but the first."""
    params = f"{GIVEN},grpo.steps={steps},distributed.processes={processes}{',' if more else ''}{more}"
    command = [sys.executable, "-m", "kedro", "run", "--pipeline=train", f"--params={params}"]
    command += [f"--env={env}"] if env else []
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    history = folder / "data" / (env or "") / "08_reporting/training.csv"
    return [float(value) for value in pd.read_csv(history)["seconds/step"][1:]]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", help="the Kedro environment, as for kedro run")
    parser.add_argument("--busy", type=int, default=0, help="other processes that keep a core busy each")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--params", default="", help="more parameters, such as policy.train=dit")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    found: dict[int, list[float]] = {count: [] for count in arguments.processes}
    for number in range(arguments.rounds):
        for count in arguments.processes:
            with busy_processes(arguments.busy):
                seconds = train(arguments.folder, arguments.env, count, arguments.steps, arguments.params)
            found[count] += seconds
            print(f"round {number + 1}, {count} processes: {statistics.median(seconds):.2f} s a step", flush=True)
    medians = {count: statistics.median(seconds) for count, seconds in found.items()}
    first = medians[arguments.processes[0]]
    for count, median in medians.items():
        print(f"{count} processes: {median:.2f} s a step, {median / first:.2f} of {arguments.processes[0]}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(medians, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
