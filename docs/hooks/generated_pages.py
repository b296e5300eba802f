"""Pages written from the code at every build, so that they cannot be out of date: parameters and built-in rewards."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from mkdocs.structure.files import File
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import Needs
from visual_grpo.config import Parameters
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.rewards.judges import FAMILIES

PARAMETERS = """# Parameters

All parameters, generated from the code. *Value* is the value of a plain `kedro run`: the one in
`conf/base/parameters.yml`, otherwise the default. "required" means that the parameter has no default; conf/base sets
it.

Change a value for one run with `--params=grpo.steps=20,seed=1`, or for all runs in `conf/local/parameters.yml`. An
unknown name or an impossible value stops the run before any work, with the nearest valid name.
"""

REWARDS = """# Built-in rewards

Name one of them in the section `rewards` of the parameters. Its options are the entries of `rewards.NAME.options`.
[Your reward](../own_reward.md) explains how to write another.
"""

JUDGES = """
## Families for judges

Built-in rewards and [workers](../reward_workers.md#the-workers), by question and family. A
[judge](../own_reward.md#judges) answers the same question by a different family. Brackets hold the rubric of
[`vlm_judge`](../reward_workers.md#a-vision-language-model-as-judge).

| question | family | rewards |
|---|---|---|
"""

LICENCES = """
## Licences

Licences of the models that rewards load by default, as stated in the named files in November 2026 (stored copies,
possibly older). *Not found* means that these files state no licence for the weights: ask the authors. Read the licence
before you use a model.

"""


def on_files(files: Any, config: Any) -> Any:
    """Adds both pages."""
    root = Path(config["config_file_path"]).parent
    values = yaml.safe_load((root / "conf/base/parameters.yml").read_text(encoding="utf-8"))
    licences = "\n".join(runpy.run_path(str(root / "benchmarks/reward_licences.py"))["table"]())
    files.append(File.generated(config, "reference/parameters.md", content=parameters_page(values)))
    files.append(File.generated(config, "reference/rewards.md", content=rewards_page(licences)))
    return files


def parameters_page(values: dict[str, Any]) -> str:
    """``values``: what conf/base says."""
    return PARAMETERS + "".join(_section("", Parameters, values, ""))


def rewards_page(licences: str) -> str:
    rewards = "".join(_reward(name, path) for name, path in BUILT_IN.items())
    judges = "".join(
        f"| {question} | {family} | {', '.join(f'`{name}`' for name in names)} |\n"
        for question, families in FAMILIES.items()
        for family, names in families.items()
    )
    return f"{REWARDS}{rewards}{JUDGES}{judges}{LICENCES}{licences}\n"


def _section(name: str, model: type[BaseModel], values: Any, purpose: str) -> Iterator[str]:
    """A heading, what the section is for, its table, and then the sections in it."""
    yield f"\n## {f'`{name}`' if name else 'Top level'}\n\n"
    if name:
        yield f"{_plain(model.__doc__ or '')}\n\n{purpose}\n\n"
    rows, inner = [], []
    for key, field in model.model_fields.items():
        path = f"{name}.{key}".lstrip(".")
        own = values.get(key, PydanticUndefined) if isinstance(values, dict) else PydanticUndefined
        section, suffix = _inner(field.annotation)
        if section is not None and not (section.__name__ == "LoraParams" and path != "policy.lora"):
            inner.append((f"{path}{suffix}", section, {} if suffix else own, field))
            continue
        value = own if own is not PydanticUndefined else _default(field)
        rows.append(f"| `{key}` | {_type(field)} | {_value(value)} | {_cell(field.description or '')} |\n")
    if rows:
        yield "| parameter | type | value | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for path, section, own, field in inner:
        words = field.description or ""
        yield from _section(path, section, own, f"{words[:1].upper()}{words[1:]}." if words else "")


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and what its name adds to the path."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part, ".NAME" if get_origin(annotation) is dict else ""
    return None, ""


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory else field.default


def _type(field: Any) -> str:
    bounds = [_bound(constraint) for constraint in field.metadata]
    return _cell(", ".join(filter(None, [_annotation(field.annotation), *bounds])))


def _annotation(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _annotation(part) for part in arguments)
    if origin is not None and hasattr(annotation, "__metadata__"):  # Annotated
        bounds = [_bound(constraint) for constraint in _constraints(annotation)]
        return ", ".join(filter(None, [_annotation(arguments[0]), *bounds]))
    if origin in (list, tuple, dict):
        inside = dict.fromkeys(_annotation(part) for part in arguments if part is not Ellipsis)
        return f"{origin.__name__} of {' to '.join(inside)}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", object: "anything", Any: "anything"}
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _constraints(annotation: Any) -> Iterator[Any]:
    for extra in annotation.__metadata__:
        yield from getattr(extra, "metadata", [extra])


def _bound(constraint: Any) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
    for name, words in signs.items():
        value = getattr(constraint, name, None)
        if value is not None:
            return f"{words} {value}"
    return ""


def _value(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, str) and value.startswith("${"):
        return f"`{value}`"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`".replace("none", "null")
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return f"`{value}`" if value not in ({}, []) else "empty"


def _reward(name: str, path: str) -> str:
    made = load_attribute(path, "a reward")
    options = [
        f"`{parameter.name}` = `{parameter.default}`"
        for parameter in inspect.signature(made).parameters.values()
        if parameter.default is not parameter.empty
    ]
    needs = _needs(getattr(made, "needs", Needs()))
    return f"\n## `{name}`\n\n{_plain(*_docstrings(made))}\n\n{needs}Options: {', '.join(options) or 'none'}.\n"


def _docstrings(made: Any) -> list[str]:
    """That of a class, then those of its bases here: they describe the options that they bring."""
    return [base.__doc__ or "" for base in inspect.getmro(made) if base.__module__.startswith("visual_grpo.")]


def _needs(needs: Needs) -> str:
    said = {
        "Every record needs a target image. ": needs.target,
        "Every record needs a source image. ": needs.source,
        "It compares the samples of a prompt with each other. ": needs.whole_groups,
    }
    return "".join(text for text, holds in said.items() if holds)


def _plain(docstring: str, *bases: str) -> str:
    """A docstring as Markdown, with the arguments of its bases': double backticks are code, ``Args:`` is a list."""
    texts = [inspect.cleandoc(each).replace("``", "`").partition("\nArgs:\n") for each in (docstring, *bases)]
    listed = re.sub(
        r"^    (\w+):", r"- `\1`:", "\n".join(arguments for _, _, arguments in texts).strip("\n"), flags=re.M
    )
    return f"{texts[0][0]}\n\n{listed}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
