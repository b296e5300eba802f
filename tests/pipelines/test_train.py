"""The train node on a small untrained GLM-Image, with a real MLflow store."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from kedro.io import DataCatalog, DatasetError, MemoryDataset
from PIL import Image
from rich.console import Console

from tests.conftest import SIZE
from tests.hub import COMMIT
from tests.models.families.sd3 import tiny as sd3
from tests.models.test_lora_files import write as write_lora
from tests.pipelines.painted import folders, run_nodes
from tests.training.few_steps import STEPS, parameters, resolved
from visual_grpo import provenance
from visual_grpo.adapter_folder import DATA_COMMIT, adapter_digest
from visual_grpo.common import console
from visual_grpo.common.digests import file_digest
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.common.phases import alike, phase, watched_by
from visual_grpo.config import merged
from visual_grpo.config.decides import Decides
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.drift import profile_of, read_profile
from visual_grpo.data.manifest import RecordTable, prompt_hash, read_seen, write_manifest
from visual_grpo.hooks.parameters import RUN_CONTEXT, RUN_SPEC, parameter_entries
from visual_grpo.models.run_spec import resolve
from visual_grpo.operations.command import Command
from visual_grpo.operations.reproduction.repeat import check_repeatable
from visual_grpo.operations.training_command import StepWatcher, show_training
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.tracking import run_context
from visual_grpo.tracking.adapter_lookup import find_start
from visual_grpo.tracking.model_card import model_card
from visual_grpo.tracking.run_context import RunContext
from visual_grpo.tracking.sync import DIGEST
from visual_grpo.tracking.tracker import Tracker
from visual_grpo.training import made_with
from visual_grpo.training.run_checkpoints import Progress

FEW = {"steps": 1, "warmup_steps": 0}
"""Where the number of steps does not matter."""


class Project:
    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.made_otherwise: dict[str, Any] = {}
        """What the baseline has otherwise than the run."""
        rows = [
            {"id": f"r{i}", "prompt": f"a thing {i}", "split": "train" if i < 6 else "eval", "metadata": "{}"}
            for i in range(9)
        ] + [
            {"id": f"{split}{i}", "prompt": f"{split} {i}", "split": split, "metadata": "{}"}
            for split in ("held_out", "sealed")
            for i in range(2)
        ]
        write_manifest(folder / "records.parquet", rows, lambda: {"commit": COMMIT})
        (folder / "baseline").mkdir(parents=True)

    def run(self, **changes: Any) -> DataCatalog:
        own = {"policy": {"train": ["ar"]}, "model": {"path": str(self.model)}}
        config = parameters(self.folder, **(own | changes))
        typed = parameter_entries(config) | {
            RUN_SPEC: resolve(config),
            RUN_CONTEXT: RunContext(tracker=Tracker.active()),
        }
        catalog = DataCatalog(
            {name: MemoryDataset(value) for name, value in typed.items()}
            | {
                "base_model": MemoryDataset({"model": str(self.model), "digest": "digest", "content": None}),
                "records": RecordsDataset(filepath=str(self.folder / "records.parquet")),
                "training_history": MemoryDataset(),
            }
            | folders(self.folder, {"baseline": "baseline", "adapters": "train"})
        )
        self._draw_baseline(catalog)
        run_nodes(register_pipelines()["train"], catalog)
        return catalog

    def _draw_baseline(self, catalog: DataCatalog) -> None:
        """One black picture of each eval prompt with the total -10, made with the parameters of this run."""
        spec, starter = catalog.load(RUN_SPEC), catalog.load("base_model")
        (self.folder / "baseline/eval").mkdir(exist_ok=True)
        rows = []
        for record in catalog.load("records").split("eval"):
            file = f"eval/{record.id}.png"
            Image.new("RGB", SIZE[::-1]).save(self.folder / "baseline" / file)
            row = {"sampler": "eval", "split": "eval", "id": record.id, "index": 0, "unit": record.id, "file": file}
            rewards = {f"reward/{name}": -10.0 * reward.weight for name, reward in spec.config.rewards.items()}
            rows.append(row | {"total": -10.0} | rewards)
        scores = pd.DataFrame(rows)
        scores.attrs["weights"] = {name: reward.weight for name, reward in spec.config.rewards.items()}
        scores.to_parquet(self.folder / "baseline/scores.parquet")
        present = made_with.of(spec, starter, catalog.load("records").digest)
        tree = merged(present["parameters"], self.made_otherwise)
        provenance.write(self.folder / "baseline", {**present, "parameters": tree})


@pytest.fixture
def project(tmp_path: Path, pipeline_folder: Path, empty_database: Path) -> Project:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return Project(tmp_path, pipeline_folder)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, pipeline_folder: Path, empty_database: Path) -> Path:
    """The adapters of another training."""
    folder = tmp_path_factory.mktemp("earlier")
    shutil.copy(empty_database, folder / "mlflow.db")
    Project(folder, pipeline_folder).run(grpo=FEW)
    return folder / "adapters"


def tracked(project: Project) -> tuple[Tracker, str]:
    """The tracker of a new run, and the address of its database."""
    uri = f"sqlite:///{project.folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    return Tracker.start("ar", project.folder, print), uri


def test_a_run_leaves_adapters_history_and_an_mlflow_run(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = project.folder / "adapters"
    earlier.mkdir(parents=True)
    (earlier / "training.json").write_text('{"steps": 80}')
    tracker, uri = tracked(project)
    grpo = {"steps": 2, "warmup_steps": 0}
    catalog = project.run(output=str(project.folder), grpo=grpo, tracking={"images_every": 10})
    tracker.end("FINISHED")
    history = catalog.load("training_history")
    assert history["step"].tolist() == [1, 2]
    facts = json.loads((project.folder / "adapters" / "training.json").read_text())
    assert facts["mlflow_run_id"] == tracker.run_id
    assert tracker.run_id is not None
    assert mlflow.get_run(tracker.run_id).data.tags[DIGEST] == adapter_digest(project.folder / "adapters")
    assert facts["samples"] == 2 * 2 * 3
    assert facts[DATA_COMMIT] == COMMIT
    client = mlflow.MlflowClient(uri)
    logged = client.get_metric_history(str(tracker.run_id), "reward/total")
    assert [metric.value for metric in logged] == pytest.approx(history["reward/total"].tolist())
    assert client.list_artifacts(str(tracker.run_id), "images")
    for kind in ("samples", "film"):
        assert (project.folder / "adapters" / f"{kind}-000002.png").is_file()
    said = capsys.readouterr().out
    assert "train 2/2  reward=" in said
    assert said.index(f"replaces the adapter of 80 steps in {earlier}.") < said.index("train 2/2")


def test_an_alarm_leaves_traces_and_ends_the_training(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    tracker, uri = tracked(project)
    project.run(alarm={"max_distance": 0.001, "action": "stop"}, evaluation={"prompts": 3})
    tracker.end("FINISHED")
    client = mlflow.MlflowClient(uri)
    logged = client.get_run(str(tracker.run_id))
    assert re.match(r"step 2: the reward rose by 10\.\d, and the pictures are 0\.\d\d away", logged.data.tags["alarm"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "Alarm" in line)
    assert line.endswith("Is this reward hacking? The training ends here.")
    pictures = client.list_artifacts(str(tracker.run_id), "images")
    assert [Path(file.path).name for file in pictures if Path(file.path).name.startswith("alarm")]
    facts = json.loads((project.folder / "adapters/training.json").read_text())
    assert (facts["steps"], [alarm["step"] for alarm in facts["alarms"]]) == (2, [2])
    with Image.open(project.folder / "adapters/alarm-000002.png") as picture:
        colours = np.asarray(picture.convert("RGB"))
    assert colours.shape[1] > 3 * SIZE[1], "three pictures of the base model in a row"
    assert logged.data.metrics["watch/distance"] > 0.001


def test_no_held_out_or_sealed_prompt_is_seen_in_training_and_the_adapters_say_so(project: Project) -> None:
    seen.clear()
    project.run(rewards={"noted": {"function": "tests.pipelines.test_train:noting"}}, grpo=FEW)
    assert {prompt.rpartition(" ")[0] for prompt in seen} == {"a thing"}
    never_seen = json.loads((project.folder / "adapters" / "held_out.json").read_text())
    assert never_seen == ["held_out 0", "held_out 1", "sealed 0", "sealed 1"]
    profile = read_profile(project.folder / "adapters")
    assert profile == profile_of(RecordTable(project.folder / "records.parquet"))
    assert profile.accepted == 13


def test_a_stopped_run_says_how_to_go_on_and_keeps_the_old_adapters(
    project: Project, earlier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(earlier, project.folder / "adapters")
    before = (project.folder / "adapters" / "ar" / "adapter_model.safetensors").read_bytes()
    monkeypatch.setenv("STOP_AT", "2")
    with pytest.raises(KeyboardInterrupt):
        project.run(rewards={"stopping": {"function": "tests.pipelines.test_train:stopping"}})
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("Stopped after step ")
    assert last[0].endswith(f"of {STEPS}; the checkpoint is {max(project.folder.glob('checkpoints/step-*'))}")
    assert last[1].startswith("Go on with: ")
    assert last[1].endswith("kedro run --pipeline=train --params=resume=auto")
    assert (project.folder / "adapters" / "ar" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.9, 0.6], "training samples 0.900 at the first step, 0.600 at the last (each step has its own prompts)."),
        ([0.9], "training samples 0.900."),
    ],
)
def test_the_last_line_of_a_training_compares_no_single_step(
    rewards: list[float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_training(Progress(history=[{"reward/total": reward} for reward in rewards]), len(rewards))
    assert said in capsys.readouterr().out


def test_a_step_of_minutes_says_what_it_is_doing() -> None:
    target, now = Console(file=io.StringIO(), width=120), [0.0]
    with console.progress("train", 4, console=target, every=0, clock=lambda: now[0]) as bar:
        watcher = StepWatcher(bar, clock=lambda: now[0])
        with watched_by(watcher):
            for _ in range(2):
                with phase("denoising"):
                    for _ in alike(range(4)):
                        now[0] += 25
                watcher.next_step(reward=0.5)
            list(alike(range(2)))
    lines = [re.sub("  [0-9:]+ .*", "", line) for line in target.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    first, second = "train 1/4  reward=0.5", "train 2/4  reward=0.5"
    assert lines == ["train 0/4  now=denoising 4/4", first, f"{first} now=denoising 4/4", second]


def test_an_extended_run_names_the_commands_of_all_its_parts(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("visual_grpo.operations.command._current", [Command("mine", (), {})])
    for number, changes in enumerate(({}, {"resume": "auto"}, {"resume": "auto"})):
        monkeypatch.setattr(sys, "argv", ["kedro", "run", f"--part={number}"])
        project.run(grpo={"schedule": "constant", "warmup_steps": 3, "steps": 2 + number}, **changes)
    facts = json.loads((project.folder / "adapters" / "training.json").read_text())
    assert facts["command"] == ".venv/bin/kedro run --part=0"
    assert facts["resumed.command"] == ".venv/bin/kedro run --part=1\n.venv/bin/kedro run --part=2"
    assert facts["resumed.parameters"].splitlines() == [
        "grpo.steps: 2, 3 after step 2",
        "grpo.steps: 3, 4 after step 3",
    ]
    told = [line for line in capsys.readouterr().out.splitlines() if "`reproduce` will not" in line]
    assert ["different parameters (grpo.steps: 2, 3 after step 2)" in line for line in told] == [True, False]
    assert len(told) == 2
    with pytest.raises(UserError, match=r"was resumed with different parameters \(grpo.steps: 2, 3 after step 2, "):
        check_repeatable(project.folder, facts | {"git.commit": "0"})
    card = (project.folder / "adapters" / "README.md").read_text().splitlines()
    assert "- Command: `.venv/bin/kedro run --part=0`" in card
    assert "- Resumed by: `.venv/bin/kedro run --part=1`, `.venv/bin/kedro run --part=2`" in card
    assert not any("with the code of" in line for line in card)
    assert any(line.startswith("- `ar`: `peft.PeftModel.from_pretrained(model, 'FOLDER/ar')") for line in card)
    [judged_by] = (line for line in card if line.startswith("None yet. To judge the adapter: "))
    assert "kedro run --env=mine --pipeline=evaluate`" in judged_by
    facts["parameters"]["rewards"]["second"] = {"function": "engine:read", "judge": True}
    assert "- Judges: second of the total" in model_card(facts, ["ar"]).splitlines()
    for kept, step in (("best", 1), ("last", 4)):
        assert f"- Adapter: of the {kept} step ({step})" in model_card(
            facts | {"adapter": kept, "best_step": 1}, ["ar"]
        )


def test_each_part_of_a_training_names_its_code_and_the_changes_are_those_to_the_named_commit(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (("a", "dirty", b"first \xe9"), ("a", "dirty", b"second"), ("b", "clean", b""))
    for number, (commit, state, patch) in enumerate(parts):
        tags = {"git.commit": commit, "git.state": state}
        monkeypatch.setattr(run_context, "git_tags", lambda folder, tags=tags: dict(tags))
        monkeypatch.setattr(run_context, "changes", lambda folder, patch=patch: patch)
        steps = {"schedule": "constant", "warmup_steps": 0, "steps": 1 + number}
        project.run(grpo=steps, resume="auto" if number else "never")
        assert (project.folder / "adapters/changes.diff").read_bytes() == parts[0][2]
    facts = json.loads((project.folder / "adapters/training.json").read_text())
    first, second = (hashlib.sha256(patch).hexdigest() for _, _, patch in parts[:2])
    assert {name: value for name, value in facts.items() if "git." in name} == {
        "git.commit": "a",
        "git.state": "dirty",
        "git.changes": first,
        "resumed.git.commit": "b",
        "resumed.git.state": "clean",
        "resumed.git.changes": f"{second}\nnone",
    }
    with pytest.raises(UserError, match=rf"digest of these changes \({second}, none\)"):
        check_repeatable(project.folder / "adapters", facts)


def test_a_baseline_that_would_not_pair_is_refused_before_anything_is_sampled(project: Project) -> None:
    project.made_otherwise = {"evaluation": {"seed": 99}}
    with pytest.raises(UserError, match=r"(?s)does not pair .*evaluation\.seed \(was 99, is 0\)\n") as refused:
        project.run()
    assert refused.value.remedy == Remedy("baseline")
    assert not (project.folder / "checkpoints").exists()


def test_a_checkpoint_of_other_reward_code_is_refused_before_its_baseline_is(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another baseline would not mend that: it would replace the one that belongs to the checkpoint."""
    file = tmp_path / "an_edited_judge.py"
    file.write_text("from tests.training.few_steps import brightness\n"), resolved
    monkeypatch.syspath_prepend(tmp_path)
    rewards = {"brightness": {"function": "an_edited_judge:brightness"}}
    project.run(rewards=rewards, grpo=FEW)
    file.write_text(file.read_text() + "# edited\n")
    project.made_otherwise = {"evaluation": {"seed": 99}}
    with pytest.raises(UserError, match=r"made with different code of reward brightness: .*Restore what differs"):
        project.run(rewards=rewards, grpo=FEW, resume="auto")


