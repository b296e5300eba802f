"""The promote and rollback pipelines on adapters that brighten a painter's pictures, with a real MLflow registry."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import Painter, records
from tests.evaluation.reports import numbers_only
from tests.tracking.toy_adapters import base_model, with_facts
from visual_grpo.adapter_folder import weights_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import new_folder
from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable, write_manifest, write_seen
from visual_grpo.operations.promotion import NotPromotedError
from visual_grpo.operations.retraining.job import Code
from visual_grpo.pipelines.promote import judge, promote, require_promotion
from visual_grpo.pipelines.rollback import roll_back
from visual_grpo.provenance import code
from visual_grpo.tracking.adapter_lookup import find_version
from visual_grpo.tracking.registry import Registry
from visual_grpo.training import components

REWARDS = {"brightness": {"function": "tests.evaluation.painter:brightness"}}
NAME = "visual_grpo"
LATEST = Path("latest")


class Gate:
    """Adapters that can ask to become champion."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.base = folder, base_model(folder / "base")
        self.gains: dict[str, float] = {}
        rows = [
            {"id": r.id, "prompt": r.prompt, "split": r.split, "metadata": '{"kind": "a"}'}
            for r in [*records("held_out", 12), *records("sealed", 6), *records("train", 3)]
        ]
        write_manifest(folder / "records.parquet", rows)
        self.records = RecordTable(folder / "records.parquet")
        self.drawn: list[str] = []
        monkeypatch.setattr(components, "build_model", self._model)
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self.client = MlflowClient()

    def train(self, name: str, gain: float, **changes: Any) -> str:
        """A folder of adapters."""
        folder = self.folder / name
        (folder / "ar").mkdir(parents=True)
        (folder / "ar/adapter_model.safetensors").write_text(name)
        self.note(folder, self._config(**changes))
        self.gains[weights_digest(folder)] = gain
        return str(folder)

    def note(self, folder: Path, config: Parameters, **facts: str) -> None:
        """Writes what a training with these parameters notes."""
        made_of = code(config)
        with_facts(folder, self.base, config, **{"data": self.records.digest, **made_of, **facts})
        (folder / "training.csv").write_text("step,reward/total\n1,0.5\n")

    def ask(
        self, candidate: str, *, judged_by: dict[str, Any] | None = None, page: bool = False, **promotion: Any
    ) -> dict[str, Any]:
        """What the pipeline leaves; the parameters are those of the candidate's training, as the hook makes them."""
        config = self._config(promotion={"candidate": candidate, **promotion}, **(judged_by or {}))
        self.drawn.clear()
        with nullcontext() if page else numbers_only():
            filled, judgement = self.judge(config)
        folder = filled.rename(self.folder / f"out{len(list(self.folder.glob('out*')))}")
        return promote(config, LATEST, folder, judgement) | {"report": folder}

    def judge(self, config: Parameters) -> tuple[Path, dict[str, Any]]:
        earlier = self.folder / "promotion", self.folder / "judgement.json"
        return judge(config, self.records, LATEST, *earlier, new_folder(self.folder / "promotion"))

    def champion(self) -> int | None:
        alias = self.client.get_registered_model(NAME).aliases.get("champion")
        return None if alias is None else int(alias)

    def roll_back(self) -> dict[str, Any]:
        config = self._config()
        return roll_back(config.promotion, config.output)

    def _config(self, **changes: Any) -> Parameters:
        small: dict[str, Any] = {
            "rewards": REWARDS,
            "reward": None,
            "policy": {"train": "ar"},
            "model": {"family": "glm_image", "path": str(self.base)},
            "evaluation": {"images_per_prompt": 2, "bootstrap_samples": 200, "controls": []},
            "output": str(self.folder),
            "promotion": {"model": NAME, "max_guard_fall": 10.0, "error": 0.4, "gates_per_year": 20},
        }
        for section, values in changes.items():
            small[section] = {**small[section], **values} if isinstance(values, dict) and section in small else values
        return parameters(**small)

    def _model(self, spec: object, adapters: Path | None = None) -> Painter:
        self.drawn.append("base" if adapters is None else weights_digest(adapters))
        return Painter(gain=0.0 if adapters is None else self.gains[weights_digest(adapters)])


