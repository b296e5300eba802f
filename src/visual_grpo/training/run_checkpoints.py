"""The checkpoints of one training run: when they are written, what is in them, and how a run is resumed from one."""

from __future__ import annotations

import glob
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.common.files import heal, linked, replace_folder
from visual_grpo.config import Parameters
from visual_grpo.config.schema import Resume
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.two_stage import Trainer
from visual_grpo.training import resuming
from visual_grpo.training.early_stopping import Gains
from visual_grpo.training.ema import AdapterAverage

PICTURES = ("samples-*.png", "film-*.png", "alarm-*.png")
"""Sample grids, columns of the report's film, and what alarms judged: kept with the checkpoints, for a resumed run."""


@dataclass(kw_only=True)
class Progress:
    """Results of a run so far, in every checkpoint."""

    history: list[dict[str, float]] = field(default_factory=list)
    """One row of metrics a step."""
    best_score: float = 0.0
    """Mean total reward of the best adapter on the eval prompts at the eval sampler."""
    best_totals: list[float] = field(default_factory=list)
    """Its total rewards, one for each eval prompt; NaN = unscored."""
    best_step: int = 0
    """0: none was evaluated yet."""
    best_adapter: dict[str, Tensor] = field(default_factory=dict)
    best_suspicion: float = 0.0
    """Distance of the alarm's worst signal beyond its limit there."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Step and sentence of each evaluation at which the reward was taken to be cheated."""
    gains: Gains = field(default_factory=Gains)
    """Followed only with ``train.early_stopping_patience``."""

    def is_best(self, totals: Sequence[float], mean: float) -> bool:
        """Compares an evaluation with the best one by the prompts that both scored; ``totals``: one for each prompt.

        A mean over the prompts that happened to be scored would rise where a difficult one is not. If fewer than half
        are scored in both, the evaluation that scored more counts.
        """
        if not self.best_totals:  # A checkpoint of an earlier version has the mean alone.
            return mean > self.best_score
        pairs = [pair for pair in zip(totals, self.best_totals, strict=True) if not any(map(math.isnan, pair))]
        scored, before = (sum(not math.isnan(total) for total in each) for each in (totals, self.best_totals))
        if 2 * len(pairs) < max(scored, before):
            return scored > before
        now, best = map(math.fsum, zip(*pairs, strict=True))
        return now > best


