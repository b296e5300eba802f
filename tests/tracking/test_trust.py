"""What the record of a stranger may state, and what it may only where the project or the user says so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import mlflow
import pytest
from pydantic import BaseModel, ValidationError

from tests.evaluation.defaults import parameters
from tests.tracking.conftest import Project
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.adapter_folder import adapter_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.schema import merged
from visual_grpo.config.stated import parameters_digest, reaching
from visual_grpo.hooks.cli import parsed
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.tracking.registry import Registry
from visual_grpo.tracking.sync import DIGEST, sync
from visual_grpo.tracking.trust import (
    ASKING_A_SERVER,
    PARAMETERS,
    require_adapters,
    require_checkpoint,
    require_version,
)

TEXTS = ("evil:code", "$HF_TOKEN", "https://evil.example", "/etc/passwd", "OWNER/NAME", "a word")
STATED = {
    *("generate.prompt", "vote.voter", "plan.gpu", "promotion.model"),
    *(f"data.{name}" for name in ("split", "held_out_split", "config")),
    *(f"data.columns.{name}" for name in ("prompt", "source", "target", "ignored")),
    *("policy.train", "policy.lora.target_modules", "modules.x.lora.target_modules"),
}
"""Parameters that take any text, which nothing opens, loads or sends anywhere: look at the code before you add one."""
DEFAULT = parameters().model_dump(mode="json")
Fragment = Callable[[Any], dict[str, Any]]


def places(
    model: type[BaseModel], name: str = "", wrap: Fragment = lambda value: value
) -> Iterator[tuple[str, Fragment, tuple[str, ...]]]:
    """Every parameter in the schema, with a function that puts a value there, and the texts to try; ``x`` is the key of
    a section's entry."""
    for key, field in model.model_fields.items():

        def put(value: Any, key: str = key) -> Any:
            return wrap({key: value})

        yield f"{name}{key}", put, TEXTS[:1] if leaves(field.annotation) <= {int, float, bool, NoneType} else TEXTS
        for section, is_entry in sections(field.annotation):

            def inside(value: Any, put: Fragment = put, is_entry: bool = is_entry) -> Any:
                return put({"x": value} if is_entry else value)

            yield from places(section, f"{name}{key}.{'x.' * is_entry}", inside)


def sections(annotation: Any, is_entry: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_entry
    for part in get_args(annotation):
        yield from sections(part, is_entry or get_origin(annotation) is dict)


def leaves(annotation: Any) -> set[Any]:
    return set().union(*map(leaves, get_args(annotation))) if get_args(annotation) else {annotation}


def accepted(default: dict[str, Any], put: Fragment, text: str) -> Iterator[dict[str, Any]]:
    """The trees that have the text there, in any shape that the parameter takes."""
    for value in (text, [text], {"k": text}, {"k": {"d": ["a", text]}}):
        given = merged(default, put(value))
        try:
            tree = Parameters.model_validate(given).model_dump(mode="json")
        except (ValidationError, UserError):
            continue
        if json.dumps(text) in json.dumps(tree):
            yield tree


@pytest.fixture
def folder(project: Project, tmp_path: Path) -> Path:
    return adapters(tmp_path / "theirs", base_model(tmp_path / "base"))


def test_every_parameter_that_takes_a_text_is_refused_but_those_that_only_take_words(folder: Path) -> None:
    default = merged(DEFAULT, {"data": {"path": "hf://datasets/acme/shapes"}})  # Of which data.config is.
    present, own, stated, refused = Parameters.model_validate(default), reaching(default), set(), set()
    for name, put, texts in places(Parameters):
        for tree in [tree for text in texts for tree in accepted(default, put, text)]:
            reached = {".".join(key) for key, value in reaching(tree).items() if own.get(key) != value}
            if not reached:
                stated.add(name)
                continue
            assert all(key == name or key.startswith(f"{name}.") for key in reached)
            if name not in refused:
                refused.add(name)
                with pytest.raises(
                    UserError, match=rf"(?s)This command would take the following from .*: {name}\b.*trust=\w{{32}}"
                ):
                    require_adapters(folder, tree, present)
    assert stated == STATED
    assert {"rewards.x.function", "rewards.x.options", "model.path", "model.options", "starter.world"} <= refused


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"data": {"allow_outside": True}}, "text: data.allow_outside = True"),
        ({"tracking": {"wandb": "online"}}, "text: tracking.wandb = 'online'"),
        ({"model": {"family": "subprocess:FAMILY"}}, "code: model.family = 'subprocess:FAMILY'"),
        ({"starter": {"world": "theirs.world:WORLD"}}, "'theirs.world:WORLD' (the module theirs does not exist here)"),
        (
            {"rewards": {"votes": {"options": {"features": "a:b"}}}},
            "features = 'a:b' (the module a does not exist here)",
        ),
        ({"rewards": {"a": {"options": {"x": [{"y": "z"}]}}}}, "text: rewards.a.options.x = [{'y': 'z'}]"),
        ({"rewards": {"http": {"options": {"url": "http://a.b"}}}}, "address: rewards.http.options.url = 'http://a.b'"),
        (
            {"rewards": {"http": {"options": {"headers": {"X": "Bearer $KEY"}}}}},
            "variable: rewards.http.options.headers.X = 'Bearer $KEY'",
        ),
        ({"rewards": {"a\nb": {"options": {"x": "y\nz"}}}}, r"text: rewards.a b.options.x = 'y\nz'"),
        ({"data": {"path": "p" * 1000}}, f"data.path = '{'p' * 1000}'"),
    ],
)
def test_what_is_refused_is_listed_with_its_value_and_kind(folder: Path, changes: dict[str, Any], listed: str) -> None:
    tree = merged(DEFAULT, changes)
    with pytest.raises(UserError) as refused:
        require_adapters(folder, tree, parameters())
    assert any(line.endswith(listed) for line in str(refused.value).splitlines())


