"""The text of dvc.yaml: a stage for each pipeline of the data flow, and what is plotted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from kedro.pipeline import Pipeline

from visual_grpo import sources
from visual_grpo.config.outputs import FLOW
from visual_grpo.decisive_parameters import decisive_keys
from visual_grpo.dvc_stages.environment import BASE, CONF, Environment
from visual_grpo.errors import UserError
from visual_grpo.importing import code_files
from visual_grpo.option_files import named_paths

HEADER = """\
# Made by `{command}`, which writes it again after a change: do not edit.
# One stage per pipeline. Kedro owns the data flow inside a stage, DVC the caching between stages.
# `kedro run` is for exploring; `{repro}` is for results to keep and runs only what changed.
"""
KEPT = {"starter_report", "baseline"}
"""Their pipelines find out themselves whether what is there is still right; so DVC does not remove it first."""
METRICS = {"result"}
IMAGES = "05_model_input/images"
"""The prepared images, beside the table of records."""
MOSTLY = 0.7
"""A folder stands for its modules where at least this share of them is needed: it is read at a glance."""


def stages_text(environment: Environment) -> str:
    """The whole file of an environment."""
    repro = "dvc repro" if environment.name is None else f"dvc repro {environment.file}"
    command = f"python -m visual_grpo.dvc_stages{environment.option}"
    body = {
        "vars": [_beside(environment, environment.start.as_posix())],
        "stages": {"check": _check(environment)} | {name: _stage(environment, name) for name in FLOW},
        "plots": list(_plots(environment)),
    }
    text = yaml.dump(body, Dumper=_Indented, sort_keys=False, width=118, allow_unicode=True)
    return HEADER.format(command=command, repro=repro) + text


def _stage(environment: Environment, name: str) -> dict[str, Any]:
    pipeline = _pipelines()[name]
    extra = ["requirements.lock"] if name == "starter" else []
    deps = [*environment.other_files(), *_inputs(environment, pipeline), *_sources(name), *_own_code(environment, name)]
    outputs = dict(_outputs(environment, pipeline))
    kept = [out for out, dataset in outputs.items() if dataset not in METRICS]
    metrics = [out for out, dataset in outputs.items() if dataset in METRICS]
    params = "" if name != "train" else " --params=resume=same,${train_params}"
    # Records of prompts alone have no images, but DVC wants every output.
    then = f" && mkdir -p {environment.config.output}/{IMAGES}" if "records" in pipeline.all_outputs() else ""
    return {
        **_working_folder(environment),
        "cmd": f".venv/bin/kedro run --pipeline={name}{environment.option}{params}{then}",
        "deps": sorted({*deps, *extra}),
        "params": list(_parameters(environment, pipeline, name)),
        "outs": [{out: {"persist": True}} if outputs[out] in KEPT else out for out in sorted(kept)],
        **({"metrics": metrics} if metrics else {}),
    }


def _check(environment: Environment) -> dict[str, Any]:
    """Refuses to go on where the stages no longer are what the configuration makes them."""
    files = environment.parameter_files()[1:]
    return {
        **_working_folder(environment),
        "cmd": f".venv/bin/python -m visual_grpo.dvc_stages --check{environment.option}",
        "deps": [*environment.other_files(), *(file.as_posix() for file in files)],
        "params": [{f"{CONF / BASE}/parameters.yml": ["output", "data", "starter", "model", "modules", "rewards"]}],
    }


def _working_folder(environment: Environment) -> dict[str, str]:
    return {} if environment.name is None else {"wdir": "../.."}


def _inputs(environment: Environment, pipeline: Pipeline) -> Iterator[str]:
    """Files and folders that a pipeline reads."""
    config = environment.config
    made = {_path(environment, name) for name in pipeline.all_outputs()}
    for name in pipeline.inputs():
        path = _path(environment, name)
        if path is not None and path not in made:
            yield path
    if "records" in pipeline.all_outputs():
        yield _from_here(config.data.path)
    if "records" in pipeline.inputs():
        yield f"{config.output}/{IMAGES}"
    if "starter_report" in pipeline.all_outputs():
        if config.model.path is not None and Path(config.model.path).expanduser().exists():
            yield _from_here(config.model.path)
    elif "parameters" in pipeline.inputs() and config.model.path is None:
        yield config.starter.model


def _outputs(environment: Environment, pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Files and folders that a pipeline leaves, each with the dataset that it belongs to."""
    config = environment.config
    for name in sorted(pipeline.all_outputs()):
        path = _path(environment, name)
        if path is not None:
            yield path, name
    if "records" in pipeline.all_outputs():
        yield f"{config.output}/{IMAGES}", "records"
    if "starter_report" in pipeline.all_outputs():
        if config.model.path is None or config.data_is_drawn:
            yield config.starter.dataset, "starter_report"
        if config.model.path is None:
            yield config.starter.model, "starter_report"


