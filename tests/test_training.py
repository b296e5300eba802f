from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SIZE
from tests.toys import CountingScorer, ToyTokenPolicy
from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.evaluation.seeds import image_seed
from visual_grpo.grpo.metrics import reproducible
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import Callbacks, TrainingRun, _now_and_then, check_resumable
from visual_grpo.types import PromptRecord, Scores, StepMetrics

STEPS = 6
RECORDS = [PromptRecord(id=f"r{i}", prompt=f"a thing number {i}") for i in range(9)]


def parameters(folder: Path, **changes: Any) -> Parameters:
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"path": "unused", "height": SIZE[0], "width": SIZE[1]},
        "starter": {"records_per_prompt": 1, "vae_steps": 1, "dit_steps": 1, "ar_steps": 1},
        "model": {"device": "cpu", "threads": 1},
        "policy": {"signal_check": {"rollouts": 0}},
        "sampling": {
            "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 1, "guidance_scale": 1.0},
            "stock": {"steps": 1, "guidance_scale": 1.5},
        },
        "rewards": {"brightness": {"function": "tests.test_training:brightness"}},
        "grpo": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "group_size": 3,
            "updates_per_rollout": 2,
            "learning_rate": 1e-3,
            "kl_weight": 0.01,
            "schedule": "cosine",
        },
        "evaluation": {"every": 2, "prompts": 2, "images_per_prompt": 1},
        "tracking": {"checkpoint_every": 2, "checkpoints": str(folder / "checkpoints")},
    }
    for key, value in changes.items():
        if isinstance(value, dict):
            tree[key] = tree[key] | value
        else:
            tree[key] = value
    return Parameters.model_validate(tree)


def brightness(prompts: Any, images: Any) -> list[float]:
    """Draws a random number as a careless reward does: the generators must be in the checkpoint."""
    return [float(image.float().mean()) / 255 + 1e-3 * random.random() for image in images]


def make_run(config: Parameters, pipeline_folder: Path, data: str = "data") -> TrainingRun:
    random.seed(0)
    image = components.build_model(config, str(pipeline_folder))
    scorer = RewardSet({"brightness": (brightness, 1.0)})
    return TrainingRun(
        config,
        image,
        scorer,
        components.build_trainer(config, image, scorer),
        train=RECORDS[:6],
        evaluation=RECORDS[6:],
        identity={"data": data},
        run_id="run",
    )


def ignore(metrics: StepMetrics, row: dict[str, float]) -> None:
    pass


def execute(run: TrainingRun, out: Path, on_step: Callable[..., None] = ignore) -> list[str]:
    notes: list[str] = []
    run.run(Callbacks(on_step=on_step, note=notes.append))
    run.write_adapters(out)
    return notes


def interrupt_at(step: int, signal_number: int = signal.SIGINT) -> Callable[..., None]:
    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == step:
            os.kill(os.getpid(), signal_number)

    return on_step


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(
    pipeline_folder: Path, tmp_path: Path, signal_number: int
) -> None:
    whole = make_run(parameters(tmp_path / "whole"), pipeline_folder)
    execute(whole, tmp_path / "whole" / "out")

    stop = random.Random().randint(1, STEPS - 1)
    first = make_run(parameters(tmp_path / "parts"), pipeline_folder)
    notes = execute(first, tmp_path / "unused", interrupt_at(stop, signal_number))
    assert first.stopped
    assert first.trainer.step == stop
    assert any("press Ctrl-C again" in note for note in notes)

    random.seed(99)
    second = make_run(parameters(tmp_path / "parts", resume="auto"), pipeline_folder)
    assert second.completed_steps() == stop
    execute(second, tmp_path / "parts" / "out")
    assert not second.stopped
    assert contents(tmp_path / "parts" / "out") == contents(tmp_path / "whole" / "out"), f"stopped after step {stop}"
    assert [reproducible(row) for row in second.progress.history] == [
        reproducible(row) for row in whole.progress.history
    ]
    assert second.progress.best_step == whole.progress.best_step


def test_two_runs_of_one_seed_are_one_run(pipeline_folder: Path, tmp_path: Path) -> None:
    runs = [make_run(parameters(tmp_path / name), pipeline_folder) for name in "ab"]
    for name, run in zip("ab", runs, strict=True):
        random.seed(0)
        execute(run, tmp_path / name / "out")
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")
    first, second = ([reproducible(row) for row in run.progress.history] for run in runs)
    assert first == second
    assert len(first) == STEPS


