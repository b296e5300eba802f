"""What a training run does around its steps, with a model that takes no time: evaluation, adapters, signal check."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.toys import CountingScorer, ToyTokenPolicy
from tests.training.few_steps import RECORDS, STEPS, parameters
from tests.training.test_run import execute, ignore
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Needs, Scores, StepMetrics
from visual_grpo.config import SignalCheckConfig
from visual_grpo.evaluation.alarm import HackingMonitor
from visual_grpo.evaluation.samples import image_seed, requests
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.families.sd3 import Sd3Options
from visual_grpo.models.family import NoOptions, find_family
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training.likely_mistakes import can_be_raised
from visual_grpo.training.resuming import resumed_run
from visual_grpo.training.run import Callbacks, TrainingRun


class TokenModel(ToyTokenPolicy):
    """A model of one table, which is its own adapters; reads four words of a prompt."""

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        return len(prompt.split()), 4

    @property
    def adapters(self) -> TokenModel:
        return self

    def generate(self, records: Any, seeds: Any, sampler: Any) -> list[torch.Tensor]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return [self.rollout([r], 1, g).samples[0] for r, g in zip(records, generators, strict=True)]

    def state(self) -> dict[str, torch.Tensor]:
        return self.adapter_state_dict()

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.load_adapter_state_dict(state)

    def save(self, folder: Path) -> None:
        (folder / "vl").mkdir(parents=True)
        torch.save(self.adapter_state_dict(), folder / "vl" / "table.pt")


def token_run(
    tmp_path: Path, model: Any, scorer: Any, advice: dict[str, str] | None = None, **changes: Any
) -> TrainingRun:
    """A run of a model that takes no time."""
    config, family = parameters(tmp_path, **changes), find_family("qwen2_5_vl")
    module = replace(family.modules["vl"], advice=(advice or {}).get("vl", ""))
    spec = RunSpec(
        config=config,
        family=replace(family, modules={"vl": module}),
        modules=("vl",),
        joint=False,
        rollout=config.sampling.rollout,
        samplers={},
        controls={},
        options=None,
    )
    return TrainingRun(
        spec,
        model,
        scorer,
        GRPOTrainer(model, scorer, config.grpo, module="vl"),
        data={"train": RECORDS[:6], "eval": RECORDS[6:]},
        provenance={"parameters": config.public()},
        run_id="run",
        resumed=resumed_run(config),
    )


def saved(folder: Path) -> torch.Tensor:
    """The table that a run has written."""
    table: torch.Tensor = torch.load(folder / "vl" / "table.pt")["table"]
    return table


def keeping_tables(model: Any) -> tuple[dict[int, torch.Tensor], Callable[..., None]]:
    """The table after each step, and the callback that fills it."""
    tables: dict[int, torch.Tensor] = {}

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        tables[metrics.step] = model.state()["table"]

    return tables, on_step


class Watched(TokenModel):
    """Keeps with which sampler, seeds and weights it was asked to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[int], Any]] = []
        self.weights: list[torch.Tensor] = []

    def generate(self, records: Any, seeds: Any, sampler: Any) -> list[torch.Tensor]:
        self.asked.append((list(seeds), sampler))
        self.weights.append(self.table.detach().clone())
        return super().generate(records, seeds, sampler)


class PartlyScored(CountingScorer):
    """One sample of three cannot be scored, the others are 1 and 3."""

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        return replace(scores, total=torch.tensor([torch.nan, 1.0, 3.0])) if len(samples) == 3 else scores


def test_the_evaluation_in_a_run_draws_with_the_eval_sampler_and_leaves_the_unscored_out(tmp_path: Path) -> None:
    model = Watched()
    run = token_run(tmp_path, model, PartlyScored(), evaluation={"prompts": 3, "seed": 7})
    assert run.evaluate().mean == 2.0
    seeds = [image_seed(7, record.id, 0) for record in RECORDS[6:]]
    assert model.asked == [(seeds, run.config.sampling.eval)]
    assert run.config.sampling.eval != run.config.sampling.rollout


class Apart:
    """How far a sample is from the others of its prompt; unscored without others."""

    needs = Needs(whole_groups=True)

    def __call__(self, prompts: Any, samples: Any) -> list[float]:
        means, ids = torch.stack(samples).double().mean(1), [record.id for record in prompts]
        groups = [means[[other == own for other in ids]] for own in ids]
        return [float((group - mean).abs().sum() / (len(group) - 1)) for group, mean in zip(groups, means, strict=True)]