@pytest.fixture
def gate(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return Gate(tmp_path, monkeypatch)


def test_what_is_better_than_champion_and_base_becomes_champion(gate: Gate) -> None:
    first, worse, better = (gate.train(name, gain) for name, gain in (("first", 0.1), ("worse", 0.05), ("better", 0.2)))
    made = gate.ask(first)
    assert (made["version"], gate.champion()) == (1, 1)
    assert (list(made["stages"]), len(gate.drawn)) == (["held_out", "sealed"], 4)
    refused = gate.ask(worse, page=True)
    assert (list(refused["stages"]), len(gate.drawn)) == (["held_out"], 3), "the sealed prompts are not drawn"
    assert (refused["promoted"], refused["version"], gate.champion()) == (False, None, 1)
    with pytest.raises(NotPromotedError, match=r"^Not promoted: ") as told:
        require_promotion(refused)
    assert told.value.exit_code == int(Code.NOT_PROMOTED)
    assert [c["against"] for c in refused["stages"]["held_out"]["conditions"] if not c["holds"]] == ["champion"]
    promoted = gate.ask(better)
    assert promoted["version"] == 2
    require_promotion(promoted)
    assert gate.champion() == 2
    assert (refused["report"] / "evaluation.html").is_file()
    page = (refused["report"] / "evaluation.html").read_text()
    assert "does not hold" in page
    assert '<p class="verdict">not promoted</p>' in page


def test_the_same_candidate_again_adds_nothing_but_a_gate_that_is_missing_and_keeps_the_report(gate: Gate) -> None:
    first = gate.train("first", 0.1)
    made = gate.ask(first)
    before = gate.client.get_registered_model(NAME).tags
    shutil.copytree(made["report"], gate.folder / "promotion")
    (gate.folder / "judgement.json").write_text(json.dumps({k: made[k] for k in ("candidate", "stages")}))
    again = gate.ask(first)
    assert (again["already"], again["version"], again["stages"], gate.drawn) == (True, 1, made["stages"], [])
    assert (again["report"] / "evaluation.html").read_text() == (made["report"] / "evaluation.html").read_text()
    assert gate.client.get_registered_model(NAME).tags == before
    assert len(gate.client.search_model_versions(f"name = '{NAME}'")) == 1
    # A kill before the gate was noted.
    [tag] = [tag for tag in before if tag.startswith("gate.")]
    gate.client.delete_registered_model_tag(NAME, tag)
    gate.ask(first)
    after = gate.client.get_registered_model(NAME).tags
    assert [(tag, value.split()[1:]) for tag, value in after.items()] == [
        (tag, value.split()[1:]) for tag, value in before.items()
    ]
    gate.ask(first, margin=0.01)
    assert gate.client.get_registered_model(NAME).tags == after, "other settings of the present champion are no gate"


def test_a_decision_promotes_only_what_was_judged_against_the_champion_that_is_there(gate: Gate) -> None:
    first, second = gate.train("first", 0.1), gate.train("second", 0.2)
    of_first = gate._config(promotion={"candidate": first})
    with numbers_only():
        out, judgement = gate.judge(of_first)
    with pytest.raises(UserError, match="has changed since the judgement"):
        promote(gate._config(promotion={"candidate": second}), LATEST, out, judgement)
    gate.ask(second)
    with pytest.raises(UserError, match="has changed since the judgement"):
        promote(of_first, LATEST, out, judgement)
    assert gate.champion() == 1


def own_reward(**changes: Any) -> dict[str, Any]:
    """Parameters with ``brightness`` otherwise."""
    return {"rewards": {"brightness": {**REWARDS["brightness"], **changes}}}


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (own_reward(weight=-1.0), r"rewards\.brightness\.weight \(was 1\.0, is -1\.0\)"),
        (own_reward(clip=[0, 0.5]), r"rewards\.brightness\.clip \(was "),
    ],
)
def test_a_candidate_is_judged_by_the_rewards_of_its_training(gate: Gate, judge: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"differ from those that it was trained with \(.*{said}"):
        gate.ask(gate.train("first", 0.1), judged_by=judge)


