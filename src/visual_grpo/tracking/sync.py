"""``python -m visual_grpo.tracking.sync [OUTPUT ...]``: adds to MLflow what it lacks of the results on disk.

The training and the evaluation in a folder of outputs are compared with their MLflow run, which is made where there is
none. Without a folder it looks in ``data`` and the folders in it. Exits with 1 if MLflow still lacks something.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import hold, release
from visual_grpo.common.images import read_image
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.adapter_folder import FACTS, HISTORY, modules_of, read_facts
from visual_grpo.evaluation.verdict import lines
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.model_card import CARD, model_card

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run
    from PIL.Image import Image

ADAPTERS, EVALUATED, REPORT = "06_models/adapters", "08_reporting/evaluation.json", "08_reporting/evaluation"
TRAINING_DIGEST, EVALUATION_DIGEST = "training.digest", "evaluation.digest"
"""Tags of a run: the digests of the ``training.json`` and ``evaluation.json`` of which it has everything."""
RUN_NAME = "run.name"
"""In the facts of a training: its run's name."""
TABLE = "evaluation/scores.json"
_FROM_FACTS = ("command", "git.", "dvc.", "version.", "resumed.")
"""Prefixes of the facts that become tags."""
_LONGEST_DIGEST = 36
"""MLflow's limit."""
_OF_MODULE = {
    *("reward/total", "reward/total_std", "reward/unscored_share", "zero_variance_share", "advantage/abs_mean"),
    *("kl", "entropy", "approx_kl", "clip_fraction", "ratio/first_max_abs_log", "sampler_gap/mean", "sampler_gap/max"),
    *("grad_norm", "learning_rate", "updates_skipped", "speed/samples_per_second"),
}
_OF_RUN = {"reward/total", "seconds/step", "memory_gb"}
_OF_OTHERS = {
    *("generate", "score", "compare", "reward_report", "vote", "promotion", "retrain", "plan", "gpu_check"),
    *("run", "reproduce"),
}
"""Sections of pipelines that are no part of a training's run."""
_PICTURE = re.compile(r"(samples|alarm)-(\d+)\.png")


def sync_output(client: MlflowClient, output: Path, open_run: str | None = None) -> list[str]:
    """Adds what MLflow lacks of the training and the evaluation in ``output``; returns a line for each addition.

    Args:
        open_run: the run of this process, which is not closed here.

    Raises:
        Exception: whatever MLflow raises.
    """
    trained, evaluated = _facts(output / ADAPTERS / FACTS), _facts(output / EVALUATED)
    if trained and evaluated and trained["mlflow_run_id"] == evaluated["mlflow_run_id"] and trained != evaluated:
        evaluated = None  # The training was resumed after this evaluation.
    additions = []
    for facts, file, add, tag in (
        (trained, output / ADAPTERS / FACTS, _add_training, TRAINING_DIGEST),
        (evaluated, output / EVALUATED, _add_evaluation, EVALUATION_DIGEST),
    ):
        run = None if facts is None else _run_of(client, facts, file)
        digest = file_digest(file) if file.is_file() else ""
        if facts is None or run is None or run.data.tags.get(tag) == digest:
            continue
        added = add(client, run, output, facts)
        mlflow_api.set_tags(client, run.info.run_id, {tag: digest})  # Last: an attempt that is cut short is made again.
        if run.info.status == "RUNNING" and run.info.run_id != open_run:
            client.set_terminated(run.info.run_id, "FINISHED", _modified(file))
        additions.append(f"{run.info.run_name} ({run.info.run_id[:8]}): {added}")
    return additions


def _facts(file: Path) -> dict[str, Any] | None:
    """Returns the training's facts in the file; None if it had no run, or the file is missing or damaged."""
    try:
        if file.name == FACTS:
            facts = read_facts(file.parent)
        else:
            facts = json.loads(file.read_text(encoding="utf-8"))["training"]
    except (OSError, UserError, ValueError, KeyError):
        return None
    return facts if facts.get("mlflow_run_id") and "steps" in facts else None


