"""What the ranks of the tests compute: jobs that rank 0 runs too."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.grpo.test_trainer import config
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, records
from tests.training.few_steps import parameters
from visual_grpo.common.decisions import GaussianLikelihoods, Likelihoods
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Rollout, Share
from visual_grpo.config import Parameters
from visual_grpo.grpo.distributed import launch, ranks, sharding, silence
from visual_grpo.grpo.distributed.rollouts import RankZeroScorer
from visual_grpo.grpo.losses import LOSSES
from visual_grpo.grpo.signal_check import probe_gradient
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.rows import random_seeds


@dataclass(frozen=True)
class Spec:
    """What `launch` reads of a `RunSpec`."""

    config: Parameters
    model: str = "toy"


@dataclass(frozen=True)
class Job:
    """What all ranks compute: ``compute(spec, **arguments)``."""

    compute: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False


OPTIONS: list[dict[str, Any]] = [
    {"micro_batch_size": 4},
    {"prompts_per_step": 5, "rollout_prompts": 3},
    {"prompts_per_step": 2, "max_refills": 3, "group_size": 2, "loss": "dapo"},
    {"advantage_scale": "batch", "combine": "gdpo"},
    {"old_log_probs": "replay", "micro_batch_size": 5},
    {"target_kl": 0.002, "micro_batch_size": 4},
]


class SeededTokens(ToyTokenPolicy):
    """Each row is a function of its seed, as a real policy's is.

    The table is not zero: where a gradient is exactly 0, AdamW makes steps of what rounding leaves of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table.data = 0.3 * torch.randn(self.table.shape, generator=torch.Generator().manual_seed(8))

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[Tensor]:
        rollout = super().rollout(prompts, group_size, generator, share)
        rows = float(len(rollout.samples))
        return replace(rollout, stats={"entropy": rows, "seconds/tokens": 1.0, "speed/tokens_per_second": 2.0})

    def draw(self, log_probs: Tensor, rows: int, generator: torch.Generator, share: Share | None) -> Tensor:
        own = [torch.Generator().manual_seed(seed) for seed in random_seeds(rows, generator, share)]
        return torch.stack([torch.multinomial(log_probs.exp(), 1, generator=each)[:, 0] for each in own])


class SeededSteps(ToyGaussianPolicy):
    def noise(self, rows: int, generator: torch.Generator, share: Share | None) -> Tensor:
        own = [torch.Generator().manual_seed(seed) for seed in random_seeds(rows, generator, share)]
        return torch.stack([torch.randn(len(self.table), generator=each) for each in own])


