"""Checks before the first node: the commits of what is on the hub, the data, the model, the rewards and the device.

They complete the parameters: commits, and the rewards that fit the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from visual_grpo.common.device import require_bitsandbytes, require_fast, resolve_device
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import Problems, UserError, counted, sentence
from visual_grpo.common.types import Needs, PromptRecord
from visual_grpo.config import DataConfig, ModelConfig, ModuleConfig, Parameters, RewardConfig
from visual_grpo.config.presets import AUTO, LISTED, TARGET_JUDGE, optimised_rewards
from visual_grpo.config.validation import with_chosen, with_target_judge
from visual_grpo.models.family import Family, find_family, is_own
from visual_grpo.models.flow.references import taken
from visual_grpo.models.hub import look_up, weights_bytes
from visual_grpo.models.loading import saved_class
from visual_grpo.models.lora_fit import require_mergeable
from visual_grpo.models.lora_lookup import lora_at_commit, merged_lora
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.operations.preflight.findings import OF_A_RECORD, Findings, look_at_folder, look_at_table
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.judges import require_independent_judges
from visual_grpo.starter.worlds import require_functions
from visual_grpo.training import components

_MUCH = 1e9
"""Bytes of a model's weights."""


def check(config: Parameters, *, scores: bool = True) -> RunSpec:
    """Resolves the parameters. Raises UserError with all that is missing or does not fit; loads no model.

    ``scores``: anything will be scored, so that what the rewards need must be on this machine.
    """
    problems, spec = Problems(), None
    with problems.collect():
        spec = check_model(config)
        _check_processes(spec)
    _check_rewards(config.rewards, spec, problems, scores)
    with problems.collect():
        if config.grpo.optimizer != "adamw":
            require_bitsandbytes("grpo.optimizer", config.grpo.optimizer)
    with problems.collect():
        _check_gpus(config.distributed.processes, config.model)
    problems.raise_if_any()
    assert spec is not None, "a problem otherwise"
    return spec


def check_model(config: Parameters) -> RunSpec:
    """Resolves the parameters. Raises UserError where the model's folder holds none, or the library for
    ``model.base_weights`` is missing; loads no model."""
    if config.model.base_weights != "full":
        require_bitsandbytes("model.base_weights", config.model.base_weights)
    spec = resolve(config)
    if not config.model_is_pretrained and not is_own(config.model.family):
        class_name = saved_class(config.model.path, config.model.revision)
        if class_name not in spec.family.saved_as:
            raise UserError(
                f"model.family is {spec.family.name}, which loads {', '.join(spec.family.saved_as)}, but the model at"
                f" {config.model.path} is a {class_name}. With model.family=auto the model chooses its family."
            )
    if config.model.lora is not None and not config.model_is_pretrained:
        require_mergeable(spec, merged_lora(config.model.lora))
    return spec


def pinned(config: Parameters) -> tuple[Parameters, list[str]]:
    """Returns the parameters with the commit of a model on the hub as ``model.revision``, and of a LoRA on the hub in
    ``model.lora``, and what to tell of it.

    Every load and every record of the command is of that commit. Raises UserError where the model cannot be had.
    """
    changes, notes = dict[str, str](), list[str]()
    if not config.model_is_pretrained and may_be_hub_id(config.model.path):
        found = look_up(config.model.path, config.model.revision)
        changes["revision"] = found.commit
        notes = [*found.notes, *_slow(config, found.cached + found.to_download)]
    elif not config.model_is_pretrained:
        notes = list(_slow(config, weights_bytes(Path(config.model.path).expanduser())))
    if config.model.lora is not None:
        changes["lora"] = lora_at_commit(config.model.lora, "model.lora")
    return config.model_copy(update={"model": config.model.model_copy(update=changes)}), notes


def _slow(config: Parameters, weights: int) -> Iterator[str]:
    """Yields a warning for a model with large ``weights`` (bytes) on a CPU."""
    if weights > _MUCH and resolve_device(config.model.device).type == "cpu":
        yield (
            f"Warning: the model has {weights / 1e9:.1f} GB of weights and runs on the CPU (model.device is"
            f" {config.model.device}). A sample takes minutes to hours, and a training days to months. Use a GPU:"
            " --pipeline=plan says which one is large enough."
        )