def test_a_training_starts_from_other_adapters_and_their_reference_stays_the_base(project: Project) -> None:
    on_policy = {"updates_per_rollout": 1, **FEW}
    first = project.run(grpo={**on_policy, "steps": 3}).load("training_history")
    adapters = shutil.copytree(project.folder / "adapters", project.folder / "before")
    started = project.run(grpo=on_policy, train={"start": str(adapters), "seed": 8}).load("training_history")
    assert first["kl"][0] == pytest.approx(0, abs=1e-6)
    assert started["kl"][0] > 1e-3
    # The samples were drawn by what is trained, not by fresh adapters.
    assert started["ratio/first_max_abs_log"][0] < 1e-4
    facts = json.loads((project.folder / "adapters" / "training.json").read_text())
    assert facts["seed"] == 8
    assert facts["start"] == adapter_digest(adapters)
    seen = read_seen(project.folder / "adapters")
    assert [prompt_hash(f"a thing {i}") in seen for i in range(10)] == [True] * 9 + [False]
    fresh = project.run(grpo=on_policy, train={"seed": 8})
    assert "start" not in json.loads((project.folder / "adapters" / "training.json").read_text())
    assert not fresh.load("training_history").equals(started)


def test_other_adapters_to_start_from_are_another_training(project: Project, earlier: Path) -> None:
    adapters, made_by = shutil.copytree(earlier, project.folder / "before"), "4f1c"
    facts = json.loads((adapters / "training.json").read_text()) | {"mlflow_run_id": made_by}
    (adapters / "training.json").write_text(json.dumps(facts))
    project.run(grpo=FEW, train={"start": str(adapters)})
    assert json.loads((project.folder / "adapters/training.json").read_text()).get("start.run") == made_by
    again = shutil.copytree(project.folder / "adapters", project.folder / "after")
    facts = json.loads((adapters / "training.json").read_text()) | {"model_content": "another"}
    (adapters / "training.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="was trained on a base model whose files differ"):
        project.run(grpo=FEW, train={"start": str(adapters)})
    shutil.copytree(again, adapters, dirs_exist_ok=True)
    with pytest.raises(UserError, match=rf"different adapters at the start: .* of the run {made_by}: train\.start="):
        project.run(grpo=FEW, train={"start": str(adapters)}, resume="auto")


def test_a_training_starts_from_a_lora_file_and_knows_it_again(
    tmp_path: Path, empty_database: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    pipeline = sd3.pipeline()
    pipeline.save_pretrained(tmp_path / "base")
    file = write_lora("diffusers sd3", pipeline, tmp_path / "theirs.safetensors")
    few = {"steps": 2, "guidance_scale": 1.0}
    own: dict[str, Any] = {
        "policy": {"train": ["dit"], "signal_check": {"rollouts": 0}},
        "sampling": {"rollout": few, "eval": few},
        "evaluation": {"every": 1, "prompts": 1, "images_per_prompt": 1, "controls": []},
        "grpo": {"steps": 1, "warmup_steps": 0, "updates_per_rollout": 1},
        "tracking": {"checkpoint_every": 1, "checkpoints": str(tmp_path / "checkpoints")},
        "train": {"start": file.name},
    }
    project = Project(tmp_path, Path("base"))
    [kl] = project.run(**own).load("training_history")["kl"]
    assert kl > 1e-6, "the reference is the base model without the LoRA"
    digest = file_digest(file)
    assert f"continues from the LoRA theirs.safetensors (sha256 {digest[:12]})" in capsys.readouterr().out
    assert json.loads((tmp_path / "adapters/training.json").read_text())["start"] == digest
    assert find_start("theirs.safetensors", digest, tmp_path) == file
    file.write_bytes(file.read_bytes()[:-1] + b"1")
    with pytest.raises(UserError, match="made with different adapters at the start"):
        project.run(**own, resume="auto")
    with pytest.raises(UserError, match=r"that the run started from .* are gone"):
        find_start("theirs.safetensors", digest, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": {"train": ["ar"], "lora": {"rank": 3, "alpha": 5.0}}}, "the LoRA of ar in .* has rank=.*rank=3"),
        (
            {"policy": {"train": ["ar", "dit"]}, "sampling": {"rollout": {"steps": 2, "guidance_scale": 1.5}}},
            "has adapters of ar, but dit is to be trained",
        ),
    ],
)
def test_adapters_of_another_shape_are_refused(
    project: Project, earlier: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=f"train.start: .*{said}"):
        project.run(train={"start": str(earlier)}, **change)


def test_a_damaged_model_is_refused_by_name(project: Project) -> None:
    damaged = project.folder / "model"
    shutil.copytree(project.model, damaged)
    next((damaged / "vision_language_encoder").glob("*.safetensors")).write_bytes(b"x")
    project.model = damaged
    with pytest.raises(UserError, match=f"The model '{damaged}' cannot be loaded") as error:
        project.run()
    assert not isinstance(error.value, DatasetError), "nothing was being saved"
    assert not (project.folder / "adapters").exists()


calls: list[int] = []
seen: list[str] = []


def noting(prompts: Any, images: Any) -> list[float]:
    seen.extend(prompt.prompt for prompt in prompts)
    return [float(image.float().mean()) for image in images]


def stopping(prompts: Any, images: Any) -> list[float]:
    """Asks the process to stop while a later step is scored, as Ctrl-C in the middle of one does."""
    calls.append(len(images))
    if len(calls) == int(os.environ["STOP_AT"]):
        os.kill(os.getpid(), signal.SIGINT)
    return [float(image.float().mean()) for image in images]


def test_weights_of_a_reward_from_the_hub_belong_to_the_training(project: Project) -> None:
    starter = {"model": str(project.model), "digest": "digest", "content": None}
    records = RecordsDataset(filepath=str(project.folder / "records.parquet")).load()
    options = {"model": "someone/clip", "revision": "c" * 40}
    config = parameters(project.folder, rewards={"clip_score": {"weight": 1.0, "options": options}})
    for entries in (
        made_with.inputs(config, starter, records.digest),
        provenance.values(made_with.of(resolved(config, project.model), starter, records.digest), Decides.SCORES),
    ):
        assert entries["commit of reward clip_score: model"] == "c" * 40
