"""The command that is printed is the command that was run, with more parameters."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from kedro.framework.cli.cli import KedroCLI
from kedro.framework.cli.utils import _split_params
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline, node
from kedro_datasets.json import JSONDataset

from tests.evaluation.test_verdict import STEADY
from tests.evaluation.test_verdict import entry as an_entry
from visual_grpo.common.errors import CombinedError, Remedy, UserError
from visual_grpo.config import flatten
from visual_grpo.data.datasets import DataError
from visual_grpo.evaluation.verdict import summarise
from visual_grpo.hooks.cli import parsed, run
from visual_grpo.hooks.ending import EndingHooks
from visual_grpo.operations import command as command_module
from visual_grpo.operations.command import Command, render
from visual_grpo.operations.promotion import NotPromotedError
from visual_grpo.operations.retraining.__main__ import main as retrain
from visual_grpo.operations.retraining.job import Code
from visual_grpo.operations.session import Session
from visual_grpo.pipeline_registry import register_pipelines

command_of = Command.from_run_params


@pytest.fixture(scope="module")
def root() -> Path:
    """This project, made known to Kedro: half a second beside all libraries."""
    folder = Path(__file__).parents[2]
    bootstrap_project(folder)
    return folder


def test_options_and_parameters_of_the_run_are_kept() -> None:
    command = command_of(
        {
            "env": "sd3_small",
            "pipeline_names": ["train", "evaluate"],
            "runtime_params": {"data": {"path": "my photos"}, "seed": 3, "output": None, "policy": {"train": "dit"}},
            "tags": None,
            "namespaces": ["train"],
            "from_inputs": ["records"],
            "node_names": ["train.train"],
        }
    )
    words = shlex.split(str(command.with_parameters({"data.task": "i2i", "seed": 4})))
    assert words[1:] == [
        "run",
        "--env=sd3_small",
        "--pipelines=train,evaluate",
        "--namespaces=train",
        "--from-inputs=records",
        "--nodes=train.train",
        "--params=data.path=my photos,seed=4,output=null,policy.train=dit,data.task=i2i",
    ]
    assert words[0].rpartition("/")[2] == "kedro"


def test_environment_pipeline_and_folder_of_the_configuration_are_the_commands_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for environment in (None, "local"):
        assert shlex.split(str(command_of({"env": environment})))[1:] == ["run"]
    command = command_of({"runtime_params": {"seed": 3, "resume": "auto"}, "pipeline_names": ["train", "evaluate"]})
    assert str(command.for_pipeline("baseline")).endswith("--pipeline=baseline --params=seed=3")
    assert str(command.for_pipeline("train")).endswith("--pipeline=train --params=seed=3,resume=auto")
    assert str(command.for_pipeline("starter,train")).endswith("--pipelines=starter,train --params=seed=3")
    moved = replace(command_of({"runtime_params": {"resume": "there/step-000004"}}), kept={"output": "there"})
    assert str(moved.for_pipeline("evaluate")).endswith("--pipeline=evaluate --params=output=there")
    assert str(moved.for_pipeline("train")).endswith("--pipeline=train --params=resume=there/step-000004")
    secret = {"retrain": {"notify": "curl https://there/secret"}, "seed": 3}
    assert str(command_of({"runtime_params": secret})).endswith("run --params=seed=3"), "no run reads it"
    monkeypatch.setattr(command_module, "_current", [Command(None, (), {}, "other/conf")])
    assert "run --conf-source=other/conf" in str(command_of({}))


def test_the_command_that_goes_on_has_all_that_was_given() -> None:
    given = {"data": {"path": "my photos"}, "grpo": {"learning_rate": 5e-05}, "resume": "never", "seed": 3}
    command = command_of({"env": "text", "pipeline_names": ["train", "evaluate"], "runtime_params": given})
    words = shlex.split(str(command.resuming("never", Path("data/x/checkpoints"))))
    params = "--params=data.path=my photos,grpo.learning_rate=5e-05,resume=auto,seed=3"
    assert words[1:] == ["run", "--env=text", "--pipeline=train", params]
    for key, value in (("policy.train", ["dit", "ar"]), ("model.options.instruction", "Find, then answer")):
        words = shlex.split(str(command.with_parameters({key: value}).resuming("never", Path("data/x/checkpoints"))))
        tree = parsed(words[-1].removeprefix("--params="))
        assert flatten(tree) == flatten(parsed(params.removeprefix("--params="))) | {key: value}
    named = command.resuming("elsewhere/step-000004", Path("data/x/checkpoints"))
    assert "resume=data/x/checkpoints" in str(named)


KEPT = "--params=data.path=photos,seed=3"


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (UserError("It is wrong."), "It is wrong."),
        (ValueError("a bug"), "a bug"),
        (UserError("No model.", remedy="starter"), f"No model.\nRun: kedro run --env=small --pipeline=starter {KEPT}"),
        (
            DataError("No adapter.\n", remedy="train"),
            f"No adapter.\nRun: kedro run --env=small --pipeline=train {KEPT},resume=auto",
        ),
        (
            UserError("Two.", remedy="starter,baseline"),
            f"Two.\nRun: kedro run --env=small --pipelines=starter,baseline {KEPT}",
        ),
        (
            UserError("Edits.", remedy=Remedy(parameters={"data.task": "i2i", "data.path": None})),
            "Edits.\nRun: kedro run --env=small --pipelines=train,evaluate --params=seed=3,resume=auto,data.task=i2i",
        ),
        (
            UserError("Masks.", remedy=Remedy("labels", environment="negative_points")),
            f"Masks.\nRun: kedro run --env=negative_points --pipeline=labels {KEPT}",
        ),
        (UserError("Not there.", remedy=Remedy(make="quantised")), "Not there.\nRun: make quantised"),
        (
            CombinedError([UserError("One.", remedy="plan"), UserError("Two."), UserError("3.", Remedy(make="ui"))]),
            f"3 things are wrong:\n1. One.\nRun: kedro run --env=small --pipeline=plan {KEPT}\n2. Two."
            "\n3. 3.\nRun: make ui",
        ),
    ],
)
def test_an_error_is_printed_with_what_to_run(error: Exception, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"data.path": "photos", "seed": 3, "resume": "auto"}
    monkeypatch.setattr(command_module, "_current", [Command("small", ("--pipelines=train,evaluate",), given)])
    monkeypatch.setattr(command_module, "_kedro", lambda: "kedro")
    assert render(error) == printed
    assert "Run:" not in str(error)


def test_remedies_exist_and_libraries_print_no_commands() -> None:
    root = Path(__file__).parents[2]
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    pipelines = register_pipelines().keys() - {"__default__"}
    used: set[Any] = set()
    for file in sorted((root / "src/visual_grpo").rglob("*.py")):
        top = file.relative_to(root / "src/visual_grpo").parts[0]
        for call in (each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Call)):
            name = getattr(call.func, "id", "")
            given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
            if name == "Remedy":
                used |= {each.value for each in call.args if isinstance(each, ast.Constant)}
                assert given.get("make", "ui") in targets, f"{file}:{call.lineno}"
                assert (root / "conf" / str(given.get("environment", "base"))).is_dir(), f"{file}:{call.lineno}"
            used |= {given["remedy"]} if "remedy" in given else set()
            if name.endswith("Error") and top not in ("hooks", "operations", "pipelines"):
                texts = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
                assert not re.search(r"kedro run|make (?=ui|setup|quantised)", " ".join(map(str, texts)))
    assert len(used) > 5
    assert used <= pipelines


@pytest.mark.parametrize(
    "value",
    [
        *(3, 5e-05, True, None, "text", "5", "null", "true", "1e-3", "a: b", " a", "it's", "ü", "[x"),
        *("a, b", 'a "b", c', "a #3", ["a", "b"]),
    ],
)
def test_every_value_is_read_as_what_it_was(value: object) -> None:
    [params] = shlex.split(str(command_of({"runtime_params": {"key": value, "seed": 3}})))[2:]
    read = parsed(params.removeprefix("--params="))
    assert read == {"key": value, "seed": 3}
    assert type(read["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("generate.prompt=a [red] cube, 2", {"generate": {"prompt": "a [red] cube, 2"}}),
        ('p="a cube: red, [big] #3", seed=4', {"p": "a cube: red, [big] #3", "seed": 4}),
        ("p=a sign, number #5: yes", {"p": "a sign, number #5: yes"}),
        ('p="a table of x=1, y=2", seed=4', {"p": "a table of x=1, y=2", "seed": 4}),
        ('p="OPEN" on a sign,q=[red] cube,r=a: b', {"p": '"OPEN" on a sign', "q": "[red] cube", "r": "a: b"}),
        ("a=010,b=-1.5e-3,c=1:30,d=True", {"a": 10, "b": -0.0015, "c": "1:30", "d": True}),
        ("policy.train=[ar, dit],p={ssim: 1}", {"policy": {"train": ["ar", "dit"]}, "p": {"ssim": 1}}),
        (" a = 1 ,b.c=null,", {"a": 1, "b": {"c": None}}),
        ("adapter=00123456,run=12e45678", {"adapter": "00123456", "run": "12e45678"}),
        ("generate.prompt=007,seed=007", {"generate": {"prompt": "007"}, "seed": 7}),
        (f"trust={'0' * 32},adapter=null", {"trust": "0" * 32, "adapter": None}),
        ("rewards.a.options.name=07", {"rewards": {"a": {"options": {"name": 7}}}}),
        ("resume=same,", {"resume": "same"}),
        (", resume=same,, ,seed=3 , ,", {"resume": "same", "seed": 3}),
        (",", {}),
        ("", {}),
    ],
)
def test_a_comma_within_a_value_separates_nothing(text: str, tree: dict[str, Any]) -> None:
    assert run.make_context("run", [f"--params={text}"]).params["params"] == tree


@pytest.mark.parametrize("text", ["", "seed=3,grpo.learning_rate=2e-4,adapter=a1234567,data.path=my photos", "b=true"])
def test_usual_parameters_are_what_they_are_for_kedro(text: str) -> None:
    assert parsed(text) == _split_params(click.Context(run), run.params[0], text)


@pytest.mark.parametrize("text", ["foo", "=3", "foo,a=1", "data.path=", "seed=3,data.path= ,b=1", "data.path=,seed=3"])
def test_what_is_no_parameter_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(click.UsageError, match="expected NAME=VALUE, "):
        parsed(text)


def test_the_help_lists_run_once_with_what_it_takes() -> None:
    listed = CliRunner().invoke(KedroCLI(Path(__file__).parents[2]), ["--help"]).output
    assert re.findall(r"^  (run|registry) ", listed, re.MULTILINE) == ["registry", "run"]
    shown = " ".join(CliRunner().invoke(run, ["--help"]).output.split())
    examples = re.findall(r"[a-z_][\w.]*[=:]\w\S*", shown.partition("--params")[2])
    assert [flatten(parsed(example)) for example in examples] == [{"seed": 3, "grpo.steps": 40}]
    assert not any(option in shown for option in ("--runner ", "--only-missing-outputs")), "refused"


def test_another_folder_and_an_unknown_pipeline_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("--pipeline=trian", "--pipelines=baseline,trian"):
        done = CliRunner().invoke(run, [option])
        assert done.exit_code == 1
        assert "The pipeline 'trian' does not exist. Did you mean 'train'? Pipelines: starter," in done.output
    done = CliRunner().invoke(run, ["--pipeline=train,evaluate"])
    assert "does not exist. Name several with --pipelines=train,evaluate. Pipelines:" in done.output
    # Kedro finds the project from a folder below, but relative paths would not be its own.
    monkeypatch.chdir(root / "docs")
    done = CliRunner().invoke(run, ["--pipeline=baseline"])
    assert done.exit_code == 2
    assert f"Run this in the project's folder: cd {root}" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pipeline=plan", "--nodes=paln"], "does not contain nodes named ['paln']. Its nodes: plan."),
        (["--pipeline=plan", "--tags=none"], "no nodes after applying all provided filters"),
        (["--pipeline=plan", "--to-outputs=none"], "does not contain datasets named ['none'] Its nodes: plan."),
        (["--runner=ParallelRunner"], "--runner: only SequentialRunner: a stop must reach the training"),
        (["--runner=ThreadRunner"], "--runner: only SequentialRunner"),
        (["--pipeline=train", "--only-missing-outputs"], "not whether they match these parameters and data"),
    ],
)
@pytest.mark.usefixtures("root")
def test_options_of_kedro_that_cannot_be_followed_are_refused_in_a_sentence(options: list[str], said: str) -> None:
    done = CliRunner().invoke(run, options)
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.output.split())
    assert isinstance(done.exception, SystemExit), "no traceback"


def test_a_gate_that_does_not_promote_ends_with_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {NotPromotedError("not better"): 3, UserError("no such file"): 1}
    for error, code in ends.items():
        monkeypatch.setattr(KedroSession, "run", Mock(side_effect=error))
        with pytest.raises(click.ClickException) as ended:
            Session.__new__(Session).run()
        assert (ended.value.exit_code, ended.value.message) == (code, str(error))


def test_the_help_of_a_retraining_says_what_its_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        retrain(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [code for code in Code if not re.search(rf"[:;] {int(code)} \w", shown)] == []


MADE_BY = {
    "base_model": "starter",
    "records": "data_preparation",
    "baseline": "baseline",
    "adapters": "train",
    "trained": "evaluate",
}


@pytest.mark.parametrize(
    ("there", "made", "given", "following"),
    [
        ((), "base_model", {}, "--pipeline=data_preparation"),
        (("base_model",), "records", {}, "--pipeline=baseline"),
        ((), "records", {"data.path": "photos"}, "--pipelines=starter,baseline --params=data.path=photos"),
        (("base_model", "records"), "baseline", {}, "--pipeline=train"),
        (("base_model", "records"), "baseline", {"adapter": "best"}, "--pipeline=evaluate --params=adapter=best"),
        ((), "records", {"adapter": "best"}, "--pipelines=starter,baseline,evaluate --params=adapter=best"),
        (("base_model", "records", "baseline"), "adapters", {}, "--pipeline=evaluate"),
    ],
)
def test_the_next_command_makes_what_is_not_there_yet(
    there: tuple[str, ...],
    made: str,
    given: dict[str, str],
    following: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_module, "_current", [Command(None, (), given)])
    catalog = DataCatalog(
        {
            name: JSONDataset(filepath=str(tmp_path / f"{name}.json"), metadata={"made_by": maker})
            for name, maker in MADE_BY.items()
        }
    )
    for name in (*there, made):
        catalog.save(name, {})
    if made == "records" and "base_model" not in there:
        catalog["base_model"] = MemoryDataset({}, metadata={"made_by": "starter"})  # As `InputHooks` does for own data.
    makes = Pipeline([node(Path.cwd, None, made, name="make")])
    EndingHooks().after_pipeline_run(makes, catalog)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: "))
    assert line.endswith(f"kedro run {following}")
    monkeypatch.setenv(command_module.APART, "1")
    EndingHooks().after_pipeline_run(makes, catalog)
    assert not capsys.readouterr().out, "reproduce removes the folder of the command"


def test_an_evaluation_ends_with_its_verdict_and_a_link_to_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("trained", "evaluation_report")
    entries: list[dict[str, str]] = [{}, {"opened": "evaluation.html"}]
    catalog = DataCatalog(
        {
            name: JSONDataset(filepath=str(tmp_path / name), metadata=entry | {"made_by": "evaluate"})
            for name, entry in zip(names, entries, strict=True)
        }
    )
    (tmp_path / "evaluation_report").mkdir()
    page = tmp_path / "evaluation_report" / "evaluation.html"
    page.touch()
    headline = summarise([an_entry(), STEADY])
    page.with_suffix(".json").write_text(json.dumps({"headline": headline}), encoding="utf-8")
    makes = Pipeline([node(Path.cwd, None, name, name=name) for name in names])
    EndingHooks().after_pipeline_run(makes, catalog)
    *_, said, following = capsys.readouterr().out.splitlines()
    assert said == headline["sentence"]
    assert following == f"Next: open {page.as_uri()} (make ui shows all runs)"


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("--env=sd3", {"sd3", "sd3_small"}),
        ("--pipeline=re", {"reproduce", "reward_report"}),
        ("--pipelines=train,eval", {"train,evaluate"}),
    ],
)
def test_the_shell_completes_names(
    root: Path, typed: str, completions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    found = ShellComplete(run, {}, "run", "_RUN_COMPLETE").get_completions([], typed)
    assert {item.value for item in found} == completions