def test_the_best_adapter_is_that_of_the_best_evaluation(pipeline_folder: Path, tmp_path: Path) -> None:
    run = make_run(parameters(tmp_path), pipeline_folder)
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        kept[metrics.step] = run.model.adapter_state_dict()

    execute(run, tmp_path / "out", on_step)
    evaluated = {row["step"]: row["eval/total"] for row in run.progress.history if "eval/total" in row}
    assert sorted(evaluated) == [2, 4, 6]
    best = int(max(evaluated, key=evaluated.__getitem__))
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["best_step"] == best
    assert facts["best_eval_total"] == evaluated[best]
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "out" / "best" / "ar" / "adapter_model.safetensors")
    assert all(torch.equal(saved[name.removeprefix("ar/")], value) for name, value in kept[best].items())
    last = load_file(tmp_path / "out" / "last" / "ar" / "adapter_model.safetensors")
    assert all(torch.equal(last[name.removeprefix("ar/")], value) for name, value in kept[STEPS].items())
    assert (tmp_path / "out" / "ar" / "adapter_config.json").is_file()


def test_other_parameters_cannot_be_resumed_with(pipeline_folder: Path, tmp_path: Path) -> None:
    execute(make_run(parameters(tmp_path), pipeline_folder), tmp_path / "out", interrupt_at(2))
    changed = parameters(tmp_path, resume="auto", grpo={"learning_rate": 2e-3})
    with pytest.raises(UserError, match=r"grpo\.learning_rate \(was .*, is 0\.002\)"):
        execute(make_run(changed, pipeline_folder), tmp_path / "never")
    with pytest.raises(UserError, match=r"model\.threads \(was 1, is 2\)"):
        check_resumable(parameters(tmp_path, resume="auto", model={"threads": 2}))
    check_resumable(parameters(tmp_path, resume="auto", tracking={"images_every": 3}))
    other_data = make_run(parameters(tmp_path, resume="auto"), pipeline_folder, data="changed")
    with pytest.raises(UserError, match=r"other values of data \(was .*, is 'changed'\)"):
        execute(other_data, tmp_path / "never")


BOTH_STEPS: dict[str, Any] = {
    "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 3, "guidance_scale": 1.5},
    "stock": {"steps": 2, "guidance_scale": 1.5},
}


@pytest.mark.parametrize(
    ("policy", "group_size"),
    [
        ({"component": "dit"}, 3),
        ({"component": "both"}, 3),
        ({"component": "both", "both": "joint"}, 2),
    ],
)
def test_every_component_resumes_bit_for_bit(
    pipeline_folder: Path, tmp_path: Path, policy: dict[str, Any], group_size: int
) -> None:
    changes: dict[str, Any] = {
        "policy": {"signal_check": {"rollouts": 0}} | policy,
        "sampling": BOTH_STEPS,
        "grpo": {"steps": 4, "group_size": group_size, "dit": {"group_size": 3, "learning_rate": 2e-3}},
    }
    whole = make_run(parameters(tmp_path / "whole", **changes), pipeline_folder)
    execute(whole, tmp_path / "whole" / "out")
    parts = tmp_path / "parts"
    execute(make_run(parameters(parts, **changes), pipeline_folder), tmp_path / "unused", interrupt_at(2))
    random.seed(99)
    second = make_run(parameters(parts, resume="auto", **changes), pipeline_folder)
    execute(second, tmp_path / "parts" / "out")
    assert contents(tmp_path / "parts" / "out") == contents(tmp_path / "whole" / "out")
    folders = {path.name for path in (tmp_path / "whole" / "out").iterdir()}
    assert folders == {"best", "last", "training.json"} | set(second.config.policy.modules)
    assert len(second.progress.history) == 4


def test_differing_guidance_is_warned_about_and_a_blind_reward_stops_the_run(
    pipeline_folder: Path, tmp_path: Path
) -> None:
    # What random weights draw is noise: no two rollouts' gradients agree on its brightness.
    config = parameters(tmp_path, policy={"signal_check": {"rollouts": 3, "least_cosine": 0.9}})
    notes: list[str] = []
    with pytest.raises(UserError, match=r"(?s)signal check stopped the run.*module 'ar'.*signal_check.rollouts=0"):
        make_run(config, pipeline_folder).run(Callbacks(on_step=ignore, note=notes.append))
    assert any("guidance 1, the stock sampler has 1.5" in note for note in notes)
    assert any("Signal check (cosine between policy gradients): ar " in note for note in notes)
    assert not (tmp_path / "checkpoints").exists()