def test_words_numbers_and_what_the_user_has_as_well_need_no_leave(folder: Path) -> None:
    own = {"rewards": {"mine": {"function": "my_rewards:score", "options": {"key": "$KEY", "n": 1}}}}
    stated: dict[str, Any] = {
        "model": {"family": "sd3", "dtype": "bfloat16", "device": "cuda:1"},
        "data": {"split": "train", "height": 64, "columns": {"source": ["a", "b"]}},
        "policy": {"train": ["dit"], "lora": {"rank": 3, "target_modules": ["to_q"]}},
        "rewards": {"mine": {"weight": 2.0, "options": {"n": 3}}, "ssim": {"only_where": {"mine": 0.5}}},
    }
    tree = merged(parameters(**own).model_dump(mode="json"), stated)
    require_adapters(folder, tree, parameters(**own))
    with pytest.raises(UserError, match=r"code: rewards\.mine\.function(?s:.*)variable: rewards\.mine\.options\.key"):
        require_adapters(folder, tree, parameters())


EVIL = merged(DEFAULT, {"rewards": {"z": {"function": "a:b"}}})


def test_trust_is_for_one_folder_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = adapter_digest(folder)
    for given in (digest, digest[:32], ["0" * 32, digest[:40]]):
        require_adapters(folder, EVIL, parameters(trust=given))
        assert "code: rewards.z.function = 'a:b'" in capsys.readouterr().out, "told all the same"
    (folder / "training.json").write_text((folder / "training.json").read_text() + " ")
    with pytest.raises(
        UserError, match=rf"^trust is {digest}, but the digest of .*theirs is {adapter_digest(folder)}\."
    ):
        require_adapters(folder, EVIL, parameters(trust=digest))


@pytest.mark.parametrize("given", ["true", "latest", "abc", "ABCDEFABCDEF", '["0123456789ab", 3]'])
def test_trust_is_never_a_bare_yes(given: str) -> None:
    with pytest.raises(ValidationError, match="expected 32 to 64 hex digits, the digest of one folder"):
        parameters(**parsed(f"trust={given}"))
    assert parameters(**parsed("trust=" + "1" * 32)).trust == ["1" * 32]


