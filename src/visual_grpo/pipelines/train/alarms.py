"""What a training is compared with while it runs, and what an alarm leaves: a line, a tag, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.config import Parameters

if TYPE_CHECKING:
    from PIL.Image import Image

    from visual_grpo.evaluation.alarm import Watch
    from visual_grpo.tracking import Tracker
    from visual_grpo.tracking.others import Log
    from visual_grpo.training import Shown, TrainingRun
    from visual_grpo.types import Judge

_PICTURES = 8
_AFTER = {
    "warn": "Look at the pictures (MLflow: alarm). alarm.action=stop or rollback would end the training.",
    "stop": "The training ends here.",
    "rollback": "The training ends here, with the best adapter of the evaluations before.",
}


def make_watch(config: Parameters, baseline: Path) -> Watch:
    """What the evaluations of a training are compared with."""
    from visual_grpo.evaluation.alarm import Watch

    every = config.evaluation.every or config.grpo.steps
    return Watch(baseline, config.alarm, looks=-(-config.grpo.steps // every))


def tell_alarm(
    run: TrainingRun,
    judge: Judge,
    tracker: Tracker,
    others: Sequence[Log],
    note: Callable[[str], None],
    step: int,
    sentence: str,
    shown: Shown,
) -> None:
    """Tells that the reward is taken to be cheated, and shows by what."""
    from visual_grpo.evaluation.alarms_shown import picture_of

    picture = _picture(run, judge, shown)
    run.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    picture.save(run.checkpoints.folder / picture_of(step))
    logs: list[Log] = [tracker, *others]
    for log in logs:
        log.image(picture, "alarm", step)
    tracker.tags({"alarm": f"step {step}: {sentence}"})
    note(f"Alarm at step {step}: {sentence}. Is the reward cheated? {_AFTER[run.config.alarm.action]}")


def _picture(run: TrainingRun, judge: Judge, shown: Shown) -> Image:
    """The base model's pictures of the first eval prompts, and what they have become."""
    from visual_grpo.evaluation.pictures import caption, grid, of_sample
    from visual_grpo.images import read_image

    assert run.watch is not None
    pairs = [(row, file) for row, file in enumerate(run.watch.files(shown.records)) if file is not None][:_PICTURES]
    before = [read_image(file) for _, file in pairs]
    after = [of_sample(shown.records[row], shown.samples[row], judge) for row, _ in pairs]
    named = [f"{caption(shown.records[row].prompt, shown.records[row].id)}\nbase model" for row, _ in pairs]
    now = [f"now, reward {float(shown.total[row]):z.2f}" for row, _ in pairs]
    return grid([*before, *after], [*named, *now], columns=len(pairs))
