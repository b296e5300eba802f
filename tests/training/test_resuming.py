"""Which checkpoint a run goes on from, with which parameters; with a model that takes no time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import CountingScorer
from tests.training.few_steps import STEPS, parameters
from tests.training.test_run import execute, ignore, interrupt_at, rows
from tests.training.test_run_toys import TokenModel, saved, token_run
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import StepMetrics
from visual_grpo.config import Parameters
from visual_grpo.config.presets import TARGET_JUDGE
from visual_grpo.config.validation import validate, with_target_judge
from visual_grpo.grpo.checkpoint import METADATA, SUMS, _line, save_checkpoint
from visual_grpo.provenance import INPUTS, MEANING
from visual_grpo.training import resuming
from visual_grpo.training.resuming import ResumedRun, mark_finished, why_another
from visual_grpo.training.run import Callbacks, TrainingRun

CONSTANT = {"schedule": "constant", "warmup_steps": 3}


def run_of(folder: Path, **changes: Any) -> TrainingRun:
    return token_run(folder, TokenModel(), CountingScorer(), **changes)


def finished(folder: Path, **changes: Any) -> TrainingRun:
    run = run_of(folder, **changes)
    shutil.rmtree(folder / "out", ignore_errors=True)
    execute(run, folder / "out")
    return run


def stopped(folder: Path, after: int) -> None:
    run_of(folder).run(Callbacks(on_step=interrupt_at(after), note=print))


def table(folder: Path, which: str = "last") -> torch.Tensor:
    return saved(folder / "out" / which)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def damage(checkpoint: Path) -> None:
    file = checkpoint / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_finished_run_is_extended_to_what_a_longer_one_is(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"evaluation": {"every": 3, "prompts": 2, "images_per_prompt": 1}}
    longer = finished(tmp_path / "longer", grpo={**CONSTANT, "steps": STEPS + 3}, **changes)
    finished(tmp_path / "extended", grpo=CONSTANT, **changes)
    extended = finished(tmp_path / "extended", grpo={**CONSTANT, "steps": STEPS + 3}, resume="auto", **changes)
    assert extended.trainer.step == STEPS + 3
    assert rows(extended) == rows(longer)
    assert torch.equal(table(tmp_path / "extended"), table(tmp_path / "longer"))
    assert torch.equal(table(tmp_path / "extended", "best"), table(tmp_path / "longer", "best"))


@pytest.mark.parametrize(
    ("grpo", "resumed", "said"),
    [
        ({"schedule": "cosine"}, {"steps": 9}, r"grpo\.steps \(was 6, is 9\).*of the schedule 'cosine'"),
        (CONSTANT, {"steps": 5}, r"grpo\.steps is 5, but the checkpoint .* has done 6 steps: give at least 6"),
    ],
)
def test_other_steps_are_refused(tmp_path: Path, grpo: dict[str, Any], resumed: dict[str, Any], said: str) -> None:
    finished(tmp_path, grpo=grpo)
    with pytest.raises(UserError, match=said):
        execute(run_of(tmp_path, grpo={**grpo, **resumed}, resume="auto"), tmp_path / "never")


FREE: dict[str, Any] = {
    "tracking": {"checkpoint_every": 1, "images_every": 0, "keep_checkpoints": 5},
    "evaluation": {"every": 4, "prompts": 2, "images_per_prompt": 1, "batch_size": 1},
    "model": {"device": "cpu", "threads": 1},
    "grpo": {"micro_batch_size": 2},
    "policy": {"train": "ar", "signal_check": {"rollouts": 0}, "decode_batch": 1, "gradient_checkpointing": True},
    "generate": {"samples": 3},
}
DECISIVE: list[tuple[str, Any]] = [
    ("seed", 4),
    ("grpo", {"group_size": 4}),
    ("grpo", {"learning_rate": 0.5}),
    ("evaluation", {"every": 2, "prompts": 3, "images_per_prompt": 1}),
    ("sampling", {"rollout": {"temperature": 0.5}, "eval": {"temperature": 1.0}}),
    ("model", {"dtype": "bfloat16"}),
]


def test_cadences_device_and_memory_may_change_and_what_decides_the_result_may_not(tmp_path: Path) -> None:
    finished(tmp_path)
    for name, changes in FREE.items():
        resuming.resumed_run(parameters(tmp_path, resume="auto", **{name: changes}))
    for name, changes in DECISIVE:
        said = rf"made with different {name}.*\(was .*, is .*resuming would mix two runs"
        with pytest.raises(UserError, match=said):
            resuming.resumed_run(parameters(tmp_path, resume="auto", **{name: changes}))


def test_what_a_resume_changes_in_the_result_is_noted(tmp_path: Path) -> None:
    run = ResumedRun(tmp_path / "step-000006", {"provenance": {"parameters": parameters(tmp_path).public()}})
    changed = {name: FREE[name] for name in ("tracking", "evaluation", "model", "grpo", "generate")}
    now = parameters(tmp_path, **changed).public()
    noted = [line.removesuffix(" after step 6") for line in resuming.adjusted(run, now)]
    assert noted == ["evaluation.batch_size: 32, 1", "evaluation.every: 2, 4", "grpo.micro_batch_size: None, 2"]


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    finished(tmp_path)
    config = parameters(tmp_path, resume="auto")
    record = {"parameters": config.public(), **COMPUTED}
    for name in (*(INPUTS.keys() - {"device"}), "code of reward mine"):
        note_provenance(tmp_path, **{name: "a"})
        resuming.resumed_run(config, {**record, name: "a", "numerics": "torch 2"})
        for now in ({name: "b"}, {}):
            with pytest.raises(UserError, match=f"was made with different {MEANING.get(name, name)}: resuming would"):
                resuming.resumed_run(config, {**record, **now})


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    stopped(tmp_path / "parts", 5)
    assert checkpoints(tmp_path / "parts") == ["step-000004", "step-000005"]
    damage(tmp_path / "parts" / "checkpoints" / "step-000005")
    second = run_of(tmp_path / "parts", resume="auto")
    assert second.checkpoints.completed_steps() == 4
    notes = execute(second, tmp_path / "parts" / "out")
    assert notes[0].startswith("Resuming after step 4 of 6 from ")
    assert "step-000005 is damaged (changed since it was written: state.safetensors) and not used" in notes[1]
    assert "damaged-step-000005" in checkpoints(tmp_path / "parts")
    assert torch.equal(table(tmp_path / "parts"), table(tmp_path / "whole"))
    assert rows(second) == rows(whole)


def test_where_none_is_intact_the_run_does_not_start_again_by_itself(tmp_path: Path) -> None:
    finished(tmp_path)
    for path in tmp_path.glob("checkpoints/step-*"):
        damage(path)
    with pytest.raises(UserError, match=r"No checkpoint in .* is intact"):
        resuming.resumed_run(parameters(tmp_path, resume="auto"))
    finished(tmp_path)  # From step 1, without `resume`.
    assert (tmp_path / "checkpoints.previous" / "step-000006").is_dir(), "nothing is deleted"


def test_a_run_can_go_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    finished(tmp_path / "back", tracking={"checkpoint_every": 2, "checkpoints": str(tmp_path / "back/checkpoints")})
    older = tmp_path / "back" / "checkpoints" / "step-000004"
    run = run_of(tmp_path / "back", resume=str(older))
    shutil.rmtree(tmp_path / "back" / "out")
    notes = execute(run, tmp_path / "back" / "out")
    assert notes[0] == f"Resuming after step 4 of 6 from {older}"
    assert notes[1] == f"{older.with_name('step-000006')} is newer and not used; it is now later-step-000006"
    assert checkpoints(tmp_path / "back") == ["later-step-000006", "step-000004", "step-000006"]
    assert torch.equal(table(tmp_path / "back"), table(tmp_path / "whole"))
    assert rows(run) == rows(whole)


@pytest.mark.parametrize("where", ["checkpoints.previous", "checkpoints.previous/step-000003", "elsewhere"])
def test_a_run_goes_on_from_another_folder_and_loses_none_of_its_own(tmp_path: Path, where: str) -> None:
    whole = finished(tmp_path / "whole")
    stopped(tmp_path, 3)
    if where == "elsewhere":
        shutil.copytree(tmp_path / "checkpoints", tmp_path / "elsewhere")
    stopped(tmp_path, 1)  # Moves the first one's to checkpoints.previous.
    run = run_of(tmp_path, resume=str(tmp_path / where))
    run.checkpoints.resume(print)
    assert checkpoints(tmp_path) == ["step-000003"], "at once, so that a kill loses nothing"
    assert steps_of(tmp_path) == {"": [3], ".previous": [2, 3], ".previous-2": [1]}
    run.run(Callbacks(on_step=ignore, note=print))
    assert rows(run) == rows(whole)


def steps_of(folder: Path) -> dict[str, list[int]]:
    """What follows ``checkpoints`` in a folder's name -> steps of the checkpoints in it."""
    return {
        path.name.removeprefix("checkpoints"): sorted(int(step.name[-6:]) for step in path.glob("step-*"))
        for path in folder.glob("checkpoints*")
    }


