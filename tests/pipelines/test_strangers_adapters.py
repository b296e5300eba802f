"""Commands on a folder of adapters, or a checkpoint, whose record a stranger has edited: nothing of it runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import mlflow
import pytest
import torch
from kedro.io import DataCatalog, MemoryDataset

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import Painter, records
from tests.hooks.test_parameters import context_of
from tests.operations.reproduction.repositories import git, repository
from tests.pipelines.painted import run_nodes
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.adapter_folder import FACTS, adapter_digest, read_facts
from visual_grpo.common.errors import UserError
from visual_grpo.config.schema import merged
from visual_grpo.config.stated import parameters_digest
from visual_grpo.data.datasets import PATH, FolderDataset, RecordsDataset
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.grpo.checkpoint import save_checkpoint
from visual_grpo.hooks.parameters import ParameterHooks, _with_adapters
from visual_grpo.operations.reproduction.repeat import require_own
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.reproduce import reproduce_training
from visual_grpo.tracking.registry import Registry
from visual_grpo.tracking.run_context import RunContext
from visual_grpo.tracking.sync import DIGEST
from visual_grpo.tracking.tracker import Tracker
from visual_grpo.tracking.trust import PARAMETERS
from visual_grpo.training import components

REFUSED = "(?s)This command would take the following from .*Nothing was run, opened or sent"
NAMED = {
    "evaluate": "adapter={}",
    "baseline": "adapter={}",
    "generate": "adapter={},generate.prompt=a cat",
    "compare": "compare.second={}",
    "promote": "promotion.candidate={}",
    "vote": "vote.adapter={},vote.pairs=1",
}
"""Pipeline -> parameters that name adapters."""


class Place:
    """A user's project, in which ``ran`` appears if code of the stranger runs, and ``asked`` counts requests to him."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.asked, self.url = folder, folder / "ran", list[str](), ""
        base = base_model(Path("data/06_models/base"))
        shutil.copytree(base, "their base")
        rows = [{"id": r.id, "prompt": r.prompt, "split": r.split, "metadata": "{}"} for r in records("held_out", 4)]
        rows += [{"id": r.id, "prompt": r.prompt, "split": r.split, "metadata": "{}"} for r in records("train", 4)]
        write_manifest(folder / "records.parquet", rows)
        data = RecordTable(folder / "records.parquet").digest
        self.theirs = adapters(folder / "theirs", base, data=data, model=str(base), parameters=parameters().public())
        (self.theirs / "training.csv").write_text("step,reward/total\n1,0.5\n")
        code = f"import pathlib\npathlib.Path({str(self.ran)!r}).touch()\n"
        (folder / "evil.py").write_text(code)

    def edit(self, changes: dict[str, Any], folder: Path | None = None) -> None:
        file = (folder or self.theirs) / FACTS
        facts = read_facts(file.parent)
        file.write_text(json.dumps(facts | {"parameters": merged(facts["parameters"], changes)}))

    def run(self, pipeline: str, given: str) -> None:
        """Checks the parameters as ``kedro run`` does, and runs the nodes of pipelines that need no training."""
        hooks, nodes = ParameterHooks(), register_pipelines()[pipeline]
        hooks.after_context_created(context_of(given))
        table = RecordsDataset(filepath=str(self.folder / "records.parquet"))
        looked_at = {name.removeprefix(PATH) for name in nodes.inputs() if name.startswith(PATH)}
        places = {
            name: FolderDataset(filepath=str(self.folder / name))
            for name in {"adapters"} | looked_at | nodes.all_outputs()
        }
        catalog = DataCatalog({**places, "records": table, "draft": MemoryDataset("a path")})
        hooks.after_catalog_created(catalog)
        hooks.before_pipeline_run(nodes, catalog)
        if pipeline not in ("evaluate", "baseline", "train"):
            run_nodes(nodes, catalog)

    def attack(self, kind: str) -> dict[str, Any]:
        """Changes of a record."""
        http: dict[str, Any] = {"url": self.url, "api_key": "$HF_TOKEN", "headers": {"X": "$AWS_SECRET_ACCESS_KEY"}}
        command = {"function": "subprocess:Popen", "options": {"args": ["touch", str(self.ran)]}}
        segmenter = {"options": {"segmenter": {"function": "evil:segment"}}}
        changes: dict[str, dict[str, Any]] = {
            "command": {"rewards": {"z": command}},
            "secrets": {"rewards": {"http": {"options": http}}},
            "family": {"model": {"family": "evil:FAMILY", "path": "their base"}},
            "world": {"starter": {"world": "evil:WORLD"}},
            "segmenter": {"rewards": {"negative_points": segmenter}},
            "features": {"rewards": {"votes": {"options": {"head": "theirs", "features": "evil:features"}}}},
        }
        return changes[kind]

    @property
    def is_safe(self) -> bool:
        return not self.ran.exists() and not self.asked