def _check_processes(spec: RunSpec) -> None:
    count = spec.config.distributed.processes
    prompts, module = min((spec.config.grpo_of(module).prompts_per_step, module) for module in spec.modules)
    if count > prompts:
        raise UserError(
            f"distributed.processes is {count}, but a step of {module} has {counted(prompts, 'prompt')}"
            f" (grpo.prompts_per_step), and each stays in one process. Expected at most {prompts}."
        )


def _check_gpus(processes: int, model: ModelConfig) -> None:
    count, present = int(os.environ.get("LOCAL_WORLD_SIZE", processes)), torch.cuda.device_count()
    device = resolve_device(model.device)
    if device.type == "cuda" and count > max(1, present):
        raise UserError(
            f"distributed.processes is {count}, but this machine has {counted(present, 'GPU')}: each process needs one."
        )
    require_fast(model.dtype, device)


def _check_rewards(rewards: Mapping[str, RewardConfig], spec: RunSpec | None, problems: Problems, scores: bool) -> None:
    """Notes every reward that cannot be made; for each module there must be one to optimise."""
    before = len(problems.errors)
    for name, reward in rewards.items():
        with problems.collect():
            made = build_reward(name, reward)
            try:
                if scores:
                    made.check_machine()
            except UserError as error:
                if not reward.judge:
                    raise
                without = f"To train without this second opinion: rewards.{name}=null"
                raise UserError(f"{sentence(str(error).rstrip('.'))} {without}", remedy=error.remedy) from error
    if spec is None:
        return
    with problems.collect():
        _check_only_where(spec)
    if spec.config.reward == AUTO or len(problems.errors) > before:
        return
    with problems.collect():
        optimised = sorted(optimised_rewards(spec.config.public()))
        require_independent_judges(rewards, optimised, spec.config.output)
    with problems.collect():
        spec.config.weights(spec.modules)
    with problems.collect():
        _check_frames(spec)
    for module in spec.modules:
        with problems.collect():
            own = spec.config.modules.get(module, ModuleConfig()).rewards
            if own and not any(spec.config.weights([module]).values()):
                raise UserError(f"nothing to optimise: with modules.{module}.rewards, all its rewards have weight 0")
            components.build_scorer(spec, [module]).check_samples(videos=spec.config.data.frames is not None)


def _check_only_where(spec: RunSpec) -> None:
    """A reward of both signs has no worst score for all modules, and both are judged together."""
    for name, reward in spec.config.rewards.items():
        weights = [spec.config.weights([module])[name] for module in spec.modules]
        if reward.only_where and min(weights, default=0.0) < 0 < max(weights, default=0.0):
            raise UserError(
                f"rewards.{name}.only_where: the reward's worst score depends on the sign of its weight, and"
                f" the modules have both: {weights}. Expected weights of one sign; or name the function twice"
            )


def _check_frames(spec: RunSpec) -> None:
    """Raises UserError where training samples have frames that their targets, which are prepared, have not."""
    trained, prepared = spec.rollout_settings.frames or 0, spec.config.data.frames or 0
    for name, reward in spec.config.rewards.items() if trained > prepared else ():
        if reward.frames not in (None, "first") and not reward.judge and build_reward(name, reward).needs.target:
            raise UserError(
                f"sampling.rollout.frames is {trained}, but target videos have {prepared} frames (data.frames), with"
                f" which {name} compares frame by frame. Expected at most {prepared}, or rewards.{name}.frames=first"
            )


def _check_alarm(config: Parameters) -> None:
    """Raises UserError where the only evaluation is the last: there is nothing left to end, and no earlier adapter."""
    action, every, steps = config.alarm.action, config.evaluation.every, config.grpo.steps
    if action != "warn" and not 0 < every < steps:
        raise UserError(
            f"alarm.action is {action}, which needs an evaluation before the last step, and there is none:"
            f" evaluation.every is {every}, and grpo.steps is {steps}. Set evaluation.every to at least 1 and below"
            " grpo.steps, or alarm.action=warn"
        )


