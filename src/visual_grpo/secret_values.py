"""Keys and tokens in the options of rewards and trackers: used, but never written down.

A value is secret if its option is named so (``api_key``, ``hf_token``, ``password``) or if the configuration takes it
from the environment (``${oc.env:NAME}``). Wherever parameters, commands, errors or changes of the code are stored or
shown, `hidden` has gone over them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from visual_grpo.errors import UserError

HIDDEN = "(hidden)"
SECTIONS = ("rewards", "tracking")
"""Sections of the parameters whose values may be secret."""
_RUN_OF_MLFLOW = "tracking.run."
"""In mlflow.yml, not in the parameters: the id and the name of a run, which everybody may see."""
_NAMES = re.compile(
    r"(^|[_.-])(secret|token|passw(or)?d|passphrase|(api|access|private|auth)[_-]?key|credentials?|auth|authorization"
    r"|bearer|cookie|session[_-]?id)($|[_.-])",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
"""The password in https://user:password@host."""
_IN_QUERY = re.compile(
    r"[?&;](?:access_?|auth_?|api_?)?(?:token|key|sig|signature|secret|password|credential)=([^&;#\s]+)", re.IGNORECASE
)
"""The token in https://host/path?token=..."""
_HEADER = "authorization"
"""A name by which any header's value is hidden."""
_SHORTEST = 5
"""Characters of a value that is searched for in texts: a shorter one would be found in words."""
_known: set[str] = set()


def from_environment(*arguments: Any, _node_: Any) -> Any:
    """OmegaConf's resolver ``oc.env``, which remembers what it read for an option of a reward or tracker."""
    from omegaconf.resolvers import oc

    value, key = oc.env(*arguments), str(_node_._get_full_key(None))
    if key.startswith(tuple(f"{section}." for section in SECTIONS)) and not key.startswith(_RUN_OF_MLFLOW):
        remember(value)
    return value


def remember(value: Any) -> None:
    """Lets `hidden` find the value in texts too."""
    if isinstance(value, str) and len(value) >= _SHORTEST:
        _known.add(value)


def remember_named(parameters: Mapping[str, Any]) -> None:
    """Remembers what is named as a secret in the tree of parameters."""
    for section in SECTIONS:
        _remember_named(parameters.get(section))


def hidden(value: Any) -> Any:
    """The text or JSON tree without any secret, `HIDDEN` in its place."""
    if isinstance(value, Mapping):
        return {key: _hidden_entry(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hidden(item) for item in value)
    return _without_known(value) if isinstance(value, str) else value


def revealed(stored: Any, present: Any, name: str = "") -> Any:
    """The tree ``stored``, which was hidden, with the secrets of the tree ``present`` again.

    Raises UserError where ``present`` has none at that place.
    """
    if isinstance(stored, Mapping):
        tree = present if isinstance(present, Mapping) else {}
        return {key: revealed(item, tree.get(key), f"{name}.{key}".lstrip(".")) for key, item in stored.items()}
    if isinstance(stored, list):
        there = present if isinstance(present, list) and len(present) == len(stored) else [None] * len(stored)
        return [revealed(item, own, name) for item, own in zip(stored, there, strict=True)]
    if isinstance(stored, str) and HIDDEN in stored:
        key = name.rpartition(".")[2]
        if hidden({key: present}) != {key: stored}:
            raise UserError(
                f"{name} is a secret, which was not stored with the training. Set it in conf/local/parameters.yml, for"
                " example as ${oc.env:NAME}."
            )
        return present
    return stored


class HidingFilter(logging.Filter):
    """Keeps secrets out of what is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = hidden(record.getMessage()), ()
        return True


def cover_logs() -> None:
    """Adds the filter to the root logger's handlers; Kedro's logging.yml may name none of ours."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(own, HidingFilter) for own in handler.filters):
            handler.addFilter(HidingFilter())


def _remember_named(tree: object) -> None:
    if not isinstance(tree, Mapping):
        return  # No section: the validation says so.
    for key, value in tree.items():
        if _are_headers(key, value):
            for name, item in value.items():
                if not _is_harmless(name):
                    remember(item)
        elif isinstance(value, Mapping):
            _remember_named(value)
        elif _is_secret(key, value):
            remember(value)
        elif isinstance(value, str):
            for secret in (*_IN_ADDRESS.findall(value), *_IN_QUERY.findall(value)):
                remember(secret)


def _hidden_entry(key: Any, value: Any) -> Any:
    if _are_headers(key, value):
        return {name: item if _is_harmless(name) else hidden({_HEADER: item})[_HEADER] for name, item in value.items()}
    return HIDDEN if _is_secret(key, value) else hidden(value)


def _are_headers(key: Any, value: Any) -> bool:
    """Of HTTP: services call the one with the key by any name."""
    return isinstance(value, Mapping) and str(key).lower() in ("headers", "extra_headers")


def _is_harmless(header: Any) -> bool:
    return str(header).lower() in ("accept", "content-type", "user-agent")


def _is_secret(key: Any, value: Any) -> bool:
    """Numbers are none: ``max_token`` may be 5."""
    return isinstance(value, str) and bool(value) and bool(_NAMES.search(str(key)))


def _without_known(text: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):  # A longer one may contain a shorter one.
        text = text.replace(secret, HIDDEN)
    return text