@pytest.fixture
def place(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setattr(components, "build_model", lambda spec, adapters=None: Painter())
    found = Place(tmp_path)

    class Counting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(str(self.headers))
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Counting) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()


KINDS = ("command", "secrets", "family", "segmenter", "features")


@pytest.mark.parametrize(
    ("pipeline", "kind"),
    [
        *(("evaluate", kind) for kind in (*KINDS, "world")),
        *(("generate", kind) for kind in ("command", "family", "segmenter", "world")),
        *(("compare", "command"), ("promote", "secrets"), ("baseline", "command"), ("vote", "family")),
    ],
)
def test_nothing_of_an_edited_record_is_run_opened_or_sent(place: Place, pipeline: str, kind: str) -> None:
    place.edit(place.attack(kind))
    given = NAMED[pipeline].format(place.theirs)
    if kind == "world" or (pipeline == "generate" and kind in ("command", "secrets", "features")):
        place.run(pipeline, given)  # It takes over no world, and generate no rewards: there is nothing to refuse.
    else:
        with pytest.raises(UserError, match=REFUSED):
            place.run(pipeline, given)
    assert place.is_safe


@pytest.mark.parametrize(("kind", "given"), [("command", "rewards.z=null"), ("world", "")])
def test_nothing_is_registered_of_which_a_part_was_refused(place: Place, kind: str, given: str) -> None:
    """Of a registered version, nothing is asked any more."""
    place.edit(place.attack(kind))
    with pytest.raises(UserError, match=REFUSED):
        place.run("promote", ",".join([NAMED["promote"].format(place.theirs), given]).rstrip(","))
    assert Registry("shapes").champion() is None


def test_the_other_adapters_of_a_comparison_are_refused_before_any_is_drawn(place: Place) -> None:
    own = shutil.copytree(place.theirs, place.folder / "own")
    place.edit(place.attack("family"))
    with pytest.raises(UserError, match=r"take the following from .*theirs,(?s:.*)code: model\.family = 'evil:FAMILY'"):
        place.run("compare", f"compare.first={place.theirs},compare.second={own}")
    assert place.is_safe
    assert not list(Path("data").rglob("scores.parquet"))


def test_an_edited_record_among_mlflows_files_is_refused(place: Place) -> None:
    version = Registry("shapes").register(place.theirs)
    place.edit(place.attack("family"), version.adapters())
    with pytest.raises(UserError, match=r"The adapters of models:/shapes/1 in .* differ from what was registered"):
        place.run("generate", "adapter=models:/shapes/1,generate.prompt=a cat")
    assert place.is_safe


