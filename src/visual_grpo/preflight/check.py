"""All checks in one order, and the parameters as they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from visual_grpo import components
from visual_grpo.command import Command
from visual_grpo.config import Parameters, Task
from visual_grpo.config.presets import AUTO, pinned
from visual_grpo.config.validation import validate
from visual_grpo.errors import Problems, UserError
from visual_grpo.preflight.configuration import check, check_model

if TYPE_CHECKING:
    from visual_grpo.preflight.data import Findings
    from visual_grpo.types import PromptRecord

RECORDS = "records"
SCORED = {"baseline", "adapters", "trained", "reward_report"}
"""Datasets that the rewards make."""
OF_THE_MODEL = SCORED | {"starter_report"}
DRAWN_WITH_IT = {"generated", "comparison", "promotion", "votes"}
"""Datasets that need the model, but of the rewards nothing."""


def settled(
    config: Parameters, outputs: set[str], prepared: Callable[[], Iterable[PromptRecord]], command: Command
) -> Parameters:
    """The parameters with the rewards that ``reward: auto`` stands for.

    Args:
        outputs: datasets that the run makes, which decide what is looked at.
        prepared: the prepared records, for a run that does not prepare them itself.
        command: of the run, to print what to run instead.

    Raises:
        UserError: what does not fit, all of it in one message.
    """
    problems = Problems()
    findings = None
    with problems.collect():
        findings = _look(config, outputs, prepared)
    if findings is not None:
        command = command.adding(findings.added)
        problems.texts += findings.problems
        config = _with(config, findings.added)
        if findings.environment is not None:  # What else it needs is not known here.
            problems.raise_if_any(f"Run:\n{command.of_environment(findings.environment)}")
    chosen = _choose(config, outputs, findings, problems, command)
    if OF_THE_MODEL & outputs:
        with problems.collect():
            check(chosen, scores=bool(SCORED & outputs))
    elif DRAWN_WITH_IT & outputs:
        with problems.collect():
            check_model(chosen)
    if findings is not None and chosen.reward != AUTO and SCORED & outputs:
        _check_records(chosen, findings, problems)
    # Where a reward has to be chosen, the lines for that have the other parameters too.
    solved = findings is not None and findings.added and chosen.reward != AUTO
    problems.raise_if_any(f"Run:\n{command}" if solved else "")
    return chosen


def _look(config: Parameters, outputs: set[str], prepared: Callable[[], Iterable[PromptRecord]]) -> Findings | None:
    """At the user's own data; what the starter draws is known."""
    if config.data_is_drawn or not outputs & {RECORDS, *SCORED}:
        return None
    from visual_grpo.preflight.data import look_at_folder, look_at_table

    if RECORDS in outputs:
        return look_at_folder(config.data, partial(_tasks_of_the_model, config))
    return look_at_table(prepared(), config.data.task, every=config.reward == AUTO)


def _tasks_of_the_model(config: Parameters) -> Sequence[Task]:
    from visual_grpo.preflight.data import OF_A_RECORD

    try:
        return components.family_of(config).tasks
    except UserError:  # Told when the model is looked at.
        return OF_A_RECORD


def _choose(
    config: Parameters, outputs: set[str], findings: Findings | None, problems: Problems, command: Command
) -> Parameters:
    if config.reward != AUTO or findings is None or not SCORED & outputs or not findings.traits.records:
        return config
    preset = findings.traits.preset()
    if preset is not None:
        return _with(config, {"reward": preset})
    from visual_grpo.preflight.reward import no_preset_fits

    problems.texts.append(no_preset_fits(findings.traits, config.data.path, command))
    return config


def _check_records(config: Parameters, findings: Findings, problems: Problems) -> None:
    """Notes what the rewards lack in the records; rewards that cannot be made have been noted before."""
    from visual_grpo.rewards.catalogue import build_reward
    from visual_grpo.rewards.combine import RewardSet

    unmade = Problems()
    made: dict[str, Any] = {}
    for name, reward in config.rewards.items():
        with unmade.collect():
            made[name] = (build_reward(name, reward), 1.0)
    if made and findings.sample:
        with problems.collect():
            RewardSet(made).check_records(findings.sample)


def _with(config: Parameters, changes: dict[str, Any]) -> Parameters:
    """The parameters with other values by their dotted names."""
    tree = pinned(config.model_dump())
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = tree
        for part in sections:
            section = section[part]
        section[key] = value
    return validate(tree)
