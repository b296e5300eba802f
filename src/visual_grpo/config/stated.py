"""Finds the parameters in a provenance that reach something: code, an address, a file, a model or a variable.

A provenance comes with its folder, from whoever made it. Numbers, switches, words of a Literal, and text of a type
marked `Stated` are harmless. All other text reaches something, also in a new parameter and at any depth of
``options``. Keys are not checked: only the values below them are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from visual_grpo.config.base import REACHES, Stated
from visual_grpo.config.schema import Parameters

_Types = list[tuple[Any, tuple[Any, ...]]]
"""The types that a value may have, each with its marks."""
Keys = tuple[str, ...]
"""Keys from the top of the tree to a value. A dotted name would be ambiguous, since a key may contain a dot."""


def reaching(tree: Mapping[str, Any]) -> dict[Keys, Any]:
    """Returns each parameter that reaches something, by its keys; a list is one value."""
    return dict(_found([(Parameters, ())], tree, ()))


def parameters_digest(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 (64 hex digits) of `reaching`, without ``resume``: commands of one training differ in it."""
    values = sorted((path, json.dumps(value, sort_keys=True)) for path, value in reaching(tree).items())
    return hashlib.sha256(json.dumps([each for each in values if each[0] != ("resume",)]).encode()).hexdigest()


def _found(types: _Types, value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _found(_below(types, key), part, (*path, str(key)))
    elif isinstance(value, list | tuple):
        items = [each for annotation, _ in types for part in get_args(annotation) for each in _members(part)]
        if any(next(_found(items, item, path), None) for item in value):
            yield path, value
    elif "environment" in path or not _is_stated(types, value):  # A number there becomes a variable's value.
        yield path, value


def _is_stated(types: _Types, value: Any) -> bool:
    if any(REACHES in marks for _, marks in types):
        return value is None or value is False
    return not isinstance(value, str) or any(
        (_origin(annotation) is Literal and value in get_args(annotation))
        or any(isinstance(mark, Stated) and re.fullmatch(mark.pattern, value) for mark in marks)
        for annotation, marks in types
    )


def _below(types: _Types, key: object) -> _Types:
    """Returns what the value of ``key`` may be; nothing where the schema does not say."""
    for annotation, _ in types:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and key in annotation.model_fields:
            field = annotation.model_fields[str(key)]
            return list(_members(field.annotation, field.metadata))
        if _origin(annotation) is dict:
            return list(_members(get_args(annotation)[1]))
    return []


def _members(annotation: Any, marks: Iterable[Any] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yields the types of a union, or the one type, with their marks."""
    origin, arguments = _origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _members(arguments[0], (*marks, *arguments[1:]))
    elif origin in (Union, UnionType):
        for part in arguments:
            yield from _members(part, marks)
    else:
        yield annotation, tuple(marks)


def _origin(annotation: Any) -> Any:
    """`get_origin`, whose declared type lacks some that it returns."""
    return get_origin(annotation)