def killed_before_a_checkpoint(folder: Path) -> list[str]:
    def dies(metrics: StepMetrics, row: dict[str, float]) -> None:
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints/samples-000001.png").touch()
        raise ZeroDivisionError

    notes: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_of(folder).run(Callbacks(on_step=dies, note=notes.append))
    return [note for note in notes if not note.startswith("Warning")]


def test_a_training_that_left_no_checkpoint_takes_the_place_of_none(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    stopped(tmp_path, 5)
    previous = tmp_path / "checkpoints.previous"
    [said] = killed_before_a_checkpoint(tmp_path)
    assert said.endswith(f"to step-000005, are kept: it goes on with resume={previous}")
    assert killed_before_a_checkpoint(tmp_path) == []
    assert steps_of(tmp_path) == {"": [], ".previous": [4, 5]}
    notes: list[str] = []
    run_of(tmp_path, resume="auto").checkpoints.resume(notes.append)
    assert f"(an earlier training goes on with resume={previous})" in notes[0]
    mark_finished(previous)
    run_of(tmp_path, resume="auto").checkpoints.resume(notes.append)
    assert "earlier training" not in notes[1]
    (previous / resuming.FINISHED).unlink()
    run = run_of(tmp_path, resume=str(previous))
    execute(run, tmp_path / "out")
    assert rows(run) == rows(whole)
    assert not (tmp_path / "out/samples-000001.png").exists(), "of another training"


def test_only_the_checkpoints_of_a_finished_training_are_replaced(tmp_path: Path) -> None:
    def finished_at(steps: int) -> None:
        run = run_of(tmp_path, grpo={"steps": steps}, tracking={"keep_checkpoints": 1})
        run.run(Callbacks(on_step=ignore, note=print))
        mark_finished(tmp_path / "checkpoints")

    finished_at(2)
    finished_at(3)
    assert steps_of(tmp_path) == {"": [3], ".previous": [2]}
    stopped(tmp_path, 1)
    assert steps_of(tmp_path) == {"": [1], ".previous": [3]}
    stopped(tmp_path, 2)
    finished_at(4)
    assert steps_of(tmp_path) == {"": [4], ".previous": [1], ".previous-2": [2]}
    finished_at(5)
    finished_at(6)
    assert steps_of(tmp_path) == {"": [6], ".previous": [1], ".previous-2": [2], ".previous-3": [5]}


class Killed(BaseException):
    """After it, the process does nothing more."""


@pytest.mark.parametrize("survived", range(3))
def test_a_kill_while_room_is_made_loses_no_checkpoint(
    tmp_path: Path, survived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path)
    mark_finished(tmp_path / "checkpoints")
    stopped(tmp_path, 5)
    assert steps_of(tmp_path) == {"": [4, 5], ".previous": [4, 6]}
    left = iter(range(survived))

    def until_killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", until_killed(Path.rename))
        patch.setattr(shutil, "rmtree", until_killed(shutil.rmtree))
        with pytest.raises(Killed):
            run_of(tmp_path).checkpoints.begin(print)
    assert [4, 5] in steps_of(tmp_path).values()
    stopped(tmp_path, 1)
    stopped(tmp_path, 1)
    assert steps_of(tmp_path) == {"": [1], ".previous": [4, 5], ".previous-2": [1]}
    assert list(tmp_path.glob(".*")) == []


def test_a_damaged_checkpoint_that_is_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    finished(tmp_path)
    path = tmp_path / "checkpoints" / "step-000006"
    damage(path)
    with pytest.raises(UserError, match=rf"{path} is damaged: .*resume={path.parent} takes the newest intact one"):
        execute(run_of(tmp_path, resume=str(path)), tmp_path / "never")
    run = run_of(tmp_path, resume=str(path.parent))
    assert run.checkpoints.completed_steps() == 4


def test_a_link_beside_the_checkpoints_is_refused(tmp_path: Path) -> None:
    """Pictures beside them are copied to the adapters, and from there to MLflow."""
    finished(tmp_path)
    (tmp_path / "checkpoints/film-000001.png").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"film-000001\.png is a link"):
        run_of(tmp_path, resume="auto")