class LayeredTokens(SeededTokens):
    """What it learns goes through frozen layers, which are cut where `shards` are active. How often it calls them,
    forward and backward, depends on its rows, as with real prompts: the calls beside the first change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.network = nn.ModuleDict({"layers": self.layers})
        self.network._no_split_modules = ["Linear"]  # type: ignore[assignment]
        given = torch.Generator().manual_seed(2)
        for parameter in self.network.requires_grad_(False).parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=given)
        if sharding.active():
            sharding.shard({"network": self.network}, torch.device("cpu"))

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[Tensor]:
        with self._layered(len(prompts)):
            return super().rollout(prompts, group_size, generator, share)

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[Likelihoods]:
        with self._layered(int(trajectory[rows].sum()) % 3):
            yield from super().replay(trajectory, rows)

    @contextmanager
    def _layered(self, more: int) -> Iterator[None]:
        own, self.table = self.table, self._through_layers() + 0.0 * sum(self._through_layers() for _ in range(more))
        try:
            yield
        finally:
            self.table = own

    def _through_layers(self) -> Any:
        value: Tensor = self.table
        for layer in self.layers:
            value = value + layer(value).tanh()
        return value


KINDS = {kind.__name__: kind for kind in (SeededTokens, SeededSteps, LayeredTokens)}


def trainer(policy: Any, **changes: Any) -> GRPOTrainer[Any]:
    settings = config(**({"steps": 3, "updates_per_rollout": 2, "kl_weight": 0.1} | changes))
    return GRPOTrainer(policy, RankZeroScorer(CountingScorer()), settings, seed=1)


def train_every_way(spec: object, kind: str, losses: Sequence[str]) -> list[tuple[Tensor, list[Any]]]:
    """The table and the metrics after a training with each of ``losses``, and with each of `OPTIONS`.

    For cut layers, a few of the default loss.
    """
    found = []
    for options in OPTIONS[:3] if kind == "LayeredTokens" else [*({"loss": loss} for loss in losses), *OPTIONS]:
        algorithm = LOSSES[options.get("loss", "grpo")]
        steps_apart = kind == "SeededSteps"
        offered = GaussianLikelihoods if steps_apart else Likelihoods
        if not issubclass(offered, algorithm.needs) or (steps_apart and algorithm.whole_rows):
            continue
        policy = KINDS[kind]()
        steps = list(trainer(policy, **options).fit(records(10)))
        found.append((policy.table.detach(), steps))
    return found


def signal_gradient(spec: object) -> Tensor:
    return probe_gradient(trainer(SeededTokens()), records(5), torch.Generator().manual_seed(3))


def fail(spec: object, how: str) -> None:
    """On rank 1 alone."""

    def compute() -> None:
        if ranks.rank() == 1:
            if how == "user":
                raise UserError("the disk is full")
            if how == "memory":
                raise MemoryError("no more")
            raise ZeroDivisionError("a bug")

    if how == "alone" and ranks.rank() == 1:
        raise UserError("only here")
    ranks.all_gather(compute if how != "alone" else lambda: None)


def an_error_that_is_caught(spec: object) -> str:
    """What every rank raises where rank 1 fails, with its notes."""
    try:
        fail(spec, "user")
    except UserError as error:
        return "\n".join([str(error), *error.__notes__])
    raise AssertionError("rank 1 has failed, and nobody was told")


def listening(spec: object) -> dict[int, list[str]]:
    """The addresses, as the kernel writes them, at which the ranks and the process that started them listen."""
    found = ranks.all_gather(lambda: {pid: _listening(pid) for pid in (os.getpid(), os.getppid())})
    return {pid: addresses for own in found for pid, addresses in own.items()}


def _listening(pid: int) -> list[str]:
    open_files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in open_files]


def say_nothing(spec: object, seconds: float) -> None:
    """Rank 1 is silent for longer than the others wait."""
    silence.FIRST = 1.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
    ranks.all_gather(lambda: time.sleep(seconds * ranks.rank()))


def abort(spec: object) -> None:
    """Rank 1 ends as a library in C++ ends it."""
    if ranks.rank() == 1:
        os.write(2, b"terminate called: a broken pipe\n")
        os.abort()
    ranks.all_gather(lambda: None)


def wait(spec: object, victim: int, notes: str) -> None:
    """Rank ``victim`` is killed while the last of the others computes, and any more are in a collective."""
    with open(f"{notes}/{ranks.rank()}", "w") as file:  # noqa: PTH123
        file.write(str(os.getpid()))
    ranks.all_gather(lambda: None)
    if ranks.rank() == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    computes = max({*range(ranks.count())} - {victim})
    ranks.all_gather(lambda: time.sleep(60 if ranks.rank() == computes else 0))


def command(folder: Path, processes: int, jobs: Sequence[Job]) -> Path:
    """A program that runs the jobs as ``kedro run`` runs a pipeline; `results` then has what they give on rank 0.

    Also of those before one that fails.
    """
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    program = folder / "kedro"
    # What only ranks need is not imported by the process that starts them.
    program.write_text(
        "from pathlib import Path\n"
        "from visual_grpo.common.processes import is_rank\n"
        "if not is_rank():\n"
        "    from visual_grpo.grpo.distributed import torchrun\n"
        f"    torchrun.rerun({processes})\n"
        f"from tests.grpo.distributed import toys\ntoys.main(Path({str(folder)!r}))\n"
    )
    return program


def results(folder: Path) -> list[Any]:
    found: list[Any] = torch.load(folder / "results", weights_only=False)
    return found


def main(folder: Path) -> None:
    jobs: Sequence[Job] = pickle.loads((folder / "jobs").read_bytes())

    def run() -> None:
        found = []
        for job in jobs:
            spec = Spec(parameters(folder, distributed={"sharded": job.sharded}))
            with launch.running_ranks(spec, job.compute, **job.arguments):
                found.append(job.compute(spec, **job.arguments))
            torch.save(found, folder / "results")

    launch.run_under_torchrun(run)
