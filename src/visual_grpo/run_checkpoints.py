"""The checkpoints of one training run: when they are written, what is in them, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo import resuming
from visual_grpo.checkpoint_clock import CheckpointClock
from visual_grpo.config import Parameters
from visual_grpo.errors import counted
from visual_grpo.folders import linked, replace_folder
from visual_grpo.grpo import checkpoint
from visual_grpo.grpo.checkpoint_folder import set_later_aside
from visual_grpo.grpo.packing import CannotPackError
from visual_grpo.grpo.trainer import Trainer, nothing
from visual_grpo.stopping import StopRequest


class StoppedWithinStepError(Exception):
    """Leaves the trainer between two updates of a step, after a checkpoint."""


@dataclass(kw_only=True)
class Progress:
    """What a run has to show so far; goes into every checkpoint."""

    history: list[dict[str, float]] = field(default_factory=list)
    """One row of metrics a step."""
    best_score: float = float("-inf")
    """Mean total reward of the best adapter on the eval prompts at the stock sampler."""
    best_step: int = 0
    best_adapter: dict[str, Tensor] = field(default_factory=dict)
    best_suspicion: float = 0.0
    """How far the alarm's worst signal was beyond its limit there; followed only where an alarm rolls back."""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """Step and sentence of each evaluation at which the reward was taken to be cheated."""