@pytest.mark.parametrize("batch_size", [2, 7])
def test_the_evaluation_in_a_run_has_the_baselines_samples_where_a_reward_compares_them(
    tmp_path: Path, batch_size: int
) -> None:
    model, scorer = TokenModel(), RewardSet({"apart": (Apart(), 1.0), "guard": (Apart(), 0.0)})
    evaluation = {"prompts": 3, "images_per_prompt": 3, "seed": 7, "batch_size": batch_size}
    shown = token_run(tmp_path, model, scorer, evaluation=evaluation).evaluate()
    asked = requests(RECORDS[6:], 3, 7)
    records = [one.record for one in asked]
    samples = model.generate(records, [one.seed for one in asked], None)
    baseline = scorer(records, samples)
    assert not baseline.total.isnan().any()
    assert torch.equal(torch.stack(list(shown.samples)), torch.stack(samples[::3]))
    for now, before in [(shown.total, baseline.total), (shown.rewards["guard"], baseline.rewards["guard"])]:
        assert torch.equal(now, before[::3])


@pytest.mark.parametrize(
    ("prompts", "grpo", "refused"),
    [(1, {}, True), (2, {}, False), (1, {"rollout_prompts": 1}, False), (1, {"prompts_per_step": 1}, False)],
)
def test_a_reward_that_compares_samples_is_given_no_two_groups_of_one_prompt(
    tmp_path: Path, prompts: int, grpo: dict[str, Any], refused: bool
) -> None:
    scorer = RewardSet(
        {"length": (lambda prompts, samples: [float(s.sum()) for s in samples], 1.0), "apart": (Apart(), 0.0)}
    )
    evaluation = {"prompts": 2, "images_per_prompt": 2}
    run = token_run(tmp_path, TokenModel(), scorer, grpo={"steps": 1, **grpo}, evaluation=evaluation)
    run.train_prompts = RECORDS[:prompts]
    said = "the 2 groups that a rollout has of the only training prompt for one. Set grpo.rollout_prompts=1"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        execute(run, tmp_path / "out")
    assert run.trainer.step == (not refused)


class Falling(CountingScorer):
    """Every evaluation (of two samples) is worse than the one before."""

    evaluations = 0

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        if len(samples) != 2:
            return scores
        self.evaluations += 1
        return replace(scores, total=torch.full((2,), -float(self.evaluations)))


@pytest.mark.parametrize("adapter", ["best", "last"])
def test_the_parameter_says_which_adapter_evaluate_will_find(tmp_path: Path, adapter: str) -> None:
    model = TokenModel()
    run = token_run(tmp_path, model, Falling(), evaluation={"adapter": adapter})
    tables, on_step = keeping_tables(model)
    execute(run, tmp_path / "out", on_step)
    found = {folder: saved(tmp_path / "out" / folder) for folder in ("", "best", "last")}
    assert torch.equal(found["best"], tables[2])
    assert torch.equal(found["last"], tables[STEPS])
    assert not torch.equal(tables[2], tables[STEPS])
    assert torch.equal(found[""], found[adapter])
    assert torch.equal(model.table, tables[STEPS])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"best", "last", "vl", "training.csv", "training.json"}
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (facts["adapter"], facts["best_step"], facts["best_eval_total"]) == (adapter, 2, -1)


class Partly(CountingScorer):
    """Scores the evaluations, of three samples, as it is told."""

    totals: Iterator[Sequence[float]]

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        return replace(scores, total=torch.tensor(next(self.totals))) if len(samples) == 3 else scores


@pytest.mark.parametrize(
    ("second", "best"),
    [
        ((math.nan, math.nan, 0.99), 2),  # Higher on the only one.
        ((math.nan, 0.4, 0.97), 2),  # A higher mean, of easier prompts.
        ((math.nan, 0.4, 0.99), 4),
        ((0.6, 0.5, 0.9), 4),
    ],
)
def test_the_best_adapter_is_the_best_on_the_prompts_that_were_scored(
    second: tuple[float, ...], best: int, tmp_path: Path
) -> None:
    scorer = Partly()
    scorer.totals = iter([(0.5, 0.4, 0.98), second, (math.nan,) * 3])
    run = token_run(tmp_path, TokenModel(), scorer, grpo={"steps": 6}, evaluation={"prompts": 3, "every": 2})
    execute(run, tmp_path / "out")
    assert run.progress.best_step == best


