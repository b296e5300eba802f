"""Draws the reference policy's samples for the eval and held-out prompts and scores them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.device import device_kind
from visual_grpo.common.digests import option_files, tree_digest
from visual_grpo.common.files import final_of
from visual_grpo.common.importing import code_digest
from visual_grpo.config import Parameters, flatten
from visual_grpo.data.table import RecordTable
from visual_grpo.evaluation.draw import SPLITS, draw_and_score, held_out, plan_images
from visual_grpo.grpo.distributed import group, launch
from visual_grpo.grpo.distributed.policy import follow, leading
from visual_grpo.models.family import Model
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.catalogue import reward_commits, transport_of
from visual_grpo.training import components
from visual_grpo.training.cache_key import cache_key
from visual_grpo.training.runtime_fingerprint import MEANING, runtime_fingerprint

STAMP = "made_with.json"
"""File in the baseline's folder: what it depends on, and the digest of its other files."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def draw_baseline(
    parameters: Parameters, starter_report: dict[str, Any], records: RecordTable, baseline_draft: Path
) -> Path:
    """The folder with pictures and scores of the policy without an adapter, also at each control's settings.

    The one that is there is kept where it is what would be drawn.
    """
    components.check_unchanged(starter_report)
    spec = components.make_run_spec(parameters, starter_report["model"])
    made = _made_with(parameters, starter_report, conditions(parameters, spec, starter_report, records))
    present = final_of(baseline_draft)
    why = "evaluation.redraw is true" if parameters.evaluation.redraw else _why_drawn(present, made)
    if why is None:
        console.note(f"Kept the baseline in {present}: nothing that it depends on has changed (evaluation.redraw)")
        return present
    if present.is_dir():
        console.note(f"The baseline is drawn again: {why}")
    draw_samples(baseline_draft, parameters, starter_report, records, adapters=None, title="baseline")
    stamp = {"made": made, "digest": _digest(baseline_draft)}
    (baseline_draft / STAMP).write_text(json.dumps(stamp, indent=1, ensure_ascii=False), encoding="utf-8")
    return baseline_draft


def draw_samples(
    folder: Path,
    config: Parameters,
    starter_report: dict[str, Any],
    records: RecordTable,
    *,
    adapters: Path | None,
    title: str,
) -> None:
    """Draws and scores every eval and held-out sample into ``folder``; without adapters the controls', too.

    They depend on parameters, model, records and adapter only, so that baseline and trained ones pair. That they can
    be scored is checked before the model is loaded.
    """
    components.check_unchanged(starter_report)
    spec = components.make_run_spec(config, starter_report["model"])
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
    count = len(requests) * len(spec.samplers) + len(held_out(requests)) * len(controls)
    with (
        launch.ranks(config, draw_on_rank, model=starter_report["model"], adapters=adapters),
        console.progress(title, count) as bar,
        leading(_load(config, starter_report["model"], adapters)) as model,
    ):
        draw_and_score(
            model,
            scorer,
            requests,
            spec.samplers,
            folder,
            batch_size=config.evaluation.batch_size * config.distributed.processes,
            controls=controls,
            facts=conditions(config, spec, starter_report, records),
            advance=bar.advance,
        )


def draw_on_rank(config: Parameters, model: str, adapters: Path | None) -> None:
    """Follows the first rank while it draws a baseline or an evaluation."""
    follow(_load(config, model, adapters))


def _load(config: Parameters, model: str, adapters: Path | None) -> Model:
    return group.together(lambda: components.build_model(config, model, adapters))


def conditions(
    config: Parameters, spec: RunSpec, starter_report: Mapping[str, Any], records: RecordTable
) -> dict[str, Any]:
    """Everything but the adapter that samples and scores depend on: equal for two results that pair.

    The weights of the rewards are not among it: a total can be computed again from the scores.
    """
    tree = config.public()
    samplers = {"sampling": spec.samplers, "controls": spec.controls}
    commits = reward_commits(config.rewards)
    return {
        "seed": config.evaluation.seed,
        "model": {
            "digest": starter_report["digest"],
            "content": starter_report["content"],
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
            name: _judge(name, reward, config.output) | {"commits": commits.get(name, {})}
            for name, reward in tree["rewards"].items()
        },
        "evaluation": {name: tree["evaluation"][name] for name in ("images_per_prompt", "max_prompts")},
    }


def _judge(name: str, reward: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Everything that a reward's scores depend on, with the files in its options and the code of a user's function."""
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


def _made_with(config: Parameters, starter_report: Mapping[str, Any], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a baseline depends on, as JSON: the conditions under which two results pair, what changes
    rounding, weights of rewards, and code."""
    known = starter_report["content"] is not None or _COMMIT.fullmatch(config.model.revision or "") is not None
    made = {
        "base model": "known" if known else None,
        "conditions": conditions,
        "parameters": cache_key("baseline", config.public()),
        "family": code_digest(config.model.family) if ":" in config.model.family else None,
        **runtime_fingerprint(config),
    }
    written: dict[str, Any] = json.loads(json.dumps(made))
    return written


def _why_drawn(folder: Path, made: Mapping[str, Any]) -> str | None:
    """Says why the baseline in ``folder`` is not kept; None if it is what would be drawn, byte for byte."""
    if not folder.is_dir():
        return "there is none"
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        before, digest = flatten(stamp["made"]), stamp["digest"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder} does not say what it was made with"
    if made["base model"] is None:
        return "model.path is on the hub and model.revision names no commit, so that its files may be others now"
    now = flatten(made)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        return f"other {', '.join(MEANING.get(name, name) for name in changed)}"
    return None if digest == _digest(folder) else f"a file in {folder} was changed, added or removed"


def _digest(folder: Path) -> str:
    """The digest of every file but the stamp."""
    return tree_digest(folder, (file for file in folder.rglob("*") if file != folder / STAMP))
