from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SIZE
from tests.toys import reproducible
from tests.training.few_steps import RECORDS, STEPS, brightness, parameters, resolved
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import Parameters
from visual_grpo.models.run_spec import resolve
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.reward import FunctionReward
from visual_grpo.starter.world_defaults import with_world
from visual_grpo.training import components
from visual_grpo.training.likely_mistakes import likely_mistakes
from visual_grpo.training.resuming import resumed_run
from visual_grpo.training.run import Callbacks, TrainingRun


def make_run(
    config: Parameters,
    pipeline_folder: Path,
    data: str = "data",
    reward: Callable[..., list[float]] = brightness,
    **judges: FunctionReward,
) -> TrainingRun:
    random.seed(0)
    spec = resolved(config, pipeline_folder)
    model = components.build_model(spec)
    scorer = RewardSet({"brightness": (reward, 1.0), **{name: (judge, 0.0) for name, judge in judges.items()}})
    return TrainingRun(
        spec,
        model,
        scorer,
        components.build_trainer(spec, model, scorer),
        data={"train": RECORDS[:6], "eval": RECORDS[6:]},
        provenance={"parameters": config.public(), "data": data},
        run_id="run",
        resumed=resumed_run(config),
    )


def test_a_judge_sees_evaluations_and_no_rollout(pipeline_folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def judge(prompts: Any, images: Any) -> list[float]:
        seen.append(len(images))
        return [0.0] * len(images)

    second = FunctionReward("second", judge)
    second.judge_of = "total"
    config = parameters(tmp_path, grpo={"steps": 2}, evaluation={"every": 1})
    run = make_run(config, pipeline_folder, second=second)
    execute(run, tmp_path / "out")
    run.shown_samples()
    assert seen == [2, 2], "the two eval prompts of each of two evaluations"
    assert "reward/second" not in run.progress.history[0]


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


def rows(run: TrainingRun) -> list[list[tuple[str, float]]]:
    """The history but for times and memory, with its order, which is that of the columns in training.csv."""
    return [list(reproducible(row).items()) for row in run.progress.history]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


def test_a_run_that_is_stopped_twice_is_the_uninterrupted_one(pipeline_folder: Path, tmp_path: Path) -> None:
    few = {"steps": 4}
    whole = make_run(parameters(tmp_path / "whole", grpo=few), pipeline_folder)
    execute(whole, tmp_path / "whole" / "out")

    stops = sorted(random.Random().sample(range(1, 4), 2))
    resume, done = "never", 0
    for stop, number in zip(stops, (signal.SIGINT, signal.SIGTERM), strict=True):
        part = make_run(parameters(tmp_path / "parts", grpo=few, resume=resume), pipeline_folder)
        assert part.checkpoints.completed_steps() == done
        notes = execute(part, tmp_path / f"unused-{stop}", interrupt_at(stop, number))
        assert (part.stopped_by, part.trainer.step) == (number, stop)
        assert any("press Ctrl-C again" in note for note in notes)
        resume, done = "auto", stop
        random.seed(99)

    last = make_run(parameters(tmp_path / "parts", grpo=few, resume="auto"), pipeline_folder)
    execute(last, tmp_path / "parts" / "out")
    assert last.stopped_by is None
    assert contents(tmp_path / "parts" / "out") == contents(tmp_path / "whole" / "out"), f"stopped after steps {stops}"
    assert rows(last) == rows(whole)
    assert last.progress.best_step == whole.progress.best_step


def test_a_blind_reward_stops_the_run(pipeline_folder: Path, tmp_path: Path) -> None:
    def blind(prompts: Any, images: Any) -> list[float]:
        return [0.0] * len(images)

    config = parameters(tmp_path, policy={"signal_check": {"rollouts": 3}}, grpo={"warmup_steps": 4 * STEPS})
    notes: list[str] = []
    with pytest.raises(UserError, match=r"(?s)signal check stopped the run.*module 'ar'.*signal_check.rollouts=0"):
        make_run(config, pipeline_folder, reward=blind).run(Callbacks(on_step=ignore, note=notes.append))
    assert any("guidance 1, the eval sampler has 1.5" in note for note in notes)
    assert any("but ar has only" in note and "ends at 50% of grpo.learning_rate" in note for note in notes)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("window", "told"), [(1, True), (2, False)])
