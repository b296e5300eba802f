"""``python -m visual_grpo.tracking.sync [OUTPUT ...]``: adds to MLflow what it lacks of the results on disk.

Without a folder of outputs it looks in ``data`` and the folders in it. Exits with 1 if MLflow still lacks something.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from visual_grpo.adapter_folder import FACTS, HISTORY, modules_of
from visual_grpo.common import console
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import hold, release, require_no_links
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config import ON_REQUEST, Parameters, flatten
from visual_grpo.config.places import place
from visual_grpo.config.rewards import is_loggable
from visual_grpo.config.validation import validate
from visual_grpo.evaluation.verdict import change, lines, result
from visual_grpo.tracking import mlflow_api
from visual_grpo.tracking.model_card import CARD, model_card

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

TRAINING_DIGEST, EVALUATION_DIGEST = "training.digest", "evaluation.digest"
"""Tags of a run: the digests of the ``training.json`` and ``evaluation.json`` of which it has everything."""
DIGEST = "adapter.digest"
"""Tag of a version, and of the run of a training: `adapter_folder.adapter_digest`."""
RUN_NAME = "run.name"
"""Key of the run's name in the facts of a training."""
TAGGED = ("command", "git.", "dvc.", "version.", "resumed.")
"""Prefixes of the facts that become tags."""
_OF_MODULE = {
    *("reward/total", "reward/total_std", "reward/unscored_share", "zero_variance_share", "advantage/abs_mean"),
    *("kl", "entropy", "approx_kl", "clip_fraction", "ratio/first_max_abs_log", "sampler_gap/mean", "sampler_gap/max"),
    *("grad_norm", "learning_rate", "step_kl", "updates_skipped", "speed/samples_per_second"),
}
_OF_RUN = {"reward/total", "seconds/step", "memory_gb"}
_PICTURE = re.compile(r"(samples|alarm)-(\d+)\.png")
_SAMPLES, _SMALL, _WIDTH = "samples.png", "samples_small.png", 640
"""Files of a report, and pixels: MLflow's page of a run grows as wide as the picture in its description."""


def sync_output(client: MlflowClient, output: Path, open_run: str | None = None) -> list[str]:
    """Adds what MLflow lacks of the training and the evaluation in ``output``; returns the name of each addition.

    Makes their run where there is none, and closes it, unless it is ``open_run``. Raises whatever MLflow raises.
    """
    made, judged, report = _results(output)
    trained, evaluated = _facts(made), _facts(judged)
    if trained and evaluated and trained["mlflow_run_id"] == evaluated["mlflow_run_id"] and trained != evaluated:
        evaluated = None  # The training was resumed after this evaluation.
    additions = []
    for facts, file, add, tag in (
        (trained, made, _add_training, TRAINING_DIGEST),
        (evaluated, judged, partial(_add_evaluation, report=report), EVALUATION_DIGEST),
    ):
        run = None if facts is None else _run_of(client, facts, file)
        if facts is None or run is None or run.data.tags.get(tag) == file_digest(file):
            continue
        if tag == EVALUATION_DIGEST and made_others(
            run, json.loads(file.read_text(encoding="utf-8"))["adapter_digest"]
        ):
            continue
        add(client, run, file, facts)
        # Last: an attempt that is cut short is made again.
        mlflow_api.set_tags(client, run.info.run_id, {tag: file_digest(file)})
        if run.info.status == "RUNNING" and run.info.run_id != open_run:
            client.set_terminated(run.info.run_id, "FINISHED", _modified(file))
        additions.append(f"{tag.removesuffix('.digest')} of {run.info.run_name} ({run.info.run_id[:8]})")
    return additions


def made_others(run: Run, digest: str) -> bool:
    """Returns whether ``run`` is known to have made other adapters than those with the ``digest``.

    The provenance of adapters may name any run, since it comes with their folder.
    """
    return run.data.tags.get(DIGEST, digest) != digest


def _results(output: Path) -> tuple[Path, Path, Path]:
    """Returns the files with the facts of the training and with the evaluation, and the folder of its report."""
    adapters, evaluation, report = (place(output, name) for name in ("adapters", "evaluation", "evaluation_report"))
    return adapters / FACTS, evaluation, report


def _facts(file: Path) -> dict[str, Any] | None:
    """Returns the training's facts in the file; None if it had no run, or the file is missing or damaged."""
    try:
        tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        facts = tree if file.name == FACTS else tree["training"]
        return facts if facts.get("mlflow_run_id") and "steps" in facts else None
    except (OSError, ValueError, KeyError):
        return None