def test_what_names_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for named, said in (
        ("atuo", r"is not a folder\. Did you mean 'auto'\?"),
        (str(tmp_path), "contains no checkpoint"),
    ):
        with pytest.raises(UserError, match=said):
            execute(run_of(tmp_path, resume=named), tmp_path / "never")


def test_the_parameters_of_the_run_are_used_where_none_are_given(tmp_path: Path) -> None:
    finished(tmp_path, seed=11, grpo=CONSTANT)
    run = resuming.find_run("auto", tmp_path / "checkpoints")
    assert run is not None
    assert run.mlflow_run_id == "run"
    used = resuming.parameters_of_run(run, {"resume": "auto", "grpo": {"steps": 9}})
    assert (used["seed"], used["grpo"]["steps"], used["grpo"]["schedule"]) == (11, 9, "constant")
    configured = parameters(tmp_path, seed=12, grpo={**CONSTANT, "group_size": 5}).model_dump(mode="json")
    assert resuming.inherited_parameters(run, configured, used) == {"seed": 11, "grpo.group_size": 3}
    assert resuming.find_run("never", tmp_path / "checkpoints") is None
    assert resuming.find_run("auto", tmp_path / "nothing") is None


@pytest.mark.parametrize(("named", "differs"), [({}, False), ({TARGET_JUDGE: None}, True)])
def test_a_judge_that_the_records_added_is_no_difference(tmp_path: Path, named: dict[str, None], differs: bool) -> None:
    tree = with_target_judge(parameters(tmp_path)).public()
    save_checkpoint(tmp_path / "checkpoints", 1, {"a": torch.zeros(1)}, {"provenance": {"parameters": tree}})
    run = resuming.find_run("auto", tmp_path / "checkpoints")
    assert run is not None
    configured = parameters(tmp_path).model_dump(mode="json")
    configured["rewards"] |= named
    inherited = resuming.inherited_parameters(run, configured, resuming.parameters_of_run(run, {}))
    assert any(name.startswith(f"rewards.{TARGET_JUDGE}.") for name in inherited) == differs


