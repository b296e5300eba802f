"""Checks the parameter tree before anything runs and says in plain words what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from visual_grpo.common.errors import UserError, nearest, nearest_hint
from visual_grpo.config import Parameters

_LONGEST_VALUE = 80
_OF_A_UNION = re.compile(r"(str|int|float|bool|list|tuple|dict)(\[.*\])?")
"""What pydantic adds to a parameter's name: which of several types the value is not."""


class ParameterError(UserError):
    """The parameters cannot be used; the message lists every problem."""


def validate(tree: Mapping[str, Any]) -> Parameters:
    """The typed parameters.

    Args:
        tree: what the YAML files and ``--params`` say together.

    Raises:
        ParameterError: unknown keys, wrong types, impossible values: all of them in one message.
    """
    try:
        return Parameters.model_validate(dict(tree))
    except ValidationError as error:
        details: dict[Sequence[int | str], ErrorDetails] = {}
        for detail in error.errors(include_url=False):
            details.setdefault(_of_parameter(detail["loc"]), detail)
        problems = [_explain(path, detail) for path, detail in details.items()]
    count = "A parameter is wrong" if len(problems) == 1 else f"{len(problems)} parameters are wrong"
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise ParameterError(
        f"{count}:\n{lines}\n"
        "What every parameter means and may be: src/visual_grpo/config/. Values: conf/base/parameters.yml."
    )


def _of_parameter(path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The same for all the types that a value may have."""
    return path[:-1] if len(path) > 1 and _OF_A_UNION.fullmatch(str(path[-1])) else path


def _explain(path: Sequence[int | str], detail: ErrorDetails) -> str:
    section = _section(path[:-1])
    fields = section.model_fields if section is not None else {}
    field = fields.get(str(path[-1])) if path else None
    meaning = f" ({field.description})" if field is not None and field.description else ""
    name = ".".join(map(str, path)) or "parameters"
    if detail["type"] == "missing":
        return f"{name} is missing{meaning}"
    shown = "" if isinstance(detail["input"], Mapping) else f" = {_cut(repr(detail['input']))}"
    if detail["type"] == "extra_forbidden":
        return f"{name}{shown}: there is no such parameter.{_nearest_key(path, list(fields))}"
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    hint = ""
    if detail["type"] == "literal_error":
        hint = nearest_hint(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"{name}{shown}: {allowed}{meaning}{hint}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _nearest_key(path: Sequence[int | str], beside: Sequence[str]) -> str:
    """The likeliest key that was meant: one of those ``beside`` the wrong one, else anywhere in the tree."""
    near = nearest(str(path[-1]), beside)
    if near is not None:
        return f" Did you mean {'.'.join(map(str, [*path[:-1], near]))!r}?"
    # Of two keys with one name the shallower is the better known.
    names = sorted(_names(Parameters), key=lambda name: -name.count("."))
    elsewhere = {name.rpartition(".")[2]: name for name in names}
    near = nearest(str(path[-1]), elsewhere, cutoff=0.75)
    if near is not None:
        return f" Did you mean {elsewhere[near]!r}?"
    return f" Allowed here: {', '.join(beside)}" if beside else ""


def _section(path: Sequence[int | str]) -> type[BaseModel] | None:
    """The model that holds the keys at ``path``."""
    annotation: Any = Parameters
    for part in path:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif _is_model(annotation) and part in annotation.model_fields:
            annotation = annotation.model_fields[part].annotation
        else:
            return None
    return annotation if _is_model(annotation) else None


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        annotation: Any = field.annotation
        if _is_model(annotation):
            yield from _names(annotation, f"{prefix}{name}.")


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