class TokenModel(ToyTokenPolicy):
    """A model that is no GLM-Image: it draws token rows."""

    def generate(self, records: Any, seeds: Any, sampler: Any) -> list[torch.Tensor]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return [self.rollout([r], 1, g).samples[0] for r, g in zip(records, generators, strict=True)]

    def save_adapters(self, folder: Path) -> None:
        (folder / "vl").mkdir(parents=True)
        torch.save(self.adapter_state_dict(), folder / "vl" / "table.pt")


def token_run(
    tmp_path: Path, model: Any, scorer: Any, advice: dict[str, str] | None = None, **changes: Any
) -> TrainingRun:
    """A run of a model that takes no time."""
    vl: dict[str, Any] = {
        "data": {"task": "segmentation"},
        "starter": {"world": "scenes"},
        "policy": {"component": "vl", "signal_check": {"rollouts": 0}},
    }
    config = parameters(tmp_path, **(vl | changes))
    return TrainingRun(
        config,
        model,
        scorer,
        GRPOTrainer(model, scorer, config.grpo, module="vl"),
        train=RECORDS[:6],
        evaluation=RECORDS[6:],
        identity={},
        run_id=None,
        advice=advice or {},
    )


def test_a_run_trains_any_model_with_adapters_and_guidance_means_nothing_to_a_language_model(tmp_path: Path) -> None:
    model = TokenModel()
    run = token_run(tmp_path, model, CountingScorer())
    assert run.config.sampling.rollout.guidance_scale != run.config.sampling.stock.guidance_scale
    assert execute(run, tmp_path / "out") == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"best", "last", "training.json", "vl"}
    last = torch.load(tmp_path / "out" / "last" / "vl" / "table.pt")["table"]
    assert torch.equal(last, model.table)
    assert last.any()


