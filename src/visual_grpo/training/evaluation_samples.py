"""Draws and scores the samples that results are judged by, of the base model and of trained adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.device import device_kind
from visual_grpo.common.digests import option_files
from visual_grpo.common.importing import code_digest
from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation.samples import SPLITS, Request, generate_and_score, generate_batches, held_out, plan_images
from visual_grpo.grpo.distributed import launch, ranks
from visual_grpo.grpo.distributed.policy import DistributedModel
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.catalogue import reward_commits, transport_of
from visual_grpo.training import components


def generate_samples(
    folder: Path,
    config: Parameters,
    base_model: dict[str, Any],
    records: RecordTable,
    *,
    adapters: Path | None,
    title: str,
) -> None:
    """Draws and scores every eval and held-out sample into ``folder``; without adapters also those of the controls.

    Samples depend on parameters, model, records and adapters only, so that baseline and trained ones pair. Records are
    checked against the rewards before the model is loaded.
    """
    components.check_unchanged(base_model, config.model.path)
    spec = components.make_run_spec(config, base_model["model"])
    scorer = components.build_scorer(config, spec.modules)
    splits = {split: records.split(split) for split in SPLITS}
    for split in splits.values():
        scorer.check_records(split)
    requests = plan_images(
        splits,
        seed=config.evaluation.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    controls = spec.controls if adapters is None else {}
    asked = [requests] * len(spec.samplers) + [held_out(requests)] * len(controls)
    batches = list(zip([*spec.samplers.values(), *controls.values()], asked, strict=True))
    model = base_model["model"]
    with (
        launch.running_ranks(config, generate_on_rank, model=model, adapters=adapters, batches=batches),
        console.progress(title, sum(map(len, asked))) as bar,
    ):
        generate_and_score(
            _load(config, model, adapters),
            scorer,
            requests,
            spec.samplers,
            folder,
            batch_size=_batch_size(config),
            controls=controls,
            conditions=conditions(config, spec, base_model, records),
            advance=bar.advance,
        )


def generate_on_rank(
    config: Parameters, model: str, adapters: Path | None, batches: Sequence[tuple[SamplerConfig, Sequence[Request]]]
) -> None:
    """Generates this rank's part of a baseline or an evaluation, which rank 0 scores and saves."""
    loaded = _load(config, model, adapters)
    for sampler, requests in batches:
        for _ in generate_batches(loaded, requests, sampler, _batch_size(config)):
            pass


def _load(config: Parameters, model: str, adapters: Path | None) -> DistributedModel:
    return DistributedModel(ranks.run_on_all(lambda: components.build_model(config, model, adapters)))


def _batch_size(config: Parameters) -> int:
    return config.evaluation.batch_size * config.distributed.processes


def conditions(
    config: Parameters, spec: RunSpec, base_model: Mapping[str, Any], records: RecordTable
) -> dict[str, Any]:
    """Returns everything but the adapters that samples and scores depend on: equal for two results that pair.

    Weights of rewards are left out: a total can be computed again from the scores.
    """
    tree = config.public()
    samplers = {"sampling": spec.samplers, "controls": spec.controls}
    commits = reward_commits(config.rewards)
    return {
        "seed": config.evaluation.seed,
        "model": {
            "digest": base_model["digest"],
            "content": base_model["content"],
            "dtype": config.model.dtype,
            "device": device_kind(config.model.device),
            "base_weights": config.model.base_weights,
        },
        "dataset": records.digest,
        "data": {side: tree["data"][side] for side in ("height", "width")},
        **{kind: {name: s.model_dump(mode="json") for name, s in found.items()} for kind, found in samplers.items()},
        "flow": tree["policy"]["flow"] if any(sampler.stochastic for sampler in spec.samplers.values()) else None,
        "options": tree["model"]["options"],
        "rewards": {
            name: _reward_conditions(name, reward, config.output) | {"commits": commits.get(name, {})}
            for name, reward in tree["rewards"].items()
        },
        "evaluation": {name: tree["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
    }


def _reward_conditions(name: str, reward: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Returns what a reward's scores depend on, with digests of files in its options and of a user's code."""
    function = reward["function"]
    transport = transport_of(name, function)
    options = {option: value for option, value in reward["options"].items() if option not in transport}
    return {
        "function": function,
        "options": options,
        "clip": list(reward["clip"]),
        "only_where": reward["only_where"],
        "files": option_files(options, output),
        **({} if function is None else {"code": code_digest(function)}),
    }
