"""Draws the reference policy's samples for the eval and held-out prompts and scores them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.folders import final_of
from visual_grpo.records.table import RecordTable

if TYPE_CHECKING:
    from visual_grpo.policies.family_settings import Plan


def draw_baseline(
    parameters: Parameters, starter_report: dict[str, Any], records: RecordTable, baseline_draft: Path
) -> Path:
    """The folder with pictures and scores of the policy without an adapter, also at each control's settings.

    The one that is there is kept where it is what would be drawn.
    """
    from visual_grpo import components, console
    from visual_grpo.pipelines.baseline import keeping

    components.check_unchanged(starter_report)
    plan = components.make_plan(parameters, starter_report["model"])
    made = keeping.making(parameters, starter_report, conditions(parameters, plan, starter_report, records))
    present = final_of(baseline_draft)
    why = "evaluation.redraw is true" if parameters.evaluation.redraw else keeping.why_drawn(present, made)
    if why is None:
        console.note(f"Kept the baseline in {present}: nothing that it depends on has changed (evaluation.redraw)")
        return present
    if present.is_dir():
        console.note(f"The baseline is drawn again: {why}")
    draw_samples(baseline_draft, parameters, starter_report, records, adapters=None, title="baseline")
    keeping.sign(baseline_draft, made)
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
    from visual_grpo import components, console, processes
    from visual_grpo.evaluation import generate

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
    workers = processes.start_drawing(config, starter_report["model"], adapters)
    controls = plan.controls if adapters is None else {}
    count = len(requests) * len(plan.samplers) + len(generate.held_out(requests)) * len(controls)
    with workers or nullcontext(), console.progress(title, count) as bar:
        model = components.build_model(config, starter_report["model"], adapters)
        if workers is not None:
            workers.wait_until_ready()
        generate.draw_and_score(
            processes.shared_model(model, workers),
            scorer,
            requests,
            plan.samplers,
            folder,
            batch_size=config.evaluation.batch_size * config.distributed.processes,
            controls=controls,
            facts=conditions(config, plan, starter_report, records),
            advance=bar.advance,
        )


def conditions(config: Parameters, plan: Plan, starter_report: dict[str, Any], records: RecordTable) -> dict[str, Any]:
    """Everything but the adapter that the samples and scores of a run depend on."""
    from visual_grpo.evaluation import generate
    from visual_grpo.rewards.catalogue import transport_of
    from visual_grpo.rewards.digests import reward_commits

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