def test_a_checkpoint_without_the_best_adapters_totals_keeps_it_where_none_is_better(tmp_path: Path) -> None:
    scorer = Partly()
    scorer.totals = iter([(0.5, 0.4, 0.98), (0.4, 0.3, 0.97)])
    run = token_run(tmp_path, TokenModel(), scorer, grpo={"steps": 4}, evaluation={"prompts": 3, "every": 2})

    def forget(metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == 3:
            run.progress.best_totals = []  # As a checkpoint of an earlier version does.

    execute(run, tmp_path / "out", forget)
    assert run.progress.best_step == 2


def test_without_an_evaluation_the_last_step_is_the_best_one(tmp_path: Path) -> None:
    run = token_run(tmp_path, TokenModel(), CountingScorer(), grpo={"steps": 2})
    run.eval_prompts = []
    execute(run, tmp_path / "out")
    facts = json.loads((tmp_path / "out/training.json").read_text())
    assert (facts["best_step"], facts["best_eval_total"]) == (2, None)


class Chance(CountingScorer):
    """Sees nothing of the samples."""

    generator = torch.Generator().manual_seed(0)

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        return replace(super().__call__(prompts, samples), total=torch.rand(len(samples), generator=self.generator))


def test_the_signal_check_shows_how_far_it_is_and_gives_the_advice_for_the_model(tmp_path: Path) -> None:
    model, policy = TokenModel(steps=60, vocabulary=20), {"signal_check": {"rollouts": None}}
    grpo = {"steps": 192, "prompts_per_step": 2, "group_size": 3, "learning_rate": 1e-3}
    run = token_run(tmp_path, model, Chance(), {"vl": "a clearer query"}, policy=policy, grpo=grpo)
    notes: list[str] = []
    probes: list[tuple[str, int, int]] = []
    callbacks = Callbacks(on_step=ignore, note=notes.append, on_probe=lambda *probe: probes.append(probe))
    with pytest.raises(UserError, match=r"(?s)nothing to learn for the module 'vl'.*What to change: a clearer query\."):
        run.run(callbacks)
    assert probes == [("vl", done, next(look for look in (6, 12, 24, 48) if done <= look)) for done in range(1, 49)]
    assert sum("cannot tell yet" in note for note in notes) == 3


class Blind(CountingScorer):
    """Sees a difference in the first step and in the ninth only."""

    steps = 0

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        self.steps += 1
        scores = super().__call__(prompts, samples)
        same = torch.ones(len(samples)) if self.steps not in (1, 9) else torch.arange(float(len(samples)))
        return replace(scores, total=same, rewards={"count": same})


@pytest.mark.parametrize(("steps", "told"), [(4, []), (8, [6]), (14, [6, 14])])
def test_a_reward_that_sees_no_difference_any_more_is_told_while_it_trains(
    tmp_path: Path, steps: int, told: list[int]
) -> None:
    run = token_run(tmp_path, TokenModel(), Blind(), grpo={"steps": steps}, evaluation={"every": 0})
    run.eval_prompts = []
    notes = [note for note in execute(run, tmp_path / "out") if "learned nothing" in note]
    assert [note.split(",")[0] for note in notes] == [f"Warning: in the last 5 steps up to step {at}" for at in told]


def test_prompts_that_the_model_cuts_are_counted_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(records: Any) -> list[str]:
        notes: list[str] = []
        run = token_run(tmp_path, TokenModel(), CountingScorer(), grpo={"steps": 1})
        run.train_prompts = records
        run.run(Callbacks(on_step=ignore, note=notes.append))
        return [note for note in notes if "than the model reads" in note]

    assert said(RECORDS) == []
    monkeypatch.setattr("visual_grpo.training.likely_mistakes.MEASURED_PROMPTS", 3)
    long = [replace(record, prompt=f"one two three four {word}") for record, word in zip(RECORDS, "abab", strict=False)]
    (note,) = said([*RECORDS[4:], *long])
    assert "Warning: 2 of 7 prompts (the 3 longest were looked at) have more tokens than the model reads" in note
    assert note.endswith("Of 'one two three four a'... it reads 4 of 5 tokens. Shorten them.")


@pytest.mark.parametrize(
    ("options", "limit", "may"),
    [
        (Sd3Options(max_sequence_length=77), 77, True),
        (Sd3Options(), 77, False),  # CLIP's, where there is no T5.
        (Sd3Options(max_sequence_length=512), 512, False),
        (NoOptions(), 4, False),
    ],
)
def test_more_tokens_are_advised_where_the_option_sets_the_limit_and_can_be_higher(
    options: Any, limit: int, may: bool
) -> None:
    assert can_be_raised(options, limit) == may


@pytest.mark.parametrize(
    ("prompts", "edits", "per_step", "said"),
    [
        (6, 0, 6, None),
        (6, 0, 7, "grpo.prompts_per_step is 7, more than the 6 training prompts: a step repeats prompts"),
        (3, 1, 2, "is 2, more than the 1 training prompt with 1 source image: a step"),
    ],
)
def test_a_step_of_more_prompts_than_there_are_is_told_once(
    tmp_path: Path, prompts: int, edits: int, per_step: int, said: str | None
) -> None:
    run = token_run(tmp_path, TokenModel(), CountingScorer(), grpo={"steps": 2, "prompts_per_step": per_step})
    edited = [replace(record, id=f"{record.id}e", source_images=(Path("a.png"),)) for record in RECORDS[:edits]]
    run.train_prompts = [*RECORDS[:prompts], *edited]
    notes: list[str] = []
    run.run(Callbacks(on_step=ignore, note=notes.append))
    told = [note for note in notes if "prompts_per_step" in note]
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


@pytest.mark.parametrize(("loss", "guidance", "warned"), [("grpo", 1.0, True), ("nft", 1.0, False), ("nft", 1.5, True)])
def test_two_guidance_scales_are_a_mistake_except_for_a_forward_process_without_guidance(
    tmp_path: Path, loss: str, guidance: float, warned: bool
) -> None:
    sampling = {"rollout": {"guidance_scale": guidance}, "eval": {"guidance_scale": 2.0}}
    run = token_run(tmp_path, TokenModel(), CountingScorer(), sampling=sampling, grpo={"steps": 1, "loss": loss})
    trainer: Any = run.trainer
    trainer.config = trainer.config.model_copy(update={"loss": "grpo"})  # A toy has no velocities.
    notes: list[str] = []
    run.run(Callbacks(on_step=ignore, note=notes.append))
    assert any(f"generated with guidance {guidance:g}, the eval sampler has 2" in note for note in notes) == warned


@pytest.mark.parametrize(("minutes", "steps"), [(2, [10, 12, 14]), (0, [10])])
def test_a_checkpoint_is_due_by_steps_and_by_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, steps: list[int]
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tracking = {"checkpoint_every": 10, "checkpoint_minutes": minutes, "checkpoints": str(tmp_path)}
    run = token_run(tmp_path, TokenModel(), CountingScorer(), tracking=tracking)
    saved = []
    for run.trainer.step in range(10, 15):
        if run.checkpoints.due():
            run.checkpoints.save()
            saved.append(run.trainer.step)
        now += 60
    assert saved == steps


def test_the_time_of_a_checkpoint_is_in_the_row_after_it(tmp_path: Path) -> None:
    run = token_run(tmp_path, TokenModel(), CountingScorer())
    execute(run, tmp_path / "out")
    spent = [row["seconds/checkpoint"] for row in run.progress.history]
    assert [seconds > 0 for seconds in spent] == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("rollouts", "steps", "most"), [(None, 4, 6), (None, 80, 20), (None, 400, 48), (0, 80, 0), (60, 80, 60)]
)
def test_a_short_training_has_a_short_signal_check(rollouts: int | None, steps: int, most: int) -> None:
    assert SignalCheckConfig(rollouts=rollouts).most(steps) == most