def check_before_run(
    config: Parameters,
    outputs: set[str],
    tags: set[str],
    prepared: Callable[[], Iterable[PromptRecord]],
) -> tuple[Parameters, RunSpec | None, list[str]]:
    """Returns the parameters with the rewards that the records decide, resolved if a node needs the model, and what to
    tell about judges.

    Writes no file.

    Args:
        outputs: datasets that the run makes.
        tags: of its nodes (`visual_grpo.pipelines`): what they need decides what is looked at.
        prepared: the prepared records, for a run that does not prepare them itself.

    Raises:
        UserError: what does not fit, all of it in one message.
    """
    problems, findings, scores, notes = Problems(), None, "rewards" in tags, list[str]()
    with problems.collect():
        if {"training", "model"} & tags:
            config, notes = pinned(config)
    problems.raise_if_any()  # What is looked at depends on the model.
    given = config
    with problems.collect():
        if not config.data_is_rendered and ("records" in outputs or scores):  # What the starter renders is known.
            prepares = "records" in outputs
            findings = _look(config.data, config.model, None if prepares else prepared, every=config.reward != LISTED)
    if findings is not None:
        problems.errors += findings.problems
        if scores and config.reward == AUTO and findings.records:
            with problems.collect():
                config = with_chosen(config, findings.require_preset(config.data.path))
        if scores and config.reward != AUTO and findings.having(Needs(target=True)):
            config = with_target_judge(config)
    spec = _resolved(config, outputs, tags, problems)
    if findings is not None and spec is not None:
        with problems.collect():
            _check_sources(spec.family, findings)
    if findings is not None and config.reward != AUTO and scores:
        with problems.collect():
            _check_records(config.rewards, findings)
    problems.raise_if_any()
    notes += _judge_notes(given, config, findings) if findings is not None and scores else []
    if findings is not None and findings.note is not None:
        notes.append(f"Note: {sentence(findings.note)}")
    return config, spec, notes


def _resolved(config: Parameters, outputs: set[str], tags: set[str], problems: Problems) -> RunSpec | None:
    """Resolves the parameters if a node needs the model, and notes what does not fit."""
    if "base_model" in outputs:
        with problems.collect():
            require_functions(config)
    if "adapters" in outputs:
        with problems.collect():
            _check_alarm(config)
    with problems.collect():
        if "training" in tags:
            return check(config, scores="rewards" in tags)
        if "model" in tags:
            return check_model(config)
    return None


def _look(
    data: DataConfig, model: ModelConfig, prepared: Callable[[], Iterable[PromptRecord]] | None, *, every: bool
) -> Findings:
    """Looks at the user's own data: those that are prepared, if they are."""
    if prepared is not None:
        return look_at_table(prepared(), data.task, every=every)
    tasks = OF_A_RECORD
    with suppress(UserError):  # `check` tells it.
        tasks = find_family(model.family, model.path, model.revision).tasks
    return look_at_folder(data, tasks)


def _check_sources(family: Family, findings: Findings) -> None:
    """Raises UserError for records with more or fewer source images than the family takes."""
    for count, record in findings.sources.items():
        if family.sources is not None and count not in family.sources:
            raise UserError(
                f"The family {family.name} takes {taken(family.sources)}, and the record {record!r} has {count}. Leave"
                " images out, or train a model that takes them (docs/own_model.md)."
            )


def _check_records(rewards: Mapping[str, RewardConfig], findings: Findings) -> None:
    """Raises UserError for records that lack what a reward compares with; of a judge, where all of them do."""
    made = {}
    for name, reward in rewards.items():
        with suppress(UserError):  # `check` has told it.
            made[name] = (build_reward(name, reward), 1.0)
    if not made or not findings.sample:
        return
    problems = Problems()
    with problems.collect():
        RewardSet(made).check_records(findings.sample)
    for name, (function, _) in made.items():
        if function.judge_of is not None and not findings.having(function.needs):
            text = f"the judge {name} compares with {_images(function.needs)}, and none of {findings.all_records()} has"
            text += f" one: add it to some of them, or leave the judge out (rewards.{name}=null)"
            problems.errors.append(UserError(text))
    problems.raise_if_any()


def _judge_notes(given: Parameters, config: Parameters, findings: Findings) -> list[str]:
    """Tells which judge was added to the ``given`` parameters, and which say nothing of some records."""
    notes = []
    for name, reward in config.rewards.items():
        needs = build_reward(name, reward).needs if reward.judge else Needs()
        having, is_new = findings.having(needs), name == TARGET_JUDGE and name not in given.rewards
        if is_new:
            notes.append(
                f"Judge {name}, added because records have target images: a second opinion on the reward, at the"
                f" baseline and the evaluations. The model is not trained on it. To leave it out: rewards.{name}=null"
            )
        if having < findings.records:
            notes.append(
                f"Judge {name} scores only samples of the {having} of {findings.all_records()} that have"
                f" {_images(needs)}."
            )
    return notes


def _images(needs: Needs) -> str:
    return " and ".join(f"a {kind} image" for kind in ("target", "source") if getattr(needs, kind))