class RunCheckpoints:
    """Saves a trainer and its progress, and puts both back to where they were; rank 0 alone reads and writes files."""

    def __init__(
        self,
        config: Parameters,
        trainer: Trainer,
        progress: Progress,
        average: AdapterAverage,
        *,
        provenance: Mapping[str, Any],
        run_id: str | None,
        resumed: resuming.ResumedRun | None,
        changes: bytes = b"",
    ) -> None:
        """``provenance``, ``run_id``, of MLflow, and ``changes`` go into each checkpoint; ``resumed`` is the run to
        resume, whose changes stay, as its commit does."""
        self.config, self.trainer, self.progress, self.average = config, trainer, progress, average
        self.provenance, self.run_id, self.resumed = provenance, run_id, resumed
        self.changes = changes if resumed is None else resumed.changes
        self.folder = linked(Path(config.tracking.checkpoints))
        self.newest: Path | None = None
        """The last one that was written or resumed from."""
        self._saved_step: int | None = None
        self._saved_time = time.monotonic()
        self._seconds = 0.0

    def completed_steps(self) -> int:
        """Steps that an earlier run has done and this one will not do again."""
        return 0 if self.resumed is None else checkpoint.step_of(self.resumed.checkpoint)

    def resume(self, note: Callable[[str], None]) -> bool:
        """Loads the checkpoint of the run to resume; False where the training starts at step 1."""
        resumed = self.resumed
        if resumed is None:
            if self.config.resume == Resume.AUTO:
                aside = self.folder.parent.glob(f"{glob.escape(self.folder.name)}.previous*")
                # In the order of their numbers, in which previous-10 is after previous-2.
                named = " or ".join(
                    f"resume={folder}"
                    for folder in sorted(aside, key=lambda folder: (len(folder.name), folder.name))
                    if (found := checkpoint.checkpoints(folder)) and not resuming.is_finished(found[0])
                )
                earlier = f" (an earlier training goes on with {named})" if named else ""
                note(f"No checkpoint in {self.folder}: starting at step 1{earlier}")
            return False
        self._load(resumed, ranks.broadcast(lambda: checkpoint.load_checkpoint(resumed.checkpoint)[0]))
        note(f"Resuming after step {self.trainer.step} of {self.config.grpo.steps} from {resumed.checkpoint}")
        self._take_over(resumed.checkpoint, note)
        return True

    def begin(self, note: Callable[[str], None]) -> None:
        """Makes room for a run that starts at step 1."""
        if ranks.rank() == 0:
            _make_room(self.folder, note)
        self._saved_step = self.trainer.step

    def due(self) -> bool:
        every, minutes = self.config.tracking.checkpoint_every, self.config.tracking.checkpoint_minutes
        return self.trainer.step % every == 0 or 0 < 60 * minutes <= time.monotonic() - self._saved_time

    def take_seconds(self) -> float:
        """Seconds spent on writing checkpoints since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent

    def save(self) -> None:
        """Writes everything that a bit-exact continuation needs."""
        if ranks.rank():
            return
        began = time.monotonic()
        state, trainer_metadata = self.trainer.state()
        tensors = {f"trainer/{name}": value for name, value in state.items()}
        tensors |= {f"ema/{name}": value for name, value in self.average.state().items()}
        tensors |= {f"best/{name}": value for name, value in self.progress.best_adapter.items()}
        random_tensors, random_metadata = checkpoint.random_states()
        metadata = {
            "trainer": trainer_metadata,
            "random": random_metadata,
            "progress": vars(self.progress) | {"best_adapter": None, "gains": vars(self.progress.gains)},
            "provenance": dict(self.provenance),
            "mlflow_run_id": self.run_id,
            "changes": self.changes.decode("latin-1"),  # Bytes in whatever encoding the files have.
        }
        keep = self.config.tracking.keep_checkpoints
        written = checkpoint.path_of(self.folder, self.trainer.step)
        try:
            checkpoint.save_checkpoint(self.folder, self.trainer.step, tensors | random_tensors, metadata, keep=keep)
        finally:  # Ctrl-C may come when it is there, and before its folder is flushed.
            self.newest = written if written.is_dir() else self.newest
        self._saved_step, self._saved_time = self.trainer.step, time.monotonic()
        self._seconds += self._saved_time - began

    def save_if_changed(self) -> None:
        """Saves unless nothing was trained since the last checkpoint."""
        if self._saved_step != self.trainer.step:
            self.save()

    def _load(self, resumed: resuming.ResumedRun, tensors: Mapping[str, Tensor]) -> None:
        metadata = resumed.metadata
        vars(self.progress).update(
            metadata["progress"],
            best_adapter=tensors_under("best", tensors),
            gains=Gains(**metadata["progress"]["gains"]),
        )
        self.trainer.load_state(tensors_under("trainer", tensors), metadata["trainer"])
        self.average.load_state(tensors_under("ema", tensors))
        checkpoint.restore_random_states(tensors, metadata["random"])

    def _take_over(self, resumed: Path, note: Callable[[str], None]) -> None:
        """Makes the checkpoint ``resumed`` the newest of this run's folder."""
        self.newest, self._saved_step = resumed, self.trainer.step
        if ranks.rank():
            return
        here = resumed.parent.resolve() == self.folder.resolve()
        checkpoint.skip_newer(resumed, note, rename=here)
        if not here:
            _make_room(self.folder, note, keep=resumed)
            self.save()


def _make_room(folder: Path, note: Callable[[str], None], keep: Path | None = None) -> None:
    """Moves the checkpoints of an earlier training to ``<folder>.previous``, or ``.previous-2`` and so on.

    Only a finished training's are replaced there, and not those with ``keep``. Without any, a training was killed
    before its first checkpoint, and its pictures go.
    """
    if not checkpoint.holds_any(folder):
        for pattern in (*PICTURES, resuming.FINISHED):
            for file in folder.glob(pattern):
                file.unlink()
        return
    names = itertools.chain(["previous"], (f"previous-{number}" for number in itertools.count(2)))
    aside = next(path for name in names if _is_free(path := folder.with_name(f"{folder.name}.{name}"), keep))
    newest = next(iter(checkpoint.checkpoints(folder)), None)
    is_finished = newest is None or resuming.is_finished(newest)
    replace_folder(folder, aside)
    if newest is not None and not is_finished:
        note(f"The checkpoints of an unfinished training, to {newest.name}, are kept: it goes on with resume={aside}")


def _is_free(aside: Path, keep: Path | None) -> bool:
    """Returns whether ``aside`` may be replaced: it holds nothing, or a finished training, without ``keep``."""
    heal(aside)
    if keep is not None and aside.resolve() in keep.resolve().parents:
        return False
    newest = next(iter(checkpoint.checkpoints(aside)), None)
    return not aside.exists() if newest is None else resuming.is_finished(newest)
