"""Secrets of rewards come from the environment."""

from __future__ import annotations

from typing import Any

import pytest

from visual_grpo.common.errors import UserError
from visual_grpo.config import RewardConfig
from visual_grpo.config.training import with_variables


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: "abc"}, name) for name in ("api_key", "apikey", "HF_TOKEN", "db_passwd", "my-secret", "auth.bearer")),
        ({"url": "https://me:swordfish@there"}, "url"),
        ({"url": "https://there/x?n=2&token=swordfish"}, "url"),
        ({"headers": {"X-Whatever": "swordfish"}}, "headers.X-Whatever"),
        ({"nested": {"password": "swordfish"}}, "nested.password"),
    ],
)
def test_what_looks_like_a_secret_is_refused_and_not_shown(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} looks like a secret") as caught:
        RewardConfig(options=options)
    assert f"{named}: $NAME" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "$KEY", "headers": {"X-Key": "$KEY", "Authorization": "Bearer $KEY", "Accept": "text/plain"}},
        {"max_token": 5, "tokens": "a", "keys": "b", "author": "c", "api_key": None, "url": "http://a:80/b@c?size=3"},
    ],
)
def test_variables_and_other_names_are_not(options: dict[str, Any]) -> None:
    assert RewardConfig(options=options).options == options


def test_a_variable_is_looked_up_when_the_reward_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "swordfish")
    assert with_variables({"key": "$KEY", "headers": {"A": "Bearer $KEY"}, "rubric": "costs $KEY"}, "judge") == {
        "key": "swordfish",
        "headers": {"A": "Bearer swordfish"},
        "rubric": "costs $KEY",
    }
    with pytest.raises(UserError, match=r"reward 'judge': an option names the variable \$NO_KEY.*export NO_KEY"):
        with_variables({"key": "$NO_KEY"}, "judge")