def test_edited_code_of_a_reward_is_refused(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a_judge_of_the_gate.py"
    file.write_text("from tests.evaluation.painter import brightness\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = own_reward(function="a_judge_of_the_gate:brightness")
    trained = gate.train("first", 0.1, **own)
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(UserError, match=r"differ from those that it was trained with \(code of reward brightness\)"):
        gate.ask(trained, judged_by=own)


def test_a_rollback_returns_to_the_version_before_and_is_undone_only_where_that_is_intended(gate: Gate) -> None:
    first, better = gate.train("first", 0.1), gate.train("better", 0.2)
    gate.ask(first)
    with pytest.raises(UserError, match="did not replace a version"):
        gate.roll_back()
    gate.ask(better)
    assert gate.roll_back() == {"model": NAME, "alias": "champion", "from": 2, "to": 1}
    assert gate.champion() == 1
    refused = gate.ask(better)
    assert not refused["promoted"]
    assert not gate.drawn
    said = r"was rolled back from visual_grpo@champion \(version 2, \d{4}-.*rolled_back=true"
    assert re.search(said, refused["sentence"])
    assert gate.champion() == 1
    assert gate.ask(better, rolled_back=True)["promoted"]
    assert gate.champion() == 2


def test_a_version_whose_files_are_gone_is_neither_rolled_back_to_nor_promoted(gate: Gate) -> None:
    first, better = gate.train("first", 0.1), gate.train("better", 0.2)
    gate.ask(first)
    gate.ask(better)
    for version in ("1", "2"):
        shutil.rmtree(find_version(f"models:/{NAME}/{version}").adapters())
    with pytest.raises(UserError, match=rf"adapters of models:/{NAME}/1 .* are gone"):
        gate.roll_back()
    assert gate.champion() == 2
    assert Registry(NAME).register(Path(better)).version == 3
    assert Registry(NAME).register(Path(better)).version == 3


def test_another_reward_than_the_champions_is_promoted_only_where_that_is_intended(gate: Gate) -> None:
    """A flipped sign calls the darkest pictures the best."""
    gate.ask(gate.train("first", 0.1))
    flipped = own_reward(weight=-1.0)
    dark = gate.train("dark", -0.2, **flipped)
    refused = gate.ask(dark, judged_by=flipped)
    assert (refused["promoted"], gate.champion(), gate.drawn) == (False, 1, [])
    assert "a different reward than the champion (rewards.brightness.weight (was 1.0, is -1.0))" in refused["sentence"]
    assert refused["sentence"].endswith("--pipeline=promote --params=promotion.new_reward=true")
    assert Registry(NAME).gates_in_last_year(excluding=("", "")) == 1
    assert gate.ask(dark, judged_by=flipped, new_reward=True)["promoted"]


def test_another_file_that_an_option_names_is_another_reward(gate: Gate) -> None:
    words = gate.folder / "words.txt"
    words.write_text("bright")
    rewards = own_reward(function="tests.evaluation.painter:brightness_by_words", options={"words": str(words)})
    assert gate.ask(gate.train("first", 0.1, **rewards), judged_by=rewards)["promoted"]
    words.write_text("dark")
    with pytest.raises(
        UserError, match=r"differ from those that it was trained with \(file of reward brightness: words\)"
    ):
        gate.ask(str(gate.folder / "first"), judged_by=rewards)
    better = gate.train("better", 0.2, **rewards)
    refused = gate.ask(better, judged_by=rewards)
    assert (refused["promoted"], gate.champion(), gate.drawn) == (False, 1, [])
    assert "a different reward than the champion (file of reward brightness: words)" in refused["sentence"]


def test_more_gates_than_the_years_error_was_divided_by_are_refused(gate: Gate) -> None:
    for number in range(2):
        gate.ask(gate.train(f"worse {number}", 0.0), gates_per_year=2)
    with pytest.raises(UserError, match=r"promotion\.gates_per_year is 2, and 2 adapters asked .* within the last 365"):
        gate.ask(gate.train("third", 0.1), gates_per_year=2)
    assert gate.drawn == []
    assert gate.ask(str(gate.folder / "worse 0"), gates_per_year=2)["promoted"] is False, "asked before: it counts once"
    for other in ({"margin": 0.001}, {"judged_by": {"evaluation": {"images_per_prompt": 3}}}):
        with pytest.raises(UserError, match="2 adapters asked"):  # With other settings it is another gate.
            gate.ask(str(gate.folder / "worse 0"), gates_per_year=2, **other)


def test_a_clock_that_is_behind_the_latest_gate_is_told(gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    gate.ask(gate.train("worse", 0.0), gates_per_year=2)
    assert "the clock is behind" not in capsys.readouterr().out
    [tag] = gate.client.get_registered_model(NAME).tags
    gate.client.set_registered_model_tag(NAME, tag, "2999-01-01T00:00:00+00:00")
    gate.ask(gate.train("second", 0.0), gates_per_year=2)
    assert "the clock is behind 2999-01-01 00:00 UTC" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="2 adapters asked"):
        gate.ask(gate.train("third", 0.1), gates_per_year=2)


def test_a_link_among_the_adapters_is_refused_before_anything_is_drawn(gate: Gate, tmp_path: Path) -> None:
    first = gate.train("first", 0.1)
    (Path(first) / "notes").symlink_to(tmp_path)
    with pytest.raises(UserError, match="notes is a link"):
        gate.ask(first)
    assert gate.drawn == []


def test_a_candidate_without_its_history_is_refused_before_anything_is_drawn(gate: Gate) -> None:
    first = gate.train("first", 0.1)
    (Path(first) / "training.csv").unlink()
    with pytest.raises(UserError, match=r"has no training\.csv"):
        gate.ask(first)
    assert gate.drawn == []


def test_a_champion_of_something_else_is_refused(gate: Gate) -> None:
    gate.ask(gate.train("first", 0.1))
    other = Path(gate.train("other", 0.3))
    for changes, facts, now in (({}, {"model_content": "x"}, "'x', 't2i'"), ({"data": {"task": "i2i"}}, {}, "'i2i'")):
        gate.note(other, gate._config(**changes), **facts)
        said = rf"has a different base model or task than the candidate: .*, not \(.*{now}\)\. .*promotion\.model=NAME"
        with pytest.raises(UserError, match=said):
            gate.ask(str(other))
    assert gate.champion() == 1


@pytest.mark.parametrize("facts", [{"data": "before they grew"}, {"start": "adapters of other data"}])
def test_prompts_that_an_adapter_has_seen_do_not_judge_it(gate: Gate, facts: dict[str, str]) -> None:
    seen = gate.records.split("held_out")[:4].rows()
    grown = Path(gate.train("grown", 0.1))
    gate.note(grown, gate._config(), **facts)
    write_seen(seen, grown)
    decision = gate.ask(str(grown))["stages"]["held_out"]
    assert decision["prompts"] == 8


def test_subgroups_and_limits_are_those_of_the_parameters(gate: Gate) -> None:
    refused = gate.ask(gate.train("first", 0.1), margin=0.5, subgroups={"kind": 0.0}, error=0.1, gates_per_year=10)
    conditions = {c["name"]: c for c in refused["stages"]["held_out"]["conditions"]}
    assert conditions["total"]["limit"] == 0.5
    assert conditions["subgroup/kind=a"]["holds"]
    assert refused["stages"]["held_out"]["alpha"] == pytest.approx(0.01)
    assert not refused["promoted"]
    with pytest.raises(UserError, match="none of the judged records has 'colour' in its metadata"):
        gate.ask(gate.train("second", 0.1), subgroups={"colour": 0.0})
    with pytest.raises(UserError, match="is none, the base model: name an adapter"):
        gate.ask("none")