class RunCheckpoints:
    """Saves a trainer and its progress, and puts both back to where they were."""

    def __init__(
        self,
        config: Parameters,
        trainer: Trainer,
        progress: Progress,
        *,
        identity: Mapping[str, str],
        run_id: str | None,
        lineage: Mapping[str, str],
    ) -> None:
        """
        Args:
            identity: what the run depends on beside the parameters.
            run_id: its MLflow run.
            lineage: where it comes from.
        """
        self.config, self.trainer, self.progress = config, trainer, progress
        self.identity, self.run_id, self.lineage = identity, run_id, lineage
        self.folder = linked(Path(config.tracking.checkpoints))
        self.clock = CheckpointClock(config.tracking.checkpoint_minutes)
        self.newest: Path | None = None
        """The last one that was written or gone on from."""
        self._notes: list[str] = []
        self._saved_at: tuple[int, int] | None = None

    def completed_steps(self) -> int:
        """Steps that an earlier run has done and this one will not do again."""
        return 0 if self._origin is None else checkpoint.position(self._origin)[0]

    def resume(self, note: Callable[[str], None]) -> bool:
        """Goes on from the checkpoint that ``resume`` names; False where the run starts at step 1."""
        origin = self._origin
        for text in self._notes:
            note(text)
        if origin is None:
            if self.config.resume == resuming.AUTO:
                note(f"No checkpoint in {self.folder}: starting at step 1{_earlier(self.folder)}")
            return False
        self._load(origin)
        within = f" and {counted(self.trainer.updates_done, 'update')} of the next" if self.trainer.updates_done else ""
        note(f"Resuming after step {self.trainer.step}{within} of {self.config.grpo.steps} from {origin}")
        self._take_over(origin, note)
        return True

    def begin(self) -> None:
        """Makes room for a run that starts at step 1; an earlier run's checkpoints go to ``<folder>.previous``."""
        _set_aside(self.folder)
        self._saved_at = self._position()

    def due(self) -> bool:
        """Whether one is to be written after the present step."""
        return self.trainer.step % self.config.tracking.checkpoint_every == 0 or self.clock.due()

    @contextmanager
    def watching_updates(self, stop: StopRequest, note: Callable[[str], None]) -> Iterator[None]:
        """Lets the trainer save, and stop with `StoppedWithinStepError`, between two updates of a step."""
        packable = True

        def between_updates() -> None:
            nonlocal packable
            if not packable or not (stop.by is not None or self.clock.due_within_step()):
                return
            try:
                self.save()
            except CannotPackError as error:
                packable = False
                note(f"Checkpoints are written at the end of steps only: {error}")
                return
            if stop.by is not None:
                raise StoppedWithinStepError

        trainers = (self.trainer, *self.trainer.modules.values())
        for trainer in trainers:
            trainer.between_updates = between_updates
        try:
            yield
        finally:
            for trainer in trainers:  # They would keep each other alive, and with them the model.
                trainer.between_updates = nothing

    def save(self) -> None:
        """Writes everything that a bit-exact continuation needs."""
        with self.clock.saving():
            state, trainer_facts = self.trainer.state()
            tensors = {f"trainer/{name}": value for name, value in state.items()}
            tensors |= {f"best/{name}": value for name, value in self.progress.best_adapter.items()}
            random_tensors, random_facts = checkpoint.random_states()
            tensors |= random_tensors
            facts = {
                "format": resuming.FORMAT,
                "trainer": trainer_facts,
                "random": random_facts,
                "history": self.progress.history,
                "alarms": self.progress.alarms,
                "best_step": self.progress.best_step,
                "best_suspicion": self.progress.best_suspicion,
                "best_score": self.progress.best_score if self.progress.best_step else None,
                "parameters": self.config.public(),
                "identity": dict(self.identity),
                "lineage": dict(self.lineage),
                "public": {"mlflow_run_id": self.run_id},
            }
            step, updates = self._position()
            keep = self.config.tracking.keep_checkpoints
            written = checkpoint.path_of(self.folder, step, updates)
            try:
                checkpoint.save_checkpoint(self.folder, step, tensors, facts, keep=keep, updates=updates)
            finally:  # Ctrl-C may come when it is there, and before its folder is flushed.
                self.newest = written if written.is_dir() else self.newest
        self._saved_at = self._position()

    def save_if_changed(self) -> None:
        """Unless the trainer is where it was at the last one."""
        if self._saved_at != self._position():
            self.save()

    def save_after_error(self, note: Callable[[str], None]) -> None:
        """Saves the steps, and the updates of a step, that were whole before an error ended the training."""
        # Without its row of metrics a step would be missing from the history.
        if len(self.progress.history) != self.trainer.step or not all(
            m.is_whole for m in self.trainer.modules.values()
        ):
            return
        try:
            self.save_if_changed()
        except (OSError, RuntimeError, MemoryError, CannotPackError) as error:
            since = self.newest or "the start"
            note(f"What was done since {since} could not be saved: {error}")

    @cached_property
    def _origin(self) -> Path | None:
        """The intact checkpoint that the run goes on from; None = it starts at step 1."""
        return resuming.find_intact(self.config.resume, self.folder, self._notes.append)

    def _load(self, origin: Path) -> None:
        tensors, facts = checkpoint.load_checkpoint(origin)
        resuming.refuse_changes(origin, facts, self.config)
        resuming.refuse_another_origin(origin, facts, self.identity)
        self.progress.best_adapter = {k[5:]: v for k, v in tensors.items() if k.startswith("best/")}
        self.progress.best_step = facts["best_step"]
        self.progress.best_suspicion = facts.get("best_suspicion", 0.0)  # Nor is this.
        if self.progress.best_step:
            self.progress.best_score = facts["best_score"]
        self.progress.history[:] = facts["history"]
        self.progress.alarms[:] = facts.get("alarms", [])  # Not in checkpoints of older versions.
        own = {k.removeprefix("trainer/"): v for k, v in tensors.items() if k.startswith("trainer/")}
        self.trainer.load_state(own, facts["trainer"])
        checkpoint.restore_random_states(tensors, facts["random"])

    def _take_over(self, origin: Path, note: Callable[[str], None]) -> None:
        """Makes ``origin`` the newest checkpoint of this run's folder."""
        self.newest, self._saved_at = origin, self._position()
        if origin.parent.resolve() == self.folder.resolve():
            set_later_aside(origin, note)
        else:
            _set_aside(self.folder, keep=origin)
            self.save()

    def _position(self) -> tuple[int, int]:
        return self.trainer.step, self.trainer.updates_done


def _earlier(folder: Path) -> str:
    previous = folder.with_name(f"{folder.name}.previous")
    return f" (those of an earlier run go on with resume={previous})" if previous.is_dir() else ""


def _set_aside(folder: Path, keep: Path | None = None) -> None:
    """Keeps earlier checkpoints in ``<folder>.previous`` until the next time; in ``.replaced`` if ``keep`` is there."""
    if not folder.exists():
        return
    previous = folder.with_name(f"{folder.name}.previous")
    if keep is not None and previous.resolve() in keep.resolve().parents:
        previous = folder.with_name(f"{folder.name}.replaced")
    replace_folder(folder, previous)
