"""Draws the reference policy's samples for the eval and held-out prompts and scores them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visual_grpo import components, console
from visual_grpo.computed_with import MEANING, computed_with
from visual_grpo.config import Parameters
from visual_grpo.decisive_parameters import decisive
from visual_grpo.distributed import group, launch
from visual_grpo.distributed.policy import LeadingModel, follow
from visual_grpo.evaluation import generate
from visual_grpo.files import final_of, tree_digest
from visual_grpo.importing import code_digest
from visual_grpo.option_files import option_files
from visual_grpo.policies.family import Model
from visual_grpo.policies.family_settings import Plan
from visual_grpo.records.table import RecordTable
from visual_grpo.rewards.catalogue import reward_commits, transport_of


def draw_baseline(
    parameters: Parameters, starter_report: dict[str, Any], records: RecordTable, baseline_draft: Path
) -> Path:
    """The folder with pictures and scores of the policy without an adapter, also at each control's settings.

    The one that is there is kept where it is what would be drawn.
    """
    components.check_unchanged(starter_report)
    plan = components.make_plan(parameters, starter_report["model"])
    made = making(parameters, starter_report, conditions(parameters, plan, starter_report, records))
    present = final_of(baseline_draft)
    why = "evaluation.redraw is true" if parameters.evaluation.redraw else why_drawn(present, made)
    if why is None:
        console.note(f"Kept the baseline in {present}: nothing that it depends on has changed (evaluation.redraw)")
        return present
    if present.is_dir():
        console.note(f"The baseline is drawn again: {why}")
    draw_samples(baseline_draft, parameters, starter_report, records, adapters=None, title="baseline")
    sign(baseline_draft, made)
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
    plan = components.make_plan(config, starter_report["model"])
    scorer = components.build_scorer(config, plan.modules)
    splits = {split: records.split(split) for split in generate.SPLITS}
    for split in splits.values():
        scorer.check_records(split)
    requests = generate.plan_images(
        splits,
        seed=config.evaluation.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    controls = plan.controls if adapters is None else {}
    count = len(requests) * len(plan.samplers) + len(generate.held_out(requests)) * len(controls)
    with (
        launch.ranks(config, draw_on_rank, model=starter_report["model"], adapters=adapters),
        console.progress(title, count) as bar,
        LeadingModel(_load(config, starter_report["model"], adapters)) as model,
    ):
        generate.draw_and_score(
            model,
            scorer,
            requests,
            plan.samplers,
            folder,
            batch_size=config.evaluation.batch_size * config.distributed.processes,
            controls=controls,
            facts=conditions(config, plan, starter_report, records),
            advance=bar.advance,
        )


def draw_on_rank(config: Parameters, model: str, adapters: Path | None) -> None:
    """What every rank but the first does while a baseline or an evaluation is drawn."""
    follow(_load(config, model, adapters))


def _load(config: Parameters, model: str, adapters: Path | None) -> Model:
    return group.together(lambda: components.build_model(config, model, adapters))


def conditions(config: Parameters, plan: Plan, starter_report: dict[str, Any], records: RecordTable) -> dict[str, Any]:
    """Everything but the adapter that the samples and scores of a run depend on."""
    return generate.conditions(
        config,
        plan.samplers,
        model=starter_report["digest"],
        content=starter_report["content"],
        dataset=records.digest,
        controls=plan.controls,
        commits=reward_commits(config.rewards),
        transport={name: transport_of(name, reward.function) for name, reward in config.rewards.items()},
    )


STAMP = "made_with.json"
"""In the baseline's folder: what it depends on, and the digest of its files."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def making(config: Parameters, starter_report: Mapping[str, Any], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """All that a baseline depends on, as JSON.

    Beside the conditions under which two results pair, that is what changes rounding, weights of rewards, code, and
    files that the options of rewards name.
    """
    known = starter_report["content"] is not None or _COMMIT.fullmatch(config.model.revision or "") is not None
    return {
        "base model": "known" if known else None,
        "conditions": dict(conditions),
        "parameters": decisive("baseline", config.public()),
        "family": code_digest(config.model.family) if ":" in config.model.family else None,
        "files": dict(_files_of_options(config)),
        **computed_with(config),
    }


def sign(folder: Path, made: Mapping[str, Any]) -> None:
    """Writes into the folder what it was made with, once everything else is in it."""
    text = json.dumps({"made": made, "content": _content(folder)}, indent=1, ensure_ascii=False)
    (folder / STAMP).write_text(text, encoding="utf-8")


def why_drawn(folder: Path, made: Mapping[str, Any]) -> str | None:
    """Why the baseline in ``folder`` is not kept; None where it is what would be drawn, file by file."""
    if not folder.is_dir():
        return "there is none"
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        before, content = dict(stamp["made"]), stamp["content"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} does not say what it was made with"
    if made["base model"] is None:
        return "model.path is on the hub and model.revision names no commit, so that its files may be others now"
    now = json.loads(json.dumps(made))  # As they were written.
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        return f"other {', '.join(_named(name, before.get(name), now.get(name)) for name in changed)}"
    return None if content == _content(folder) else f"a file in {folder} was changed, added or removed"


def _named(name: str, before: Any, now: Any) -> str:
    """What changed, with the parts of it that did."""
    shown = MEANING.get(name, name)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return shown
    parts = sorted(part for part in {*before, *now} if before.get(part) != now.get(part))
    return f"{shown} ({', '.join(parts)})"


def _content(folder: Path) -> str:
    """Returns a digest of every file but the stamp."""
    return tree_digest(folder, (file for file in folder.rglob("*") if file != folder / STAMP))


def _files_of_options(config: Parameters) -> Iterator[tuple[str, str]]:
    """Reward and option -> digest of each file and folder that an option of a reward names."""
    for name, reward in config.rewards.items():
        for option, digest in option_files(reward.options, config.output).items():
            yield f"{name}: {option}", digest