def test_the_adapters_of_a_run_and_of_a_version_are_known_as_they_were_left(project: Project, folder: Path) -> None:
    tracker = project.start()
    tracker.own(DIGEST, adapter_digest(folder))
    tracker.end("FINISHED")
    require_adapters(folder, EVIL, parameters())
    project.client.delete_run(str(tracker.run_id))
    require_adapters(folder, EVIL, parameters())
    shutil.rmtree(folder / "last")
    require_adapters(folder, EVIL, parameters())
    other = Path(shutil.copytree(folder, folder.with_name("other")))
    (other / "ar/adapter_model.safetensors").write_text("others")
    facts = json.loads((other / "training.json").read_text())
    facts["sums"] = {}
    (other / "training.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="not known as this project's own"):
        require_adapters(other, EVIL, parameters())
    version = Registry("theirs").register(other)
    require_adapters(version.adapters(), EVIL, parameters())
    for file in ("changes.diff", "ar/adapter_config.json"):
        (other / file).write_text("{}")
        with pytest.raises(UserError, match="not known as this project's own"):
            require_adapters(other, EVIL, parameters())
        (other / file).unlink()


def test_what_is_found_on_disk_is_not_made_the_projects_own(project: Project, folder: Path) -> None:
    """A stranger's folder in the place of the latest adapters goes to MLflow like any result that it lacks."""
    facts = json.loads((folder / "training.json").read_text()) | {"mlflow_run_id": "f" * 32}
    facts |= {DIGEST: "planted", "resumed.x": "1"}
    (folder / "training.json").write_text(json.dumps(facts))
    shutil.copytree(folder, project.output / "06_models/adapters")
    added, _ = sync([project.output])
    assert "added to MLflow: training of" in added[0]
    with pytest.raises(UserError, match="not known as this project's own"):
        require_adapters(project.output / "06_models/adapters", EVIL, parameters())


def test_a_lora_of_the_hub_is_the_users_own_at_any_commit(folder: Path) -> None:
    at = "hf://them/lora@" + "c" * 40 + "/style.safetensors"
    stated = merged(parameters().model_dump(mode="json"), {"train": {"start": at}})
    for own in ("them/lora", "them/lora/style.safetensors"):
        require_adapters(folder, stated, parameters(train={"start": own}))
    with pytest.raises(UserError, match=r"train\.start"):
        require_adapters(folder, stated, parameters(train={"start": "them/other"}))


def test_what_the_user_typed_is_the_users_own(folder: Path) -> None:
    """Before validation: a home folder is not expanded, and one digest is not a list."""
    given = {"data": {"path": "~/photos"}, "trust": "0" * 32}
    present = parameters(**given)
    with pytest.raises(UserError, match=r"data\.path"):
        require_adapters(folder, merged(present.model_dump(mode="json"), given), present)
    require_adapters(folder, merged(present.model_dump(mode="json"), given), present, given=given)


def test_the_checkpoints_of_a_run_are_known_by_what_they_reach(project: Project, tmp_path: Path) -> None:
    tracker = project.start()
    tracker.own(PARAMETERS, parameters_digest(EVIL))
    tracker.end("FINISHED")
    later = merged(EVIL, {"resume": "auto", "grpo": {"steps": 99}})
    require_checkpoint(tmp_path, "0" * 64, later, later, parameters(), {})
    edited = merged(EVIL, {"rewards": {"z": {"options": {"a": "b"}}}})
    with pytest.raises(UserError, match=rf"text: rewards\.z\.options\.a = 'b'(?s:.*)trust={'0' * 32}"):
        require_checkpoint(tmp_path, "0" * 64, edited, edited, parameters(), {})


def test_where_mlflow_is_away_the_refusal_says_so(folder: Path, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'no such folder/mlflow.db'}")
    with pytest.raises(
        UserError, match=r"could not tell whether it belongs to this project: MLflow .* does not answer"
    ):
        require_adapters(folder, EVIL, parameters())
    require_adapters(folder, EVIL, parameters(trust=adapter_digest(folder)))


@pytest.mark.parametrize(("changes", "said"), [({"later": 1}, "later = 1"), ({"grpo": 3}, "grpo = 3")])
def test_a_record_of_another_version_is_told(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(
        UserError, match=rf"provenance in .*theirs is of a different version of this project(?s:.*){said}"
    ):
        require_version(folder, parameters().public() | changes)


def test_a_key_with_a_dot_is_no_other_parameter(folder: Path) -> None:
    """In a record, one that is as the user has it must not stand for one that is not."""
    mine = {"negative_points": {"options": {"segmenter": {"function": "mine:segment"}}}}
    theirs = {
        "negative_points": {"options": {"segmenter": {"function": "evil:segment"}}},
        "negative_points.options.segmenter": {"function": "mine:segment", "weight": 0.0},
    }
    present = parameters(rewards=mine)
    with pytest.raises(UserError, match="evil:segment"):
        require_adapters(folder, present.public() | {"rewards": theirs}, present)
    honest, edited = ({"rewards": rewards} for rewards in (mine, theirs))
    assert parameters_digest(honest) != parameters_digest(edited)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"vlm_judge": {}}, "address: rewards.vlm_judge, which asks a server"),
        ({"http": {"options": {"worker": "workers/tesseract", "environment": {"N": 1}}}}, "environment.N = 1"),
    ],
)
def test_what_a_built_in_reward_reaches_without_a_text_is_asked_too(folder: Path, rewards: Any, said: str) -> None:
    present = parameters()
    with pytest.raises(UserError, match=re.escape(said)):
        require_adapters(folder, merged(present.public(), {"rewards": rewards}), present)


def test_rewards_that_ask_a_server_are_those_of_the_catalogue() -> None:
    remote = {name for name, path in BUILT_IN.items() if path.startswith("visual_grpo.rewards.remote.")}
    assert set(ASKING_A_SERVER) == remote


def test_a_folder_with_a_link_is_not_trusted(folder: Path) -> None:
    tree = merged(parameters().public(), {"rewards": {"mine": {"function": "evil:score"}}})
    trusting = parameters(trust=adapter_digest(folder))
    require_adapters(folder, tree, trusting)
    (folder / "more").symlink_to(folder / "training.json")
    with pytest.raises(UserError, match="link"):
        require_adapters(folder, tree, trusting)