def _run_of(client: MlflowClient, facts: Mapping[str, Any], file: Path) -> Run | None:
    """Returns the training's run, which is made if MLflow never had it; None if the user deleted it."""
    run = mlflow_api.find_run(client, facts["mlflow_run_id"])
    if run is None:
        return mlflow_api.make_run(client, facts["mlflow_run_id"], facts.get(RUN_NAME, "training"), _modified(file))
    return run if mlflow_api.is_active(run) else None


def _add_training(client: MlflowClient, run: Run, output: Path, facts: Mapping[str, Any]) -> str:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    adapters, run_id = output / ADAPTERS, run.info.run_id
    config = Parameters.model_validate(facts["parameters"])
    values = mlflow_api.log_metrics(client, run_id, _curves(adapters, config), {})
    pictures = mlflow_api.log_pictures(client, run_id, _pictures(adapters))
    if not run.data.params:
        mlflow_api.set_params(client, run_id, training_params(facts["parameters"]))
    source = json.dumps({"uri": config.data.path})
    records = Dataset("records", facts["data"][:_LONGEST_DIGEST], "local", source)
    client.log_inputs(run_id, datasets=[DatasetInput(records, [InputTag("mlflow.data.context", "training")])])
    tags = {name: value for name, value in facts.items() if name.startswith(_FROM_FACTS)}
    tags |= {"dataset.digest": facts["data"]}
    for alarm in facts.get("alarms", ()):
        tags["alarm"] = f"step {alarm['step']}: {alarm['sentence']}"
    mlflow_api.set_tags(client, run_id, {name: value for name, value in tags.items() if name not in run.data.tags})
    client.log_artifacts(run_id, str(adapters), "adapters")
    if TRAINING_DIGEST in run.data.tags:  # The training was resumed: the verdict is that of earlier adapters.
        mlflow_api.remove_tags(client, run_id, ("result", mlflow_api.EVALUATION, EVALUATION_DIGEST))
    return f"adapters, {counted(values, 'metric value')}, {counted(pictures, 'picture')}"


def _curves(adapters: Path, config: Parameters) -> list[Metric]:
    """Returns the metrics of ``training.csv`` that MLflow shows."""
    from mlflow.entities import Metric

    with (adapters / HISTORY).open(encoding="utf-8", newline="") as file:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    at, modules = _modified(adapters / FACTS), modules_of(adapters)
    curves = [(int(row["step"]), tracked(row, modules, list(config.rewards))) for row in rows]
    return [Metric(name, value, at, step) for step, values in curves for name, value in values.items()]


def _pictures(adapters: Path) -> dict[tuple[str, int], Callable[[], Image]]:
    """Returns series and step -> a function that reads the image."""
    matches = {file: _PICTURE.fullmatch(file.name) for file in sorted(adapters.glob("*.png"))}
    return {(match[1], int(match[2])): partial(read_image, file) for file, match in matches.items() if match}


def _add_evaluation(client: MlflowClient, run: Run, output: Path, facts: Mapping[str, Any]) -> str:
    from mlflow.entities import Metric

    run_id, at = run.info.run_id, _modified(output / EVALUATED)
    evaluation = json.loads((output / EVALUATED).read_text(encoding="utf-8"))
    headline, scores = evaluation["headline"], evaluation["rewards"]
    client.log_artifacts(run_id, str(output / REPORT), "evaluation")
    if scores:
        table = {"columns": list(scores[0]), "data": [list(row.values()) for row in scores]}
        client.log_text(run_id, json.dumps(table, indent=2), TABLE)
    client.log_text(run_id, model_card(facts, evaluation["modules"], lines(headline)), f"adapters/{CARD}")
    # With an equal timestamp, MLflow stores a repeated attempt once.
    results = [Metric(name, value, at, facts["steps"]) for name, value in result_metrics(headline).items()]
    mlflow_api.log_metrics(client, run_id, results)
    mlflow_api.set_tags(client, run_id, {"result": " ".join([headline["sentence"], *headline["notes"]])})
    return "evaluation"


