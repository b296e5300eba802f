"""Reads a tree of values as `Parameters`, and explains what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from visual_grpo.common.errors import UserError, nearest, nearest_hint
from visual_grpo.config.base import types_of
from visual_grpo.config.credentials import find_secrets
from visual_grpo.config.presets import LISTED, TARGET_JUDGE
from visual_grpo.config.schema import Parameters

_LONGEST_VALUE = 80
_OF_A_UNION = re.compile(r"(str|int|float|bool|list|tuple|dict)(\[.*\])?")
"""Suffix that pydantic adds to the name of a parameter of several types: the type that the value is not."""


class ParameterError(UserError):
    """The parameters cannot be used; the message lists every problem."""


def validate(tree: Mapping[str, Any]) -> Parameters:
    """Returns the typed parameters of a tree, which the YAML files and ``--params`` make together.

    Raises ParameterError for unknown keys, wrong types and impossible values, all in one message.
    """
    try:
        return Parameters.model_validate(dict(tree))
    except ValidationError as error:
        details: dict[Sequence[int | str], ErrorDetails] = {}
        for detail in error.errors(include_url=False):
            details.setdefault(_without_type(detail["loc"]), detail)
        problems = [_explain(path, detail) for path, detail in details.items()]
    count = "A parameter is wrong" if len(problems) == 1 else f"{len(problems)} parameters are wrong"
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise ParameterError(
        f"{count}:\n{lines}\n"
        "What every parameter means and may be: src/visual_grpo/config/. Values: conf/base/parameters.yml."
    )


def with_target_judge(config: Parameters) -> Parameters:
    """Returns the parameters with the judge of target images, unless the user has named or removed one."""
    judged = any(reward.judge for reward in config.rewards.values())
    if judged or config.reward == LISTED or config.data.task == "segmentation" or TARGET_JUDGE in config.rewards:
        return config
    frames = {} if config.data.frames is None else {"frames": "all"}
    return with_chosen(config, config.reward, {TARGET_JUDGE: {"judge": True, **frames}})


def with_chosen(
    config: Parameters, preset: str | None, rewards: Mapping[str, Any] = MappingProxyType({})
) -> Parameters:
    """Returns the parameters with the rewards of ``preset``, which the records have chosen, and these ``rewards``."""
    tree = config.model_dump()
    entries = tree["rewards"] | rewards | dict.fromkeys(config.removed_rewards)
    return validate({**tree, "reward": preset, "rewards": entries})


def is_text(name: str) -> bool:
    """Returns whether the parameter with a dotted name takes text and no number."""
    *path, last = name.split(".")
    section = _section(path)
    if section is None or last not in section.model_fields:
        return False
    annotation = section.model_fields[last].annotation
    types = types_of(annotation)
    return str in types and not types & {int, float} and get_origin(annotation) is not dict


def _without_type(path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Drops the type that pydantic appends to the path of a parameter of several types."""
    return path[:-1] if len(path) > 1 and _OF_A_UNION.fullmatch(str(path[-1])) else path


def _explain(path: Sequence[int | str], detail: ErrorDetails) -> str:
    section = _section(path[:-1])
    fields = section.model_fields if section is not None else {}
    field = fields.get(str(path[-1])) if path else None
    meaning = f" ({field.description})" if field is not None and field.description else ""
    name = ".".join(map(str, path)) or "parameters"
    if detail["type"] == "missing":
        return f"{name} is missing{meaning}"
    value = repr(detail["input"])
    value = value if len(value) <= _LONGEST_VALUE else value[:_LONGEST_VALUE] + "..."
    is_shown = not isinstance(detail["input"], Mapping) and not any(find_secrets({name: detail["input"]}))
    shown = f" = {value}" if is_shown else ""
    if detail["type"] == "extra_forbidden":
        return f"{name}{shown}: this parameter does not exist.{_nearest_key(path, list(fields))}"
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    hint = ""
    if detail["type"] == "literal_error":
        hint = nearest_hint(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"{name}{shown}: {allowed}{meaning}{hint}"


def _nearest_key(path: Sequence[int | str], beside: Sequence[str]) -> str:
    """Suggests the nearest key: one ``beside`` the wrong one, else one anywhere in the tree."""
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
    """Returns the model that holds the keys at ``path``; None if there is none."""
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