SAME, FALLEN = (1.0, 1.0, 1.0), (0.1, 0.1, 0.1)
SLOWLY = ((0.95, 0.95, 0.95), (0.1, 0.6, 1.0), (0.1, 0.6, 1.0), FALLEN)
"""The guard falls by little, by more than its limit without proof of it, and then for all to see."""
DOUBTFUL = ((0.1, 0.5, 1.0), (0.1, 0.6, 1.0), (0.1, 0.4, 1.0), FALLEN)


class Cheated(CountingScorer):
    """Rises with every evaluation (of three samples), at which the guard has these values, at last the last ones."""

    def __init__(self, *guards: tuple[float, float, float], evaluations: int = 0) -> None:
        super().__init__()
        self.guards, self.evaluations = guards or (SAME, FALLEN), evaluations

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        if len(samples) != 3:
            return replace(scores, rewards={**scores.rewards, "guard": scores.total})
        guard = self.guards[min(self.evaluations, len(self.guards) - 1)]
        self.evaluations += 1
        total = torch.arange(3) * 1e-3 + self.evaluations
        return replace(scores, total=total, rewards={"guard": torch.tensor(guard)})


def watched_run(
    tmp_path: Path, action: str, resume: str = "never", scorer: CountingScorer | None = None, every: int = 1
) -> TrainingRun:
    rows = [
        {"sampler": "eval", "split": "eval", "id": record.id, "index": 0, "unit": record.id, "file": ""}
        | {"total": 0.0, "reward/count": 0.0, "reward/guard": 1.0 + 1e-3 * i}
        for i, record in enumerate(RECORDS[6:])
    ]
    table, weights = pd.DataFrame(rows), {"count": 1.0, "guard": 0.0}
    table.attrs = {"weights": weights}
    (tmp_path / "baseline").mkdir(exist_ok=True)
    table.to_parquet(tmp_path / "baseline/scores.parquet")
    evaluation = {"every": every, "prompts": 3, "adapter": "last"}
    run = token_run(
        tmp_path, TokenModel(), scorer or Cheated(), alarm={"action": action}, evaluation=evaluation, resume=resume
    )
    run.monitor = HackingMonitor(tmp_path / "baseline", run.config.alarm, looks=STEPS, weights=weights)
    return run


