"""Fills in what the parameters leave open: the folder of each environment and dataset, and the rewards of a preset."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from visual_grpo.common.errors import UserError

ROOT = "data"
UNNAMED_ENVIRONMENTS = (None, "base", "local")
DRAWN_TASKS = {"shapes": "t2i", "words": "t2i", "scenes": "segmentation"}
"""data.task that each of the starter's worlds is drawn for."""


def with_output_folders(tree: Mapping[str, Any], environment: str | None) -> dict[str, Any]:
    """The parameter tree with every folder that it leaves open (null): ``output``, and the folders in it.

    The default environment with the drawn shapes writes into ``data``, an environment NAME into ``data/NAME``, another
    task into a folder named after it. The user's own data has a folder in that, named after ``data.path`` (and
    ``model.path``, if given), and shares the pretrained model: results of other data or another model are kept apart.
    """
    data, starter, tracking, model = (_section(tree, name) for name in ("data", "starter", "tracking", "model"))
    path = data.get("path")
    home = _or(tree.get("output"), _home(data, starter, environment))
    own = home if path is None else f"{home}/{_named_after(str(path), model.get('path'))}"
    output = _or(tree.get("output"), own)
    dataset = _or(starter.get("dataset"), f"{home}/01_raw/{starter.get('world', 'shapes')}")
    return {
        **tree,
        "output": output,
        "data": {**data, "path": _or(path, dataset)},
        "starter": {**starter, "dataset": dataset, "model": _or(starter.get("model"), f"{home}/06_models/base")},
        "tracking": {**tracking, "checkpoints": _or(tracking.get("checkpoints"), f"{output}/06_models/checkpoints")},
    }


def _home(data: Mapping[str, Any], starter: Mapping[str, Any], environment: str | None) -> str:
    """Returns the folder in which an environment draws its dataset and pretrains its model for a task."""
    parts = [ROOT] if environment in UNNAMED_ENVIRONMENTS else [ROOT, str(environment)]
    task = data.get("task", "t2i")
    drawn_for = DRAWN_TASKS.get(str(starter.get("world", "shapes")))
    return "/".join(parts if task == drawn_for else [*parts, str(task)])


def _or(value: Any, default: str) -> Any:
    """Nothing but null is left open; what else is no folder's name is for the validation to refuse."""
    return default if value is None else value


def _named_after(path: str, model: str | None) -> str:
    """The folder's name, with a hash over its place and the model's; the same for every spelling of them."""
    name = re.sub(r"[^\w.-]+", "_", Path(path).expanduser().resolve().name)[:40]
    places = "\0".join(_place(str(each)) for each in (path, model) if each is not None)
    return f"{name}-{hashlib.sha256(places.encode()).hexdigest()[:6]}"


def _place(path: str) -> str:
    full = Path(path).expanduser().resolve()
    return (full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else full).as_posix()


