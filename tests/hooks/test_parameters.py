"""What a command is given is refused with its name before anything is touched, whatever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from tests.small_project import ROOT
from visual_grpo.common.errors import UserError
from visual_grpo.hooks.cli import parsed
from visual_grpo.hooks.parameters import ParameterHooks
from visual_grpo.settings import CONFIG_LOADER_ARGS


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("tracking=3", "tracking = 3"),
        ("rewards=3", "rewards = 3"),
        ("data=null", "data = None"),
        ("starter=3", "starter = 3"),
        ("data.path=3", "data.path = 3"),
        ("data.path=[1]", r"data.path = \[1\]"),
        ("tracking.checkpoints=3,resume=auto", "tracking.checkpoints = 3"),
        ("resume=null", "resume = None"),
        ("seed=3 grpo.steps=2", "seed = '3 grpo.steps=2'"),
        ("grpo..steps=3", "grpo.: there is no such parameter"),
        (".a=3", "there is no such parameter"),
    ],
)
def test_a_slip_is_named(given: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        ParameterHooks().after_context_created(context_of(given))


def test_grpo_parameters_of_the_command_line_replace_those_of_single_modules() -> None:
    """conf/base sets another learning rate and KL weight for dit."""
    hooks = ParameterHooks()
    hooks.after_context_created(context_of("grpo.learning_rate=1e-4,grpo.kl_weight=0.02,modules.dit.kl_weight=0.03"))
    dit = hooks._parameters.grpo_of("dit")
    assert (dit.learning_rate, dit.kl_weight, dit.advantage_epsilon) == (1e-4, 0.03, 0.03)


def context_of(given: str) -> Any:
    loader = OmegaConfigLoader(str(ROOT / "conf"), env="local", runtime_params=parsed(given), **CONFIG_LOADER_ARGS)
    return SimpleNamespace(config_loader=loader, env="local")