@pytest.mark.parametrize(("action", "steps", "best"), [("warn", STEPS, STEPS), ("stop", 2, 1), ("rollback", 2, 1)])
def test_an_alarm_warns_stops_or_rolls_back(tmp_path: Path, action: str, steps: int, best: int) -> None:
    run = watched_run(tmp_path, action)
    tables, on_step = keeping_tables(run.model)
    told: list[tuple[int, str, int]] = []

    def on_alarm(step: int, sentence: str, shown: Any) -> None:
        told.append((step, sentence, len(shown.samples)))
        run.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        (run.checkpoints.folder / f"alarm-{step:06d}.png").write_bytes(b"picture")

    run.run(Callbacks(on_step=on_step, note=print, on_alarm=on_alarm))
    run.write_adapters(tmp_path / "out")
    assert [step for step, _, _ in told] == list(range(2, steps + 1))
    assert told[0][1].startswith("the reward rose by 2, and guard fell by 90% (at least ")
    assert told[0][2] == 3
    assert (run.trainer.step, run.progress.best_step) == (steps, best)
    facts = json.loads((tmp_path / "out/training.json").read_text())
    assert [alarm["step"] for alarm in facts["alarms"]] == list(range(2, steps + 1))
    assert (tmp_path / "out/alarm-000002.png").read_bytes() == b"picture"
    assert torch.equal(saved(tmp_path / "out"), tables[1 if action == "rollback" else steps])
    assert run.progress.history[1]["watch/guard"] == pytest.approx(-0.9, abs=1e-2)


@pytest.mark.parametrize(
    ("action", "guards", "resumed_after", "best"),
    [
        ("stop", SLOWLY, None, 3),
        ("stop", SLOWLY, 2, 3),
        ("rollback", SLOWLY, None, 1),
        ("rollback", SLOWLY, 2, 1),
        ("rollback", DOUBTFUL, None, 2),
    ],
)
def test_a_rollback_goes_back_to_before_the_cheating(
    tmp_path: Path, action: str, guards: Any, resumed_after: int | None, best: int
) -> None:
    run = watched_run(tmp_path, action, scorer=Cheated(*guards))
    tables, keep = keeping_tables(run.model)

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        keep(metrics, row)
        if metrics.step == resumed_after:
            os.kill(os.getpid(), signal.SIGINT)

    run.run(Callbacks(on_step=on_step, note=print))
    if resumed_after is not None:
        scorer = Cheated(*guards, evaluations=resumed_after)
        run = watched_run(tmp_path, action, resume="auto", scorer=scorer)
        later, keep = keeping_tables(run.model)
        run.run(Callbacks(on_step=keep, note=print))
        tables |= later
    run.write_adapters(tmp_path / "out")
    assert ([alarm["step"] for alarm in run.progress.alarms], run.progress.best_step) == ([4], best)
    assert torch.equal(saved(tmp_path / "out/best"), tables[best])