class Watched(TokenModel):
    """Keeps with which sampler and seeds it was asked to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[int], Any]] = []

    def generate(self, records: Any, seeds: Any, sampler: Any) -> list[torch.Tensor]:
        self.asked.append((list(seeds), sampler))
        return super().generate(records, seeds, sampler)


class PartlyScored(CountingScorer):
    """One sample of three cannot be scored, the others are 1 and 3."""

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        return replace(scores, total=torch.tensor([torch.nan, 1.0, 3.0])) if len(samples) == 3 else scores


def test_the_evaluation_in_a_run_draws_with_the_stock_sampler_and_leaves_the_unscored_out(tmp_path: Path) -> None:
    model = Watched()
    run = token_run(tmp_path, model, PartlyScored(), evaluation={"prompts": 3})
    assert run.evaluate() == 2.0
    seeds = [image_seed(run.config.seed, record.id, 0) for record in RECORDS[6:]]
    assert model.asked == [(seeds, run.config.sampling.stock)]
    assert run.config.sampling.stock != run.config.sampling.rollout


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
    tables: dict[int, torch.Tensor] = {}

    def on_step(metrics: StepMetrics, row: dict[str, float]) -> None:
        tables[metrics.step] = model.table.detach().clone()

    execute(run, tmp_path / "out", on_step)
    found = {
        folder: torch.load(tmp_path / "out" / folder / "vl" / "table.pt")["table"] for folder in ("", "best", "last")
    }
    assert torch.equal(found["best"], tables[2])
    assert torch.equal(found["last"], tables[STEPS])
    assert not torch.equal(tables[2], tables[STEPS])
    assert torch.equal(found[""], found[adapter])
    assert torch.equal(model.table, tables[STEPS])
    assert json.loads((tmp_path / "out" / "training.json").read_text())["adapter"] == adapter


class Chance(CountingScorer):
    """Sees nothing of the samples."""

    generator = torch.Generator().manual_seed(0)

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        return replace(super().__call__(prompts, samples), total=torch.rand(len(samples), generator=self.generator))


def test_the_signal_check_shows_how_far_it_is_and_gives_the_advice_for_the_model(tmp_path: Path) -> None:
    policy = {"component": "vl", "signal_check": {"rollouts": 48}}
    run = token_run(tmp_path, TokenModel(steps=60, vocabulary=20), Chance(), {"vl": "a clearer query"}, policy=policy)
    notes: list[str] = []
    with pytest.raises(UserError, match=r"(?s)nothing to learn for the module 'vl'.*What to change: a clearer query\."):
        run.run(Callbacks(on_step=ignore, note=notes.append))
    assert notes[0] == "Signal check: vl 1 of at most 48 rollouts"
    assert sum("cannot tell yet" in note for note in notes) == 3


def test_a_short_run_with_a_signal_starts(tmp_path: Path) -> None:
    grpo = {"steps": 4, "prompts_per_step": 4, "group_size": 32}
    policy = {"component": "vl", "signal_check": {"rollouts": 48}}
    run = token_run(tmp_path, TokenModel(steps=12, vocabulary=8), CountingScorer(), policy=policy, grpo=grpo)
    execute(run, tmp_path / "out")
    assert run.trainer.step == 4


def test_a_count_is_noted_at_once_and_then_now_and_then() -> None:
    notes: list[str] = []
    always, seldom = _now_and_then(notes.append, "{}/3", every=0.0), _now_and_then(notes.append, "{} of 3", every=1e9)
    for count in (1, 2, 3):
        always(count)
        seldom(count)
    assert notes == ["1/3", "1 of 3", "2/3", "3/3"]


def test_another_model_than_the_starters_is_refused(pipeline_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path is other/model.*--pipeline=starter"):
        components.build_model(parameters(tmp_path, model={"path": "other/model"}), str(pipeline_folder))


def test_a_checkpoint_of_another_version_is_refused(pipeline_folder: Path, tmp_path: Path) -> None:
    execute(make_run(parameters(tmp_path), pipeline_folder), tmp_path / "out", interrupt_at(1))
    [file] = (tmp_path / "checkpoints").glob("step-*/facts.json")
    facts = json.loads(file.read_text())
    del facts["parameters"]
    file.write_text(json.dumps(facts))
    with pytest.raises(UserError, match="is of another version"):
        check_resumable(parameters(tmp_path, resume="auto"))


def test_a_new_run_keeps_the_checkpoints_of_the_one_before(pipeline_folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        execute(make_run(parameters(tmp_path), pipeline_folder), tmp_path / name, interrupt_at(1))
    assert (tmp_path / "checkpoints.previous" / "step-000001").is_dir()
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()


def test_no_training_records_is_refused(pipeline_folder: Path, tmp_path: Path) -> None:
    run = make_run(parameters(tmp_path), pipeline_folder)
    run.train_prompts = []
    with pytest.raises(UserError, match="no training records"):
        execute(run, tmp_path / "out")


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(pipeline_folder: Path, tmp_path: Path) -> None:
    whole = make_run(parameters(tmp_path / "whole"), pipeline_folder)
    execute(whole, tmp_path / "whole" / "out")
    script = (
        "import sys; from pathlib import Path; from tests import test_training as t;"
        "run = t.make_run(t.parameters(Path(sys.argv[1])), Path(sys.argv[2]));"
        "t.execute(run, Path(sys.argv[1]) / 'out')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "parts"), str(pipeline_folder)])
    deadline = time.monotonic() + 120
    while not (tmp_path / "parts" / "checkpoints" / "latest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.Random().uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    second = make_run(parameters(tmp_path / "parts", resume="auto"), pipeline_folder)
    assert 0 < second.completed_steps() <= STEPS
    execute(second, tmp_path / "parts" / "out")
    assert contents(tmp_path / "parts" / "out") == contents(tmp_path / "whole" / "out")


def test_the_released_models_configuration_trains_a_saved_small_pipeline(pipeline_folder: Path, tmp_path: Path) -> None:
    """conf/glm_image as it stands (bf16, gradient checkpointing, guidance in the rollout) but for size and length."""
    from kedro.config import OmegaConfigLoader

    tree: dict[str, Any] = OmegaConfigLoader(
        conf_source=str(Path(__file__).parents[1] / "conf"),
        env="glm_image",
        base_env="base",
        merge_strategy={"parameters": "soft"},
    )["parameters"]
    tree["data"] |= {"height": SIZE[0], "width": SIZE[1]}
    tree["model"] |= {"path": str(pipeline_folder), "device": "cpu"}
    tree["rewards"] = {"brightness": {"function": "tests.test_training:brightness"}}
    tree["grpo"] |= {"steps": 1, "warmup_steps": 0, "prompts_per_step": 2, "group_size": 3}
    tree["evaluation"] |= {"prompts": 1}
    tree["policy"] |= {"signal_check": {"rollouts": 0}}  # Random weights have nothing to learn.
    tree["tracking"] |= {"checkpoints": str(tmp_path / "checkpoints")}
    config = Parameters.model_validate(tree)
    assert config.model.dtype == "bfloat16"
    assert config.policy.gradient_checkpointing
    run = make_run(config, pipeline_folder)
    before = run.model.adapter_state_dict()
    execute(run, tmp_path / "out")
    after = run.model.adapter_state_dict()
    assert [name for name in before if "lora_B" in name and torch.equal(before[name], after[name])] == []
    assert run.progress.history[0]["kl"] >= 0
