"""What holds for the nodes and datasets of every registered pipeline."""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pandas as pd
import pytest
from kedro.framework.project import configure_project
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from tests.evaluation.defaults import parameters
from visual_grpo.config import Parameters
from visual_grpo.data.datasets import PATH
from visual_grpo.hooks.parameters import RUN_CONTEXT, RUN_SPEC, ProjectConfigLoader
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.pipeline_registry import NAMES, register_pipelines
from visual_grpo.settings import CONFIG_LOADER_ARGS
from visual_grpo.tracking.run_context import RunContext

ROOT = Path(__file__).parents[2]
RETURNED = {
    "visual_grpo.data.datasets.FolderDataset": Path,
    "visual_grpo.data.datasets.RecordsDataset": Path,
    "json.JSONDataset": dict[str, Any],
    "pandas.CSVDataset": pd.DataFrame,
    "MemoryDataset": Path,
}
"""What a node returns for each type of dataset: data or a path, never a function."""
GIVEN = ("param", PATH, "draft")
"""Beginnings of the names of what hooks give to nodes."""


@pytest.fixture(scope="module")
def everything() -> Pipeline:
    configure_project("visual_grpo")
    return sum(register_pipelines().values(), start=Pipeline([]))


@pytest.fixture(scope="module")
def entries() -> dict[str, Any]:
    loader = ProjectConfigLoader(str(ROOT / "conf"), env="base", **CONFIG_LOADER_ARGS)
    return {name: entry for name, entry in loader["catalog"].items() if not name.startswith(GIVEN)}


def arguments(node: Node) -> dict[str, Any]:
    """The type of each argument of the node's function, by the dataset that it gets."""
    types = get_type_hints(node.func)
    names = signature(node.func).parameters
    return {dataset: types[name] for name, dataset in zip(names, node.inputs, strict=True)}


def test_nodes_return_data_and_paths(everything: Pipeline, entries: dict[str, Any]) -> None:
    for node in everything.nodes:
        returned = get_type_hints(node.func)["return"]
        parts = get_args(returned) if get_origin(returned) is tuple else (returned,)
        expected = tuple(RETURNED[entries[name]["type"]] for name in node.outputs) or (type(None),)
        assert parts == expected, node.name


def test_parameters_are_typed_as_in_the_schema(everything: Pipeline) -> None:
    sections = {f"params:{name}": field.annotation for name, field in Parameters.model_fields.items()}
    expected = {"parameters": Parameters, RUN_SPEC: RunSpec, RUN_CONTEXT: RunContext} | sections
    for node in everything.nodes:
        for dataset, kind in arguments(node).items():
            if dataset.startswith(GIVEN):
                assert kind == expected.get(dataset, Path), (node.name, dataset)


def test_every_dataset_is_in_the_catalog(everything: Pipeline, entries: dict[str, Any]) -> None:
    assert {name for name in everything.datasets() if not name.startswith(GIVEN)} == set(entries)


def test_kedro_viz_can_order_the_layers(everything: Pipeline, entries: dict[str, Any]) -> None:
    """Kedro-Viz hides all layers as soon as two of them depend on each other."""
    layers = {name: entry["metadata"]["kedro-viz"]["layer"] for name, entry in entries.items()}
    before: dict[str, set[str]] = defaultdict(set)
    for name, layer in layers.items():
        later = everything.from_inputs(name).all_outputs() if name in everything.all_inputs() else set()
        for other in {layers[output] for output in later} - {layer}:
            before[other].add(layer)
    order = list(TopologicalSorter(before).static_order())
    assert order == ["raw", "model_input", "baseline", "models", "model_output", "reporting"]


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated", "ignore:Accessing the 'model_fields' attribute")
@pytest.mark.parametrize(("environment", "output"), [(None, "data"), ("sd3_small", "data/sd3_small")])
def test_kedro_viz_shows_the_graph_without_hooks(
    environment: str | None, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `kedro viz run` answers, without its server."""
    from fastapi.testclient import TestClient
    from kedro_viz.api.apps import create_api_app_from_project
    from kedro_viz.data_access import data_access_manager
    from kedro_viz.server import load_and_populate_data

    monkeypatch.chdir(ROOT)
    data_access_manager.reset_fields()
    load_and_populate_data(ROOT, environment, package_name="visual_grpo")
    browser = TestClient(create_api_app_from_project(ROOT))
    assert "<title>Kedro-Viz" in browser.get("/").text
    graph = browser.get("/api/main").json()
    assert {pipeline["id"] for pipeline in graph["pipelines"]} == {"__default__", *NAMES}
    shown = {node["id"]: node["name"] for node in graph["nodes"] if node["type"] != "modularPipeline"}
    edges = {(edge["source"], edge["target"]) for edge in graph["edges"]}
    flow = register_pipelines()["__default__"].nodes
    assert {(shown[one], shown[other]) for one, other in edges if {one, other} <= shown.keys()} == {
        *((name, node.short_name) for node in flow for name in node.inputs),
        *((node.short_name, name) for node in flow for name in node.outputs),
    }
    records = next(node for node, name in shown.items() if name == "records")
    place = str(ROOT / output / "05_model_input/records.parquet")
    assert browser.get(f"/api/nodes/{records}").json()["filepath"] == place


def test_the_catalog_says_which_pipeline_makes_a_dataset(entries: dict[str, Any]) -> None:
    makers = {output: name for name in NAMES for output in register_pipelines()[name].all_outputs()}
    assert {name: entry["metadata"]["made_by"] for name, entry in entries.items()} == makers


def test_tags_are_those_that_the_hooks_read(everything: Pipeline) -> None:
    tags = {tag for node in everything.nodes for tag in node.tags}
    judged = {tag.removeprefix("parameters_of.") for tag in tags if tag.startswith("parameters_of.")}
    others = {tag for tag in tags if not tag.startswith("parameters_of.")}
    assert others == {"tracked", "apart", "distributed", "model", "training", "rewards", "unscored"}
    assert all(isinstance(attrgetter(name)(parameters()), str) for name in judged)