AUTO = "auto"
PresetName = Literal["shapes", "words", "text", "target", "edit", "negative_points"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sections ``rewards`` and ``modules`` of the parameters, as a YAML file would have them."""

    rewards: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Module -> weights in its training, where ``modules`` has a section for it."""


_GUARDS = {"edge_density": {"weight": 0.0}, "colour_entropy": {"weight": 0.0}}
"""They fall where a policy wins its reward with ever emptier images; soft outlines have no edges, but colours."""

PRESETS: Mapping[PresetName, Preset] = {
    # Which tokens are drawn decides nearly all of `shapes`, so the decoder is also rewarded for saturated colours.
    "shapes": Preset(
        rewards={"shapes": {"weight": 1.0}, "palette": {"weight": 0.0}}, modules={"dit": {"palette": 1.0}}
    ),
    # A drawn sign is a single line of text, so that detecting where text is, which takes much longer, is not needed.
    "words": Preset(rewards={"ocr": {"weight": 1.0, "options": {"line": [0, 0, 1, 1]}}, **_GUARDS}),
    "text": Preset(rewards={"ocr": {"weight": 1.0}, **_GUARDS}),
    "target": Preset(rewards={"ssim": {"weight": 1.0}, **_GUARDS}),
    # A copy of the source is often similar to the target: `source_ssim` shows when that is what is learned.
    "edit": Preset(rewards={"ssim": {"weight": 1.0}, "source_ssim": {"weight": 0.0}, **_GUARDS}),
    "negative_points": Preset(rewards={"negative_points": {"weight": 1.0}}),
}
WORLD_PRESETS: Mapping[str, PresetName] = {"shapes": "shapes", "words": "words", "scenes": "negative_points"}
"""Preset of each of the starter's worlds."""


def with_rewards(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter tree with its preset's rewards spelled out, and without those that are null.

    ``auto`` is replaced where the tree decides it: by the preset of the drawn data, or by null where ``rewards`` names
    the user's rewards. For the user's own data it stays, since only the records can tell (`operations.preflight`).
    Beside the user's own rewards of images stand guards, as beside those of a preset.
    """
    rewards, modules = _entries(tree, "rewards", "options"), _entries(tree, "modules", "rewards")
    name = tree.get("reward", AUTO)
    if name == AUTO:
        name = _decided(tree, _optimised(rewards, modules))
    preset = _preset(name, tree, rewards, modules)
    removed = {reward for reward, entry in rewards.items() if entry is None}
    merged = {reward: _merged(preset.rewards.get(reward), entry) for reward, entry in rewards.items()}
    # One's own come first where they are all there is.
    merged = {**merged, **preset.rewards, **merged} if name is None else {**preset.rewards, **merged}
    return {
        **tree,
        "reward": name,
        "rewards": {reward: entry for reward, entry in merged.items() if entry is not None},
        "modules": {
            module: _with_weights(section, preset.modules.get(module, {}), removed)
            for module, section in modules.items()
            if section is not None
        },
    }


def pinned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A stored parameter tree to which its preset will add no reward: one that was removed is null again."""
    rewards = tree.get("rewards", {})
    preset = _preset(tree.get("reward"), tree, rewards, tree.get("modules", {}))
    removed = [reward for reward in preset.rewards if reward not in rewards]
    return {**tree, "rewards": {**rewards, **dict.fromkeys(removed)}} if removed else dict(tree)


def is_drawn(path: object, dataset: object) -> bool:
    """Returns whether ``path`` is the ``dataset`` that the starter draws; both are not validated yet."""
    return Path(str(path)).expanduser().resolve() == Path(str(dataset)).expanduser().resolve()


def _section(tree: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """Returns a section of the tree at ``path``; raises UserError if it is none."""
    section = tree.get(name, {})
    if not isinstance(section, Mapping):
        raise UserError(f"{path}{name} = {section!r}: expected a section, with a name and a value on each line.")
    return section


def _entries(tree: Mapping[str, Any], name: str, key: str) -> Mapping[str, Any]:
    """Returns a section whose entries are null or sections with a section ``key``; raises UserError otherwise."""
    entries = {} if tree.get(name) is None else _section(tree, name)
    for entry, value in entries.items():
        if value is not None:
            _section(_section(entries, entry, f"{name}."), key, f"{name}.{entry}.")
    return entries


def _preset(name: Any, tree: Mapping[str, Any], rewards: Mapping[str, Any], modules: Mapping[str, Any]) -> Preset:
    if isinstance(name, str):
        return PRESETS.get(name, Preset(rewards={}))  # type: ignore[call-overload]
    of_images = _section(tree, "data").get("task") != "segmentation"
    return Preset(rewards=_GUARDS if of_images and _optimised(rewards, modules) else {})


def _decided(tree: Mapping[str, Any], optimised: set[str]) -> str | None:
    """Resolves ``auto``, as far as the tree alone decides it."""
    data, starter = _section(tree, "data"), _section(tree, "starter")
    path, dataset = data.get("path"), starter.get("dataset")
    if path is not None and not (dataset and is_drawn(path, dataset)):
        return None if optimised else AUTO
    name = WORLD_PRESETS.get(starter.get("world", "shapes"))
    # Other values for the world's own rewards change them; another reward takes their place.
    return name if name is not None and optimised <= PRESETS[name].rewards.keys() else None


def _optimised(rewards: Mapping[str, Any], modules: Mapping[str, Any]) -> set[str]:
    """The entries of ``rewards`` with a weight that is not 0, be it in one module."""
    by_module = [section.get("rewards", {}) for section in modules.values() if section is not None]
    return {
        name
        for name, entry in rewards.items()
        if entry is not None
        and (entry.get("weight", 1.0) != 0 or any(weights.get(name, 0) != 0 for weights in by_module))
    }


def _merged(preset: Mapping[str, Any] | None, entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns a preset's reward with the values of the user's ``entry``; another function replaces it."""
    if preset is None or entry is None or entry.get("function") is not None:
        return entry
    return {**preset, **entry, "options": {**preset.get("options", {}), **entry.get("options", {})}}


def _with_weights(section: Mapping[str, Any], weights: Mapping[str, float], removed: set[str]) -> Mapping[str, Any]:
    """Adds a preset's weights to a module's section where it has none, without those of removed rewards."""
    rewards = {**weights, **section.get("rewards", {})}
    kept = {name: weight for name, weight in rewards.items() if name not in removed}
    return {**section, "rewards": kept} if kept or "rewards" in section else section
