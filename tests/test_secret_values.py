from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf
from omegaconf.resolvers import oc
from pydantic import BaseModel

from visual_grpo import secret_values
from visual_grpo.errors import UserError
from visual_grpo.secret_values import HIDDEN, HidingFilter, hidden, remember, remember_named, revealed


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_values, "_known", set())


NAMES = ["api_key", "apikey", "HF_TOKEN", "password", "db_passwd", "my-secret", "auth.bearer", "auth"]
NAMES += ["X-Api-Key", "passphrase", "Cookie", "session_id"]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_secret_by_its_name(name: str) -> None:
    assert hidden({"options": {name: "abc", "model": "small"}}) == {"options": {name: HIDDEN, "model": "small"}}


@pytest.mark.parametrize("item", [{"max_tokens": "5"}, {"token": 5}, {"keys": "a"}, {"author": "me"}, {"token": ""}])
def test_what_only_looks_like_a_secret_is_shown(item) -> None:
    assert hidden(item) == item


def test_a_named_secret_is_found_in_any_text() -> None:
    judge = {"options": {"server": {"password": "swordfish"}}}
    remember_named({"rewards": {"judge": judge}, "data": {"token": "shown"}})
    assert hidden(["run --params=x=swordfish", ("swordfish",), 3]) == [f"run --params=x={HIDDEN}", (HIDDEN,), 3]
    assert hidden("shown") == "shown"


def test_a_longer_secret_is_hidden_whole() -> None:
    remember("abcdef")
    remember("abcdefghi")
    assert hidden("abcdefghi abcdef") == f"{HIDDEN} {HIDDEN}"


def test_a_short_value_is_not_searched_for_in_words() -> None:
    remember("cat")
    assert hidden("a cat") == "a cat"


def test_log_records_are_covered() -> None:
    remember("swordfish")
    record = logging.LogRecord("x", logging.INFO, "", 0, "sent %s to %d", ("swordfish", 3), None)
    assert HidingFilter().filter(record)
    assert record.getMessage() == f"sent {HIDDEN} to 3"


def test_stored_parameters_get_their_secrets_back() -> None:
    options = {"api_key": "swordfish", "url": "http://me:swordfish@there", "all": ["swordfish"], "size": 3}
    remember("swordfish")
    stored = hidden({"judge": {"options": options}})
    assert "swordfish" not in str(stored)
    assert revealed(stored, {"judge": {"options": options}}) == {"judge": {"options": options}}


@pytest.mark.parametrize("present", [{}, {"judge": {}}, {"judge": {"options": {"url": "http://other"}}}, None])
def test_a_secret_that_is_not_there_any_more_is_asked_for(present) -> None:
    stored = {"judge": {"options": {"url": f"http://{HIDDEN}@there"}}}
    with pytest.raises(UserError, match=r"rewards\.judge\.options\.url is a secret, .*Set it in conf/local"):
        revealed(stored, present, "rewards")


def test_the_password_of_an_address_is_hidden_wherever_it_stands() -> None:
    remember_named(
        {"rewards": {"judge": {"options": {"url": "https://me:swordfish@there/x", "plain": "http://a:80/b@c"}}}}
    )
    assert hidden("https://me:swordfish@there/x said no") == f"https://me:{HIDDEN}@there/x said no"
    assert hidden("http://a:80/b@c") == "http://a:80/b@c"


@pytest.mark.parametrize("name", ["token", "access_token", "apikey", "api_key", "sig", "password"])
def test_the_token_in_an_addresss_query_is_hidden_wherever_it_stands(name: str) -> None:
    remember_named({"rewards": {"judge": {"options": {"url": f"https://there/x?size=1024&{name}=swordfish-7&n=2"}}}})
    assert (
        hidden(f"https://there/x?size=1024&{name}=swordfish-7&n=2") == f"https://there/x?size=1024&{name}={HIDDEN}&n=2"
    )


def test_the_name_of_a_run_is_no_secret_but_a_trackers_option_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN", "circles")
    monkeypatch.setenv("UNSEEN", "pa55word")
    OmegaConf.register_new_resolver("oc.env", secret_values.from_environment, replace=True)
    try:
        tree = OmegaConf.create({"tracking": {"run": {"name": "${oc.env:SEEN}"}, "wandb": {"key": "${oc.env:UNSEEN}"}}})
        assert OmegaConf.to_container(tree, resolve=True) == {
            "tracking": {"run": {"name": "circles"}, "wandb": {"key": "pa55word"}}
        }
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert hidden("circles with pa55word") == "circles with (hidden)"


def test_headers_are_secret_by_whatever_name_a_service_calls_them() -> None:
    headers = {"X-Whatever": "swordfish", "Content-Type": "application/json"}
    options = {"url": "http://host", "headers": headers}
    assert hidden(options)["headers"] == {"X-Whatever": HIDDEN, "Content-Type": "application/json"}
    remember_named({"rewards": {"judge": {"options": options}}})
    assert hidden("sent swordfish as application/json") == f"sent {HIDDEN} as application/json"


def test_no_parameter_of_the_project_is_named_like_a_secret() -> None:
    """It would be stored as hidden, and nobody could repeat the run."""
    from visual_grpo.config.schema import Parameters

    def sections(model: type[BaseModel], path: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield f"{path}{name}"
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner, f"{path}{name}.")

    names = list(sections(Parameters))
    assert "policy.flow.sampler" in names
    assert [
        name for name in names if hidden({name.rpartition(".")[2]: "value"}) != {name.rpartition(".")[2]: "value"}
    ] == []