@pytest.mark.parametrize(
    ("resume", "kind"),
    [
        *(("auto", kind) for kind in ("command", "secrets", "family", "world")),
        ("theirs", "command"),
        ("theirs", "world"),
    ],
)
def test_a_checkpoint_is_refused_as_adapters_are(place: Place, kind: str, resume: str) -> None:
    folder = Path("data/06_models/checkpoints" if resume == "auto" else "theirs")
    tree = merged(parameters().public(), place.attack(kind))
    facts = {"provenance": {"parameters": tree}, "mlflow_run_id": None}
    save_checkpoint(folder, 1, {"a": torch.zeros(1)}, facts)
    with pytest.raises(UserError, match=REFUSED):
        place.run("train", f"resume={resume}")
    assert place.is_safe
    if kind in ("family", "world"):  # The same of a training of this project's own is run: the attack works.
        own(PARAMETERS, parameters_digest(tree))
        with pytest.raises(UserError, match=f"'evil' has no '{kind.upper()}'"):
            place.run("train", f"resume={resume}")
        assert place.ran.exists()


def test_whose_code_a_reproduction_would_run_is_told_first(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = place.folder / "project"
    commit = repository(project)
    (project / "src/kedro").mkdir()
    (project / "src/kedro/__main__.py").write_text((place.folder / "evil.py").read_text())
    git(project, "add", "-A")
    patch = place.theirs / "changes.diff"
    patch.write_text(git(project, "diff", "--cached") + "\n")
    git(project, "reset", "--hard")
    facts = read_facts(place.theirs) | {"git.commit": commit, "git.state": "dirty"}
    (place.theirs / FACTS).write_text(json.dumps(facts))
    config = parameters(run=str(place.theirs))
    monkeypatch.chdir(project)
    with pytest.raises(UserError) as refused:
        reproduce_training(config, RunContext(), Path("latest"))
    said = str(refused.value)
    assert f"code: commit {commit}, by a <a@b.c> of " in said
    assert "code: changes.diff, lines added, removed, file: 2 0 src/kedro/__main__.py" in said
    digest = adapter_digest(place.theirs)
    assert f"trust={digest[:32]}" in said
    assert place.is_safe
    require_own(place.theirs, facts, project, parameters(trust=digest[:32]))
    assert "file: 2 0 src/kedro/__main__.py" in capsys.readouterr().out
    patch.write_text(patch.read_text() + "\n")
    with pytest.raises(UserError, match=rf"^trust is {digest[:32]}, but the digest of .*theirs is "):
        require_own(place.theirs, facts, project, parameters(trust=digest[:32]))
    own(DIGEST, adapter_digest(place.theirs))
    require_own(place.theirs, facts, project, parameters())


def own(tag: str, digest: str) -> None:
    """Notes a record in MLflow, as a training of this project does."""
    tracker = Tracker.start("ar", Path("data"), print)
    tracker.own(tag, digest)
    tracker.end("FINISHED")


def test_what_a_user_trained_with_his_own_code_and_data_needs_no_question(place: Place) -> None:
    """Nothing of it is repeated at the command, nor in the configuration."""
    mine = {
        "data": {"path": "photos", "split": "train"},
        "model": {"path": str(shutil.copytree("data/06_models/base", "own")), "revision": "main"},
        "rewards": {"mine": {"function": "tests.evaluation.painter:brightness"}},
        "train": {"start": "earlier"},
    }
    place.edit(mine)
    facts = read_facts(place.theirs) | {"model": "own"}
    (place.theirs / FACTS).write_text(json.dumps(facts))
    own(DIGEST, adapter_digest(place.theirs))
    for pipeline in NAMED:
        hooks = ParameterHooks()
        hooks.after_context_created(context_of(NAMED[pipeline].format(place.theirs)))
        nodes = register_pipelines()[pipeline]
        used = _with_adapters(hooks._parameters, nodes, Path("latest"), hooks._runtime)
        assert (used.model.path, used.data.path) == ("own", "photos")
        assert ("mine" in used.rewards) == (pipeline != "generate")
        if pipeline == "generate":
            place.run(pipeline, NAMED[pipeline].format(place.theirs))