def test_a_share_that_rounds_to_all_stochastic_steps_is_told(
    pipeline_folder: Path, tmp_path: Path, window: int, told: bool
) -> None:
    sampling = {"rollout": {"steps": 4, "guidance_scale": 1.0}}
    policy = {"train": "dit", "flow": {"train_share": 0.5, "window_steps": window}}
    run = make_run(parameters(tmp_path, policy=policy, sampling=sampling), pipeline_folder)
    mistakes = likely_mistakes(run.spec, run.model, run.train_prompts, run.eval_prompts)
    assert any("train_share is 0.5, which rounds to all of 1 stochastic step" in said for said in mistakes) == told


def test_a_module_has_a_reference_by_its_own_kl_weight(pipeline_folder: Path, tmp_path: Path) -> None:
    own, sampling = {"dit": {"kl_weight": 0.1}}, {"rollout": {"steps": 2, "guidance_scale": 1.0}}
    config = parameters(tmp_path, policy={"train": "all"}, grpo={"kl_weight": 0.0}, modules=own, sampling=sampling)
    modules: Mapping[str, Any] = make_run(config, pipeline_folder).trainer.modules
    assert {name: trainer.policy.kl_reference for name, trainer in modules.items()} == {"ar": False, "dit": True}


def test_pictures_show_two_training_prompts_where_there_are_no_more(pipeline_folder: Path, tmp_path: Path) -> None:
    run = make_run(parameters(tmp_path), pipeline_folder)
    run.train_prompts, run.eval_prompts = RECORDS[:2], []
    records, samples, _ = run.shown_samples()
    assert [record.id for record in records] == ["r0"] * 4 + ["r1"] * 4
    assert len(samples) == 8


def test_a_starters_model_that_is_not_made_yet_is_refused(tmp_path: Path) -> None:
    config = parameters(tmp_path, model={"path": None}, starter={"model": str(tmp_path / "not_made")})
    with pytest.raises(UserError, match="not_made does not exist yet") as refused:
        components.build_model(resolve(config))
    assert refused.value.remedy == Remedy("starter")


def test_the_released_models_configuration_trains_a_saved_small_pipeline(pipeline_folder: Path, tmp_path: Path) -> None:
    """conf/glm_image as it stands (bf16, gradient checkpointing, guidance in the rollout) but for size and length."""
    from kedro.config import OmegaConfigLoader

    tree: dict[str, Any] = OmegaConfigLoader(
        conf_source=str(Path(__file__).parents[2] / "conf"),
        env="glm_image",
        base_env="base",
        merge_strategy={"parameters": "soft"},
    )["parameters"]
    tree["data"] |= {"height": SIZE[0], "width": SIZE[1]}
    tree["model"] |= {"path": str(pipeline_folder), "device": "cpu"}
    tree["rewards"] |= {"ssim": None, "edge_density": None}
    tree["rewards"]["brightness"] = {"function": "tests.training.few_steps:brightness"}
    tree["grpo"] |= {"steps": 1, "warmup_steps": 0, "prompts_per_step": 2, "group_size": 3}
    tree["evaluation"] |= {"prompts": 1}
    tree["policy"] |= {"signal_check": {"rollouts": 0}}  # Random weights have nothing to learn.
    tree["tracking"] |= {"checkpoints": str(tmp_path / "checkpoints")}
    config = Parameters.model_validate(with_world(tree))
    assert config.model.dtype == "bfloat16"
    assert config.policy.gradient_checkpointing
    run = make_run(config, pipeline_folder)
    before = run.model.adapters.state()
    execute(run, tmp_path / "out")
    after = run.model.adapters.state()
    assert [name for name in before if "lora_B" in name and torch.equal(before[name], after[name])] == []
    assert run.progress.history[0]["kl"] >= 0