def _modified(file: Path) -> int:
    """Milliseconds since 1970."""
    return int(file.stat().st_mtime * 1000)


def tracked(row: Mapping[str, float], modules: Sequence[str], rewards: Sequence[str]) -> dict[str, float]:
    """Selects the metrics of a row of ``training.csv`` that MLflow shows, to compare runs by.

    Args:
        row: with several modules, a module's metrics have the prefix ``MODULE/``.
        modules: the trained ones.
        rewards: all of them, also those of weight 0.
    """
    names = _OF_MODULE | {f"reward/{name}" for name in rewards}
    if len(modules) > 1:
        names = {f"{module}/{name}" for module in modules for name in names}
    names |= _OF_RUN
    return {name: value for name, value in row.items() if name in names or name.startswith(("eval/", "watch/"))}


def training_params(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens the parameters that a training and its evaluation depend on."""
    return {name: value for name, value in flatten(parameters).items() if name.partition(".")[0] not in _OF_OTHERS}


def result_metrics(headline: Mapping[str, Any]) -> dict[str, float]:
    """Returns an evaluation's headline (`evaluation.verdict.summarise`) as metrics; docs/metrics.md explains them."""
    task, control = headline["task"], headline["control"]
    metrics = {
        "gain": headline["difference"],
        "low": headline["ci_low"],
        "high": headline["ci_high"],
        "base": headline["baseline"],
        "trained": headline["trained"],
        "unscored": headline["unscored"]["trained"],
        "unscored_base": headline["unscored"]["baseline"],
    }
    if control:
        metrics |= {"gain_over_control": control["difference"], "low_over_control": control["ci_low"]}
    if task:
        metrics |= {task["name"]: task["trained"], f"{task['name']} base": task["baseline"]}
    return {f"result/{name}": float(value) for name, value in metrics.items() if value is not None}


def sync(outputs: list[Path]) -> tuple[list[str], bool]:
    """Syncs each folder that no command writes to; returns lines for the user, and True if MLflow has everything."""
    messages: list[str] = []
    is_complete = True
    for output in outputs:
        try:
            hold(output / ".lock")
            with mlflow_api.mlflow_client() as client:
                mlflow_api.close_killed(client, output)
                messages += [f"{output}: added to MLflow: {line}" for line in sync_output(client, output)]
        except UserError as error:
            messages.append(f"{output}: {error}")
            is_complete = False
        finally:
            release()
    if not messages:
        messages = [f"MLflow ({mlflow_api.shown()}) lacks nothing of {', '.join(map(str, outputs)) or 'data'}."]
    return messages, is_complete


def main() -> None:
    silence_libraries()
    parser = argparse.ArgumentParser(
        prog="python -m visual_grpo.tracking.sync", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("outputs", nargs="*", type=Path, help="folders of outputs; without any: those in data")
    outputs = parser.parse_args().outputs
    if missing := [str(output) for output in outputs if not output.is_dir()]:
        sys.exit(f"Error: there is no folder {', '.join(missing)}")
    mlflow_api.use_project(Path.cwd())
    # data itself, data/ENVIRONMENT, and data/ENVIRONMENT/NAME of a user's own data.
    root = Path("data")
    folders = sorted([root, *root.glob("*"), *root.glob("*/*")])
    results = [folder for folder in folders if (folder / ADAPTERS / FACTS).is_file() or (folder / EVALUATED).is_file()]
    messages, is_complete = sync(outputs or results)
    print("\n".join(messages))  # noqa: T201
    sys.exit(0 if is_complete else 1)


if __name__ == "__main__":
    main()
