"""In what two trainings differ."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import Parameters, flatten
from visual_grpo.config.presets import pinned
from visual_grpo.pipelines.compare.sides import Side
from visual_grpo.trained_adapters import modules_of

_UNCOMPARED = (
    "output",
    "resume",
    "adapter",
    "evaluation.",
    "tracking.",
    "generate.",
    "score.",
    "compare.",
    "promotion.",
    "run",
    "reproduce.",
    "model.device",
    "starter.",
)


def differences(first: Side, second: Side) -> dict[str, list[Any]]:
    """What differs between two trainings: parameter, ``data``, ``code`` or ``base model`` -> [first's, second's].

    A parameter that a module can have differently is what it was in the training of the modules, such as
    ``grpo.learning_rate: [0.0007, "0.0007 (ar), 0.0006 (dit)"]``. Empty where one side is the base model.
    """
    if not first.facts or not second.facts:
        return {}
    settings = [_settings(side) for side in (first, second)]
    found = {
        name: [side.get(name) for side in settings]
        for name in sorted(settings[0].keys() | settings[1].keys())
        if not name.startswith(_UNCOMPARED) and settings[0].get(name) != settings[1].get(name)
    }
    names = {"data": "data", "model_digest": "base model", "git.commit": "code", "git.state": "code's state"}
    return found | {
        shown: [first.facts.get(key), second.facts.get(key)]
        for key, shown in names.items()
        if first.facts.get(key) != second.facts.get(key)
    }


def _settings(side: Side) -> dict[str, Any]:
    """The parameters of a training by their dotted names, as its modules had them."""
    tree = side.facts.get("parameters")
    if tree is None or side.folder is None:
        return {}
    config = Parameters.model_validate(pinned(tree))
    of_modules = {module: flatten(_of_module(config, module)) for module in modules_of(side.folder)}
    names = [name for settings in of_modules.values() for name in settings]
    shared = {name: value for name, value in flatten(tree).items() if not name.startswith("modules.")}
    return shared | {name: _together({m: settings[name] for m, settings in of_modules.items()}) for name in names}


def _of_module(config: Parameters, module: str) -> dict[str, Any]:
    """What `Parameters.modules` can have differently."""
    return {
        "grpo": config.grpo_of(module).model_dump(mode="json"),
        "policy": {"lora": config.lora_of(module).model_dump(mode="json")},
        "rewards": {name: {"weight": weight} for name, weight in config.weights([module]).items()},
    }


def _together(values: dict[str, Any]) -> Any:
    """One value for all modules, or each module's."""
    [first, *others] = values.values()
    if all(other == first for other in others):
        return first
    return ", ".join(f"{_short(value)} ({module})" for module, value in values.items())


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