def test_a_reward_that_the_run_had_removed_stays_removed(tmp_path: Path) -> None:
    rewards = {"rendering": None}
    finished(tmp_path, reward="shapes", rewards=rewards)
    run = resuming.find_run("auto", tmp_path / "checkpoints")
    assert run is not None
    resumed = validate(resuming.parameters_of_run(run, {}))
    assert list(resumed.rewards) == ["shapes", "outline", "brightness"]
    resuming.resumed_run(resumed.model_copy(update={"resume": "auto"}))


def test_a_training_in_parts_goes_on_with_one_process(tmp_path: Path) -> None:
    stopped(tmp_path, 2)
    run = resuming.find_run("auto", tmp_path / "checkpoints")
    assert run is not None
    parts = {**run.parameters, "distributed": {"processes": 2, "sharded": True}}
    in_parts = ResumedRun(checkpoint=run.checkpoint, metadata={**run.metadata, "provenance": {"parameters": parts}})
    alone = validate(resuming.parameters_of_run(in_parts, {"distributed": {"processes": 1}})).distributed
    assert (alone.processes, alone.sharded) == (1, False)
    assert validate(resuming.parameters_of_run(in_parts, {})).distributed.sharded
    with pytest.raises(UserError, match="sharded needs processes of at least 2"):
        validate(resuming.parameters_of_run(in_parts, {"distributed": {"processes": 1, "sharded": True}}))