def test_a_training_that_an_alarm_has_ended_does_not_go_on_when_it_is_resumed(tmp_path: Path) -> None:
    execute(watched_run(tmp_path, "rollback"), tmp_path / "out")
    again = watched_run(tmp_path, "rollback", resume="auto")
    notes = execute(again, tmp_path / "again")
    assert again.trainer.step == 2
    assert any("ended after step 2: alarm: the reward rose by 2" in note for note in notes)
    assert (tmp_path / "again/vl/table.pt").read_bytes() == (tmp_path / "out/vl/table.pt").read_bytes()
    on = watched_run(tmp_path, "warn", resume="auto")
    execute(on, tmp_path / "on")
    assert on.trainer.step == STEPS


@pytest.mark.parametrize(
    ("before", "guards", "steps", "action", "best"),
    [
        ("warn", (SAME, FALLEN), 1, "rollback", 1),  # Nothing was suspect: as from the start.
        ("warn", (SAME, FALLEN), 1, "stop", 1),
        ("warn", SLOWLY, 3, "stop", 3),
        ("warn", SLOWLY, 3, "rollback", None),
        ("stop", SLOWLY, 3, "rollback", None),
        ("warn", (SAME, FALLEN), 4, "stop", None),
        ("warn", (SAME, FALLEN), 4, "rollback", None),
    ],
)
def test_a_resumed_run_keeps_the_best_adapter_of_its_new_action_or_refuses_it(
    tmp_path: Path, before: str, guards: Any, steps: int, action: str, best: int | None
) -> None:
    run = watched_run(tmp_path, before, scorer=Cheated(*guards))

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == steps:
            os.kill(os.getpid(), signal.SIGINT)

    run.run(Callbacks(on_step=on_step, note=print))
    if best is None:
        with pytest.raises(UserError, match=f"alarm.action={action} comes too late .* step {steps} was kept"):
            watched_run(tmp_path, action, resume="auto")
        return
    run = watched_run(tmp_path, action, resume="auto", scorer=Cheated(*guards, evaluations=steps))
    execute(run, tmp_path / "out")
    assert (len(run.progress.alarms), run.progress.best_step) == (1, best)


@pytest.mark.parametrize(("every", "advice"), [(1, "Change the reward"), (2, "Evaluate earlier")])
def test_a_rollback_with_nothing_to_go_back_to_says_so(tmp_path: Path, every: int, advice: str) -> None:
    run = watched_run(tmp_path, "rollback", scorer=Cheated(FALLEN), every=every)
    said = rf"after step {every}, raised the alarm: the reward rose.*no earlier adapter\. {advice}"
    with pytest.raises(UserError, match=said):
        execute(run, tmp_path / "out")


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
@pytest.mark.parametrize("without", ["eval prompts", "baseline"])
def test_an_alarm_that_has_too_little_to_compare_is_refused(tmp_path: Path, action: str, without: str) -> None:
    run = watched_run(tmp_path, action, scorer=Cheated(SAME))
    assert run.monitor is not None
    if without == "baseline":
        run.monitor.reference = run.monitor.reference[:1]
    else:
        run.eval_prompts = []
    said = rf"^alarm\.action={action} needs at least 2 .* there are {int(without == 'baseline')}\."
    with nullcontext() if action == "warn" else pytest.raises(UserError, match=said):
        execute(run, tmp_path / "out")


def test_a_finished_run_keeps_neither_its_model_nor_its_optimiser_alive(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        run = token_run(tmp_path, TokenModel(), CountingScorer())
        execute(run, tmp_path / "out")
        model, trainer = weakref.ref(run.model), weakref.ref(run.trainer)
        del run
        assert model() is None
        assert trainer() is None
    finally:
        gc.enable()
