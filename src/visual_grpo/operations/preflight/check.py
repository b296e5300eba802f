"""All checks in one order, and the parameters as they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from visual_grpo.common.errors import Problems, UserError
from visual_grpo.config import Parameters
from visual_grpo.config.command import Command
from visual_grpo.config.defaults import AUTO, pinned
from visual_grpo.config.schema import validate
from visual_grpo.operations.preflight.configuration import check, check_model

if TYPE_CHECKING:
    from visual_grpo.common.types import PromptRecord
    from visual_grpo.operations.preflight.data import Findings

SCORED = {"baseline", "adapters", "trained", "reward_report"}
"""Datasets that the rewards make."""
OF_THE_MODEL = SCORED | {"starter_report"}
DRAWN_WITH_IT = {"generated", "comparison", "promotion", "votes"}
"""Datasets that need the model, but of the rewards nothing."""


def resolve_parameters(
    config: Parameters, outputs: set[str], prepared: Callable[[], Iterable[PromptRecord]], command: Command
) -> Parameters:
    """Returns the parameters with the rewards that ``reward: auto`` stands for; writes nothing.

    Args:
        outputs: datasets that the run makes, which decide what is looked at.
        prepared: the prepared records, for a run that does not prepare them itself.
        command: of the run, to print what to run instead.

    Raises:
        UserError: what does not fit, all of it in one message.
    """
    problems, findings, scores = Problems(), None, bool(SCORED & outputs)
    with problems.collect():
        findings = _look(config, outputs, prepared, command)
    if findings is not None:
        problems.texts += findings.problems
        if scores and config.reward == AUTO and findings.traits.records:
            with problems.collect():
                preset = findings.traits.require_preset(config.data.path, command)
                config = validate({**pinned(config.model_dump()), "reward": preset})
    if OF_THE_MODEL & outputs:
        with problems.collect():
            check(config, scores=scores)
    elif DRAWN_WITH_IT & outputs:
        with problems.collect():
            check_model(config)
    if findings is not None and config.reward != AUTO and scores:
        with problems.collect():
            _check_records(config, findings)
    problems.raise_if_any()
    return config


def _look(
    config: Parameters, outputs: set[str], prepared: Callable[[], Iterable[PromptRecord]], command: Command
) -> Findings | None:
    """Looks at the user's own data; what the starter draws is known."""
    from visual_grpo.training import components

    if config.data_is_drawn or not outputs & {"records", *SCORED}:
        return None
    from visual_grpo.operations.preflight.data import OF_A_RECORD, look_at_folder, look_at_table

    if "records" not in outputs:
        return look_at_table(prepared(), config.data.task, every=config.reward == AUTO)
    tasks = OF_A_RECORD
    with suppress(UserError):  # `check` tells it.
        tasks = components.family_of(config).tasks
    return look_at_folder(config.data, tasks, command)


def _check_records(config: Parameters, findings: Findings) -> None:
    """Raises UserError for records that lack what a reward compares with."""
    from visual_grpo.rewards.catalogue import build_reward
    from visual_grpo.rewards.combine import RewardSet

    made = {}
    for name, reward in config.rewards.items():
        with suppress(UserError):  # `check` has told it.
            made[name] = (build_reward(name, reward), 1.0)
    if made and findings.sample:
        RewardSet(made).check_records(findings.sample)
