"""Real models: both stages of GLM-Image from one rollout, by two processes as by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_training import parameters
from visual_grpo import components, processes
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.preflight.configuration import check
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import PromptRecord

RECORDS = [
    PromptRecord(id=f"r{n}", prompt=text)
    for n, text in enumerate(["a red circle", 'a sign that says "open"', "画一只猫", "a cat", 'words "a b c" here'])
]

ROW_BY_ROW = {"denoise_batch": 1, "decode_batch": 1, "rollout_batch": 1}
"""Products of other numbers of rows are rounded in other ways, and AdamW makes much of little."""


def spread(prompts: Any, images: Any) -> list[float]:
    return [float(image.float().std()) for image in images]


def joint(folder: Path, processes: int, **changes: Any) -> Parameters:
    return parameters(
        folder,
        policy={"train": "all", "stages": "joint", "signal_check": {"rollouts": 0}, **ROW_BY_ROW},
        sampling={
            "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 3, "guidance_scale": 1.5},
            "stock": {"steps": 2, "guidance_scale": 1.5},
        },
        grpo={
            "steps": 2,
            "prompts_per_step": 3,
            "group_size": 2,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "micro_batch_size": 1,
        },
        modules={"dit": {"group_size": 2, "kl_weight": 0.1}},
        distributed={"processes": processes},
        **changes,
    )


def train(config: Parameters, folder: Path) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[float]]:
    """The adapters, samples at the stock sampler afterwards, and the mean reward of each step."""
    scorer = RewardSet({"brightness": (spread, 1.0)})
    plan = components.make_plan(config, str(folder))
    workers = processes.start_workers(config, str(folder), None)
    if workers is None:
        model = components.build_model(config, str(folder))
        trainer = components.build_trainer(config, plan, model, scorer)
        return _fit(trainer, model)
    with workers:
        model = components.build_model(config, str(folder))
        trainer = components.build_trainer(config, plan, model, scorer, workers=workers)
        workers.wait_until_ready()
        return _fit(trainer, processes.shared_model(model, workers))


def _fit(trainer: Any, model: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[float]]:
    rewards = [step.values["reward/total"] for step in trainer.fit(RECORDS)]
    samples = model.generate(RECORDS, list(range(len(RECORDS))), joint_sampler())
    return model.adapters.state(), samples, rewards


def joint_sampler() -> Any:
    return joint(Path("unused"), 1).sampling.stock


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in parts"])
def test_both_stages_are_trained_by_two_processes_as_by_one(
    pipeline_folder: Path, tmp_path: Path, sharded: bool
) -> None:
    alone, expected, rewards = train(joint(tmp_path, 1), pipeline_folder)
    config = joint(tmp_path, 2)
    distributed = config.distributed.model_copy(update={"sharded": sharded})
    together, samples, others = train(config.model_copy(update={"distributed": distributed}), pipeline_folder)
    assert others == pytest.approx(rewards, rel=1e-5)
    assert alone.keys() == together.keys()
    assert {name.split("/")[0] for name in alone} == {"ar", "dit"}
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-5
    difference = torch.stack(expected).float() - torch.stack(list(samples)).float()
    assert difference.abs().max() <= 1  # Rounding to 8 bits.


@pytest.mark.parametrize(
    ("distributed", "said"),
    [
        ({"processes": 4}, "a step of ar has 3 prompts .*Expected at most 3"),
        ({"processes": 0}, "greater than or equal"),
    ],
)
def test_processes_that_would_have_nothing_to_do_are_refused(tmp_path: Path, distributed: Any, said: str) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        check(joint(tmp_path, distributed["processes"]))


def test_a_resumed_training_can_read_a_step_of_several_processes(pipeline_folder: Path, tmp_path: Path) -> None:
    assert processes.start_workers(joint(tmp_path, 1), str(pipeline_folder), None) is None
    resumed = processes.start_workers(joint(tmp_path, 1, resume="auto"), str(pipeline_folder), None)
    assert resumed is not None
    assert resumed.count == 1