def _run_of(client: MlflowClient, facts: Mapping[str, Any], file: Path) -> Run | None:
    """Returns the training's run, which is made if MLflow never had it; None if the user deleted it."""
    key = facts["mlflow_run_id"]
    run = mlflow_api.find_run(client, key)
    if run is None:
        experiment = mlflow_api.experiment_id(client)
        return client.create_run(experiment, _modified(file), {mlflow_api.KEY: key}, facts.get(RUN_NAME))
    return run if mlflow_api.is_active(run) else None


def _add_training(client: MlflowClient, run: Run, file: Path, facts: Mapping[str, Any]) -> None:
    adapters, run_id = file.parent, run.info.run_id
    require_no_links(adapters)
    config = validate(facts["parameters"])
    mlflow_api.log_metrics(client, run_id, _curves(adapters, list(config.rewards)), {})
    for shown in sorted(adapters.glob("*.png")):
        if match := _PICTURE.fullmatch(shown.name):
            with Image.open(shown, formats=["PNG"]) as picture:
                mlflow_api.log_picture(client, run_id, picture, match[1], int(match[2]))
    params = training_params(facts["parameters"]).items()
    mlflow_api.set_params(client, run_id, {name: value for name, value in params if name not in run.data.params})
    tags = {name: value for name, value in facts.items() if name.startswith(TAGGED)}
    tags |= {"dataset.digest": facts["data"]}
    for alarm in facts.get("alarms", ()):
        tags["alarm"] = f"step {alarm['step']}: {alarm['sentence']}"
    mlflow_api.set_tags(client, run_id, {name: value for name, value in tags.items() if name not in run.data.tags})
    if run.inputs is None or not run.inputs.dataset_inputs:
        client.log_inputs(run_id, _inputs(facts, config))
    client.log_artifacts(run_id, str(adapters), "adapters")
    mlflow_api.remove_others(client, run, "adapters", adapters)
    gone = {mlflow_api.VERDICT: mlflow_api.NOT_EVALUATED}
    if TRAINING_DIGEST in run.data.tags:  # The training was resumed: the verdict is about earlier adapters.
        gone |= dict.fromkeys(
            ("result", mlflow_api.EVALUATION, EVALUATION_DIGEST, mlflow_api.GAIN, mlflow_api.NOTE), ""
        )
        mlflow_api.set_results(client, run_id, {}, facts["steps"])
    mlflow_api.set_tags(client, run_id, gone)


def _inputs(facts: Mapping[str, Any], config: Parameters) -> list[DatasetInput]:
    """Returns the prepared data, with the records of each split, and the base model of a training."""
    data = {"task": config.data.task, "records": facts.get("records", {})}
    content = facts.get("model_content")  # A model on the hub has none.
    path, base, model = config.data.path, facts["model"], {"family": config.model.family}
    if "model_lora" in facts:
        model["lora"] = facts["model_lora"]
    return [
        mlflow_api.to_input("data", path, facts["data"], data, on_hub=path.startswith("hf://")),
        mlflow_api.to_input("base model", base, content or facts["model_digest"], model, on_hub=content is None),
    ]


def _curves(adapters: Path, rewards: Sequence[str]) -> list[mlflow_api.Point]:
    """Returns the metrics of ``training.csv`` that MLflow shows."""
    with (adapters / HISTORY).open(encoding="utf-8", newline="") as file:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    at, modules = _modified(adapters / FACTS), modules_of(adapters)
    return [
        (name, value, at, int(row["step"])) for row in rows for name, value in tracked(row, modules, rewards).items()
    ]


def _add_evaluation(client: MlflowClient, run: Run, file: Path, facts: Mapping[str, Any], report: Path) -> None:
    run_id = run.info.run_id
    evaluation = json.loads(file.read_text(encoding="utf-8"))
    headline, scores = evaluation["headline"], evaluation["rewards"]
    require_no_links(report)
    client.log_artifacts(run_id, str(report), "evaluation")
    if (report / _SAMPLES).is_file():
        with Image.open(report / _SAMPLES, formats=["PNG"]) as picture:
            picture.thumbnail((_WIDTH, picture.height))
            client.log_image(run_id, picture, artifact_file=f"evaluation/{_SMALL}")
    if scores:
        columns = list(dict.fromkeys(name for row in scores for name in row))  # Only some have a measure or a judge.
        table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in scores]}
        client.log_text(run_id, json.dumps(table, indent=2), "evaluation/scores.json")
    client.log_text(run_id, model_card(facts, evaluation["modules"], lines(headline)), f"adapters/{CARD}")
    mlflow_api.set_results(client, run_id, result_metrics(headline), facts["steps"])
    said = " ".join([headline["sentence"], *headline["notes"]])
    tags = {mlflow_api.VERDICT: headline["verdict"], "result": said}
    tags |= {mlflow_api.NOTE: _description(run_id, headline, report)}
    tags |= {mlflow_api.GAIN: "" if headline["difference"] is None else change(headline)}
    mlflow_api.set_tags(client, run_id, tags)


