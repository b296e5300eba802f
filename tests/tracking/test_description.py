"""What MLflow shows of a run: its name, and the metrics to compare runs by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric_name, _validate_param_name

from tests.evaluation.defaults import parameters
from tests.grpo.test_trainer import trained
from tests.toys import ToyTokenPolicy
from tests.tracking.toy_adapters import with_facts
from visual_grpo.hooks.tracking import changed_parameters, renamed, run_name
from visual_grpo.tracking.model_card import model_card
from visual_grpo.tracking.sync import result_metrics, tracked, training_params

BOTH = ("ar", "dit")


@pytest.mark.parametrize(
    ("changes", "modules", "environment", "given", "name"),
    [
        ({}, BOTH, None, {}, "ar+dit"),
        ({"policy": {"stages": "joint"}}, BOTH, None, {"policy.stages": "joint"}, "ar+dit joint"),
        ({"policy": {"stages": "joint"}}, ("ar",), None, {}, "ar"),
        ({"data": {"path": "a/photos"}}, ("dit",), "sd3", {"seed": 1}, "seed=1 sd3 photos dit"),
        ({}, ("ar",), None, {"modules.ar.learning_rate": 7e-4}, "learning_rate=0.0007 ar"),
        ({}, ("ar",), None, {"reward": "text", "grpo.target_kl": None}, "reward=text target_kl=null ar"),
        ({}, ("ar",), None, dict.fromkeys("abc", 1), "a=1 b=1 ... ar"),
        ({}, (), "text", {}, "text starter+baseline+labels+score"),
    ],
)
def test_a_run_is_named_by_what_differs(
    changes: dict[str, Any], modules: tuple[str, ...], environment: str | None, given: dict[str, Any], name: str
) -> None:
    # Kedro makes a set of the names of pipelines that it is given.
    names = ["score", "baseline", "starter", "labels"]
    assert run_name(parameters(**changes), modules, names, environment, given) == name


def test_given_parameters_and_what_differs_from_the_adapters_in_the_folder_are_changed(tmp_path: Path) -> None:
    config = parameters(grpo={"steps": 40, "kl_weight": 0.5}, train={"seed": 1})
    given = dict.fromkeys(["grpo.steps", "output", "resume", "rewards.missing", "retrain.address"])
    assert changed_parameters(config, tmp_path, given) == {"grpo.steps": 40}
    with_facts(tmp_path, "base", parameters(grpo={"steps": 40}))
    assert changed_parameters(config, tmp_path, {"grpo.steps": 40}) == {
        "grpo.steps": 40,
        "grpo.kl_weight": 0.5,
        "train.seed": 1,
    }
    assert changed_parameters(config, tmp_path / "none", {"reward": "ocr"}) == {"reward": "ocr"}, (
        "its rewards are listed by now"
    )


@pytest.mark.parametrize(
    ("name", "changed", "now"),
    [
        ("rollouts=0 steps=5 ar+dit", {"resume": "auto"}, "rollouts=0 steps=5 ar+dit"),
        ("rollouts=0 steps=5 ar+dit", {"grpo.steps": 20}, "rollouts=0 steps=20 ar+dit"),
        ("kl_weight=0.1 ar+dit joint", {"grpo.steps": 20}, "steps=20 kl_weight=0.1 ar+dit joint"),
        ("controls=[1, 2] steps=50 ar", {"grpo.steps": 20}, "steps=20 controls=[1, 2] steps=50 ar"),
    ],
)
def test_a_resumed_run_keeps_its_name_with_new_values(name: str, changed: dict[str, Any], now: str) -> None:
    before = {"resume": "never", "grpo.steps": 5, "grpo.kl_weight": 0.1}
    assert renamed(name, before, before | changed) == now


COLUMNS = ["reward/total", "reward/total_std", "reward/shapes", "reward/shapes_std", "part/shapes/all", "kl", "entropy"]
ROW = {f"{module}/{name}": 1.0 for module in ("ar", "dit") for name in COLUMNS} | {
    "step": 3.0,
    "reward/total": 2.0,
    "eval/total": 3.0,
    "seconds/cpu": 4.0,
    "seconds/step": 5.0,
}


def test_of_several_modules_each_has_its_curves() -> None:
    both = tracked(ROW, ("ar", "dit"), ("shapes",))
    own = {"reward/total", "reward/total_std", "reward/shapes", "kl", "entropy"}
    shared = {"reward/total": 2.0, "eval/total": 3.0, "seconds/step": 5.0}
    assert both == {f"{module}/{name}": 1.0 for module in ("ar", "dit") for name in own} | shared


def test_a_single_module_has_no_prefix() -> None:
    row = dict.fromkeys([*COLUMNS, "ar/kl"], 1.0)
    assert tracked(row, ("vl",), ()).keys() == {"reward/total", "reward/total_std", "kl", "entropy"}


def test_a_metric_of_a_step_is_sent_unless_it_is_a_detail() -> None:
    options: dict[str, Any] = {"kl_weight": 0.1, "target_kl": 0.01, "updates_per_rollout": 2, "non_finite": "skip"}
    _, (step, *_) = trained(ToyTokenPolicy(), **options)
    details = {"loss", "advantage/mean", "ratio/mean", "samples", "speed/decisions_per_second", "reward/count_std"}
    left = {name for name in step.values if not name.startswith(("seconds/", "update_"))}
    assert left - tracked(step.values, ("vl",), ("count",)).keys() == details


def test_the_column_of_judges_is_that_of_the_strictest() -> None:
    judges = [
        {"name": name, "difference": value, "ci_low": value - 0.1, "ci_high": value + 0.1}
        for name, value in (("kind", 0.3), ("strict", -0.2), ("mild", 0.1))
    ]
    headline = dict.fromkeys(("difference", "ci_low", "ci_high", "baseline", "trained"), 0.5)
    headline |= {"unscored_trained": 0, "unscored_baseline": 0, "prompts": 5}
    metrics = result_metrics({**headline, "task": None, "control": None, "judges": judges})
    assert metrics["result/by_judge"] == -0.2
    assert metrics["result/judge/kind"] == 0.3


@pytest.mark.parametrize("name", ["clip+hps", "a,b", "x(1)", "", "..", "a//b", "my reward", "größe", "v1.5:b-2", "a/b"])
def test_a_reward_has_a_name_that_mlflow_takes(name: str) -> None:
    try:
        _validate_metric_name(f"reward/{name}")
    except MlflowException:
        with pytest.raises(ValueError, match=r"no metric that is named after .*: use letters, digits, spaces"):
            parameters(rewards={name: {"function": "my:f"}})
    else:
        assert name in parameters(rewards={name: {"function": "my:f"}}).rewards


def test_options_whose_names_mlflow_refuses_are_one_value() -> None:
    options = {"plain": {"least": 0.7, "by": {"red": 1}}, "mine": {"least": 0.7, "by": {"red (dark)": 1, "50%": 2}}}
    config = parameters(rewards={name: {"function": "my:f", "options": own} for name, own in options.items()})
    params = training_params(config.public())
    for name in params:
        _validate_param_name(name)
    assert (params["rewards.plain.options.by.red"], params["rewards.plain.options.least"]) == (1, 0.7)
    assert params["rewards.mine.options"] == '{"least": 0.7, "by": {"red (dark)": 1, "50%": 2}}'


def test_a_card_names_the_step_of_the_adapter_and_the_weights_of_each_module() -> None:
    rewards = {"rewards": {"psnr": {"weight": 1.0}}, "reward": None}
    config = parameters(**rewards, modules={"ar": {"rewards": {"psnr": 2.0}}, "dit": {"rewards": {"psnr": 0.5}}})
    facts = {"parameters": config.model_dump(mode="json"), "model": "m", "data": "d", "seed": 0, "samples": 9}
    facts |= {"steps": 80, "best_step": 40, "mlflow_run_id": None}
    for adapter, step in {"best": 40, "last": 80}.items():
        card = model_card({**facts, "adapter": adapter}, BOTH)
        assert f"- Adapter: of the {adapter} step ({step})\n" in card
    shown = {line.split(":")[0]: line for line in card.splitlines() if line.startswith("- Of ")}
    assert "psnr 2" in shown["- Of ar"]
    assert "psnr 0.5" in shown["- Of dit"]