COMPUTED: dict[str, str] = {"source.digest": "a", "numerics": "torch 1"}


def note_provenance(folder: Path, **changes: str) -> None:
    """As the train pipeline has it in its checkpoints."""
    for path in (folder / "checkpoints").glob("step-*"):
        facts = json.loads((path / METADATA).read_text())
        facts["provenance"] = {"parameters": facts["provenance"]["parameters"], **COMPUTED, **changes}
        (path / METADATA).write_text(json.dumps(facts))
        (path / SUMS).write_text("".join(_line(path / name) for name in (METADATA, "state.safetensors")))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a training leaves that was stopped after five of six steps."""
    stopped(tmp_path, 5)
    note_provenance(tmp_path)
    return tmp_path


def why(folder: Path, computed: dict[str, str] | None = None, **changes: Any) -> str | None:
    config: Parameters = parameters(folder, **changes)
    now = {"parameters": config.public(), **(COMPUTED if computed is None else computed)}
    return why_another(Path(config.tracking.checkpoints), now)


def test_the_same_training_goes_on_and_changes_nothing(killed: Path) -> None:
    before = sorted(killed.rglob("*"))
    assert why(killed) is None
    assert sorted(killed.rglob("*")) == before
    damage(killed / "checkpoints" / "step-000005")
    assert why(killed) is None, "the one before is intact"
    damage(killed / "checkpoints" / "step-000004")
    assert why(killed) == f"{killed / 'checkpoints'} has no intact checkpoint"
    assert why(killed / "other") == f"{killed / 'other/checkpoints'} has no checkpoint"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "seed (was 3, is 4)"),
        ({"grpo": {"steps": 7}}, "grpo.steps (was 6, is 7)"),
        ({"evaluation": {"every": 3}}, "evaluation.every (was 2, is 3)"),
        ({"grpo": {"micro_batch_size": 2}}, "grpo.micro_batch_size (was None, is 2)"),
        ({"computed": COMPUTED | {"source.digest": "b"}}, "source files of this project"),
        ({"computed": COMPUTED | {"numerics": "torch 2"}}, "versions of libraries, or kind of processor"),
    ],
)
def test_another_training_is_named_by_what_differs(killed: Path, changes: dict[str, Any], named: str) -> None:
    assert str(why(killed, **changes)).endswith(f"/checkpoints belong to a different training: {named}")


def test_other_data_or_code_in_between_make_another_training(killed: Path) -> None:
    note_provenance(killed, data="x", model_digest="y")
    assert why(killed, {**COMPUTED, "data": "x", "model_digest": "y"}) is None
    found = why(killed, {**COMPUTED, "data": "z", "model_digest": "y"})
    assert str(found).endswith("belong to a different training: data")
    note_provenance(killed, **{"resumed.source.digest": "b"})
    assert str(why(killed)).endswith("a different training: source files of this project")


def test_a_finished_training_is_done_again_and_one_whose_adapters_were_not_saved_is_not(tmp_path: Path) -> None:
    finished(tmp_path)
    note_provenance(tmp_path)
    assert why(tmp_path) is None, "killed between its last checkpoint and its adapters"
    mark_finished(tmp_path / "checkpoints")
    assert why(tmp_path) == f"the training of the checkpoints in {tmp_path / 'checkpoints'} is finished"
    (tmp_path / "checkpoints" / resuming.FINISHED).write_text("{")
    assert why(tmp_path) is None, "a damaged note says nothing; the result is the same"


def test_changes_that_the_provenance_does_not_name_are_not_taken_over() -> None:
    for named in ("none", "0" * 64, None):
        metadata = {"provenance": {"git.changes": named}, "changes": "diff --git"}
        assert resuming.ResumedRun(Path(), metadata).changes == b""
