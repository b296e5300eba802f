"""Is the gain more than a guidance scale gives? Compares the trained samples with the base model at more scales than
``evaluation.controls`` has.

Needs a folder in which the pipelines up to evaluate have run. The base draws the held-out samples again, with the same
seeds, at each scale; the trained samples are those of the evaluation at the eval sampler.

    python benchmarks/guidance_control.py --folder CLONE --params seed=1 --env sd3_small
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pandas as pd
import project

from visual_grpo.common import quiet_libraries
from visual_grpo.config import ControlConfig, Parameters
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import compare
from visual_grpo.evaluation.samples import generate_and_score, plan_images, read_scores
from visual_grpo.evaluation.verdict import change
from visual_grpo.training import components


def main() -> None:
    quiet_libraries.silence_libraries()
    arguments = _arguments()
    config, records = project.load(arguments)
    trained = read_scores(Path(config.output) / "07_model_output" / "trained")
    base = _base_at(config, records, arguments.scales)
    intervals = {"bootstrap_samples": config.evaluation.bootstrap_samples, "seed": config.evaluation.seed}
    entries = compare.compare_controls(base, trained, **intervals)
    print("| base | score | mean | trained | difference [95%] |\n|---|---|---|---|---|")
    for entry in entries:
        print(
            f"| {entry['sampler']} | {entry['name']} | {entry['baseline_mean']:.3f} | {entry['trained_mean']:.3f} |"
            f" {change(entry)} |"
        )


def _base_at(config: Parameters, records: RecordTable, scales: list[float]) -> pd.DataFrame:
    """The base model's held-out samples, with a control for each guidance scale."""
    path = config.model.path or config.starter.model
    controls = [ControlConfig(guidance_scale=scale) for scale in scales]
    evaluation = config.evaluation.model_copy(update={"controls": controls})
    spec = components.make_run_spec(config.model_copy(update={"evaluation": evaluation}), path)
    requests = plan_images(
        {"held_out": records.split("held_out")},
        seed=config.evaluation.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    with tempfile.TemporaryDirectory() as folder:
        return generate_and_score(
            components.build_model(config, path),
            components.build_scorer(config, spec.modules),
            requests,
            {},
            Path(folder),
            batch_size=config.evaluation.batch_size,
            conditions={"controls": dict.fromkeys(spec.controls)},
            controls=spec.controls,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    project.add_arguments(parser)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0, 4.5], help="of the base")
    return parser.parse_args()


if __name__ == "__main__":
    main()