def _path(environment: Environment, dataset: str) -> str | None:
    """Where a dataset is on disk; None for a parameter and for what is in memory only."""
    path = environment.catalog.get(dataset, {}).get("filepath")
    return None if path is None else str(path)


def _parameters(environment: Environment, pipeline: Pipeline, name: str) -> Iterator[dict[str, list[str]]]:
    inputs = pipeline.inputs()
    sections = {entry.removeprefix("params:") for entry in inputs if entry.startswith("params:")}
    for file in environment.parameter_files():
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        keys = decisive_keys(name, tree) if "parameters" in inputs else [key for key in tree if key in sections]
        if keys:
            yield {file.as_posix(): sorted(keys)}


def _sources(pipeline: str) -> list[str]:
    """The package's files that a pipeline depends on; a folder where (nearly) all in it are needed."""
    root = sources.package_folder()
    needed = set(sources.files_of(pipeline))
    shown = {Path(*name.split(".")).with_suffix(".py") for name in sources.SHOWN_ONLY}
    listed: list[str] = []
    while needed:
        file = min(needed)
        for folder in reversed(file.parents[:-1]):  # The largest first.
            modules = {path.relative_to(root) for path in (root / folder).rglob("*.py")} - shown
            if len(modules) > 1 and len(modules & needed) >= MOSTLY * len(modules):
                listed.append(f"src/{sources.PACKAGE}/{folder.as_posix()}")
                needed -= modules
                break
        else:
            listed.append(f"src/{sources.PACKAGE}/{file.as_posix()}")
            needed.remove(file)
    return listed


def _own_code(environment: Environment, pipeline: str) -> Iterator[str]:
    """The user's own files that rewards or the model are made of: code in the project, and what options name."""
    if pipeline not in ("baseline", "train", "evaluate"):
        return
    config = environment.config
    named = [reward.function for reward in config.rewards.values() if reward.function is not None]
    for path in [*named, *([config.model.family] if ":" in config.model.family else [])]:
        for file in code_files(path):
            if file.is_relative_to(Path.cwd()):
                yield file.relative_to(Path.cwd()).as_posix()
    for reward in config.rewards.values():
        for _, file in named_paths(reward.options, config.output):
            yield _from_here(file.as_posix())


def _plots(environment: Environment) -> Iterator[dict[str, Any]]:
    """What `dvc plots show` draws: the curves of the training, and pictures of the held-out result."""
    output, curves = environment.config.output, {"reward/total": "Mean total reward of the training samples"}
    curves["eval/total"] = "Mean total reward on eval prompts, at the stock sampler"
    for column, title in (curves | _kl_curves(environment)).items():
        history = _beside(environment, f"{output}/08_reporting/training.csv")
        yield {
            title: {
                "x": {history: "step"},
                "y": {history: column},
                "x_label": "step",
                "y_label": column,
            }
        }
    for picture in ("differences.png", "samples.png"):
        yield {_beside(environment, f"{output}/08_reporting/evaluation/{picture}"): None}


def _kl_curves(environment: Environment) -> dict[str, str]:
    """Column of training.csv -> title, where a KL is measured."""
    from visual_grpo.components import make_plan

    try:
        modules = make_plan(environment.config).modules
    except UserError:  # A model that is not here yet; which modules it has is not known.
        return {}
    measured = [module for module in modules if environment.config.grpo_of(module).kl_weight > 0]
    alone = len(modules) == 1
    return {"kl" if alone else f"{module}/kl": f"KL of {module} to the base model" for module in measured}


def _beside(environment: Environment, path: str) -> str:
    """A path as DVC takes it outside of stages: relative to the file."""
    return path if environment.name is None or Path(path).is_absolute() else f"../../{path}"


def _from_here(path: str) -> str:
    full = Path(path).expanduser()
    inside = full.is_absolute() and full.is_relative_to(Path.cwd())
    return (full.relative_to(Path.cwd()) if inside else full).as_posix()


def _pipelines() -> dict[str, Pipeline]:
    from visual_grpo.pipeline_registry import register_pipelines

    return register_pipelines()


class _Indented(yaml.SafeDumper):
    """Lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)
