"""Is the gain more than a guidance scale gives? Compares the trained samples with the base model at several scales.

Needs a folder in which the pipelines up to evaluate have run. The base draws the held-out samples again, with the same
seeds, at each scale; the trained samples are those of the evaluation at the stock sampler.

    python benchmarks/guidance_control.py --folder CLONE --params seed=1 --env sd3_small
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pandas as pd
import project

from visual_grpo import components, third_party_output
from visual_grpo.config import Parameters
from visual_grpo.evaluation import compare, generate
from visual_grpo.evaluation.paired import paired_bootstrap
from visual_grpo.records.table import RecordTable

KEY = ["split", "id", "index", "seed"]
TRAINED = Path("data/07_model_output/trained")


def main() -> None:
    third_party_output.silence_libraries()
    arguments = _arguments()
    config, records = project.load(arguments)
    trained = generate.read_scores(TRAINED)
    trained = trained[(trained["sampler"] == "stock") & (trained["split"] == "held_out")]
    base = _base_at(config, records, arguments.scales)
    totals = base.groupby("sampler")["total"].mean()
    print("| base at guidance | total | all right |\n|---|---|---|")
    for scale in totals.index:
        rows = base[base["sampler"] == scale]
        print(f"| {scale} | {totals[scale]:.3f} | {_mean(rows, 'part/shapes/all')} |")
    best = totals.idxmax()
    print(f"\n| score | base at guidance {best} | trained | difference [95%] |\n|---|---|---|---|")
    pairs = base[base["sampler"] == best].merge(trained, on=KEY, suffixes=("_base", "_trained"), validate="one_to_one")
    for column, name in compare.score_columns(trained).items():
        measured = paired_bootstrap(
            pairs[f"{column}_base"], pairs[f"{column}_trained"], list(pairs["id"]), 5000, config.seed
        )
        print(
            f"| {name} | {measured.baseline_mean:.3f} | {measured.trained_mean:.3f} |"
            f" {measured.difference:+.3f} [{measured.ci_low:+.3f}, {measured.ci_high:+.3f}] |"
        )


def _base_at(config: Parameters, records: RecordTable, scales: list[float]) -> pd.DataFrame:
    """The base model's held-out samples; ``sampler`` is the guidance scale."""
    path = config.model.path or config.starter.model
    plan = components.make_plan(config, path)
    stock = config.sampling.stock
    requests = generate.plan_images(
        {"held_out": records.split("held_out")},
        seed=config.seed,
        images_per_prompt=config.evaluation.images_per_prompt,
        max_prompts=config.evaluation.max_prompts,
    )
    with tempfile.TemporaryDirectory() as folder:
        return generate.draw_and_score(
            components.build_model(config, path),
            components.build_scorer(config, plan.modules),
            requests,
            {f"{scale:g}": stock.model_copy(update={"guidance_scale": scale}) for scale in scales},
            Path(folder),
            batch_size=config.evaluation.batch_size,
            facts={},
        )


def _mean(rows: pd.DataFrame, column: str) -> str:
    return f"{rows[column].mean():.3f}" if column in rows else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    project.add_arguments(parser)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0, 4.5], help="of the base")
    return parser.parse_args()


if __name__ == "__main__":
    main()