def _description(run_id: str, headline: Mapping[str, Any], report: Path) -> str:
    """Returns the description of a run on MLflow's page, in Markdown: the verdict, the report, and a picture of it."""
    sentence, *rest = lines(headline)
    page, picture = (
        f"{words}(get-artifact?run_uuid={run_id}&path=evaluation/{name})" if (report / file).is_file() else ""
        for words, file, name in (
            ("[Open the report.]", "evaluation.html", "evaluation.html"),
            ("![Samples]", _SAMPLES, _SMALL),
        )
    )
    # MLflow shows the first lines only until it is asked for more.
    return "\n\n".join([f"**{sentence}** {page}", *rest, picture])


def _modified(file: Path) -> int:
    """Milliseconds since 1970."""
    return int(file.stat().st_mtime * 1000)


def tracked(row: Mapping[str, float], modules: Sequence[str], rewards: Sequence[str]) -> dict[str, float]:
    """Selects the metrics of a row of ``training.csv`` that MLflow shows; several modules have ``MODULE/NAME``."""
    prefixes = [f"{module}/" for module in modules] if len(modules) > 1 else [""]
    shown = _OF_MODULE | {f"reward/{name}" for name in rewards}
    names = _OF_RUN | {f"{prefix}{name}" for prefix in prefixes for name in shown}
    return {name: value for name, value in row.items() if name in names or name.startswith(("eval/", "watch/"))}


def training_params(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens the parameters that a training and its evaluation depend on.

    The options of a reward are one JSON value where MLflow would refuse the name of one.
    """
    rewards = {
        name: reward
        if all(map(is_loggable, flatten(reward.get("options", {}))))
        else {**reward, "options": json.dumps(reward["options"], ensure_ascii=False)}
        for name, reward in parameters.get("rewards", {}).items()
    }
    flat = flatten({**parameters, "rewards": rewards})
    return {name: value for name, value in flat.items() if name.partition(".")[0] not in ON_REQUEST}


def result_metrics(headline: Mapping[str, Any]) -> dict[str, float]:
    """Returns an evaluation's headline (`evaluation.verdict.summarise`) as metrics."""
    return {f"{mlflow_api.RESULT}{name}": value for name, value in result(headline).items()}


def sync(outputs: list[Path]) -> tuple[list[str], bool]:
    """Syncs each folder that no command writes to; returns lines for the user, and True if MLflow has everything."""
    messages: list[str] = []
    is_complete = True
    for output in outputs:
        try:
            if not output.is_dir():
                raise UserError("the folder does not exist")
            hold(output / ".lock")
            with mlflow_api.mlflow_client() as client:
                mlflow_api.close_killed(client, output)
                messages += [f"{output}: added to MLflow: {name}" for name in sync_output(client, output)]
        except UserError as error:
            messages.append(f"{output}: {error}")
            is_complete = False
        finally:
            release()
    return messages or [f"MLflow ({mlflow_api.shown()}) lacks nothing."], is_complete


def main() -> None:
    silence_libraries()
    mlflow_api.use_project(Path.cwd())
    try:
        _use_catalog()
    except UserError as error:
        sys.exit(f"Error: {error}")
    # data itself, data/ENVIRONMENT, and data/ENVIRONMENT/NAME of a user's own data.
    folders = sorted([Path("data"), *Path("data").glob("*"), *Path("data").glob("*/*")])
    places: dict[tuple[Path, ...], Path] = {}
    for folder in folders:  # A catalog may have moved the results of all folders to one place.
        places.setdefault(_results(folder), folder)
    results = [folder for files, folder in places.items() if any(map(Path.is_file, files))]
    messages, is_complete = sync([Path(name) for name in sys.argv[1:]] or results)
    for message in messages:
        console.note(message)
    sys.exit(0 if is_complete else 1)


def _use_catalog() -> None:
    """Looks for results where the catalog of the project in the working folder has them."""
    from kedro.framework.project import settings
    from kedro.framework.startup import bootstrap_project

    if Path("pyproject.toml").is_file() and Path("conf").is_dir():
        bootstrap_project(Path.cwd())
        loader = settings.CONFIG_LOADER_CLASS(settings.CONF_SOURCE, **settings.CONFIG_LOADER_ARGS)
        loader["parameters"]  # The loader takes over the catalog with them.


if __name__ == "__main__":
    main()
