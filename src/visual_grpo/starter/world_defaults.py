"""Fills in what the parameters leave to the world, so that the core sees a dataset, a model and rewards as a user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import flatten
from visual_grpo.config.places import home_folder, or_default, place, section, with_output_folders
from visual_grpo.config.presets import AUTO, LISTED, Preset, optimised_rewards, with_preset
from visual_grpo.config.validation import validate
from visual_grpo.starter.worlds import SHAPES, World, find_world

CONF = Path("conf/base/parameters.yml")


def with_world(tree: Mapping[str, Any], environment: str | None = None) -> dict[str, Any]:
    """The parameter tree with the world's dataset, small model and rewards where it leaves them open.

    ``data.path`` and ``model.path`` are filled in where they are null, like the ``model.family`` of the small
    model. Where ``reward`` is auto and the data are the world's, or it is the name of a world, that world's rewards are
    spelled out, with its judges that are installed. A complete tree stays as it is.

    Raises:
        UserError: the world does not exist, or does not fit ``data.task`` or ``model.family``.
    """
    data, starter, model = (section(tree, name) for name in ("data", "starter", "model"))
    world = find_world(starter.get("world"))
    home = home_folder(tree, environment, world.tasks[0])
    dataset = or_default(starter.get("dataset"), f"{home}/01_raw/{world.name}")
    folder = or_default(starter.get("model"), str(place(home, "base_model").with_name("base")))
    renders, pretrains = (_is_open(given.get("path"), own) for given, own in ((data, dataset), (model, folder)))
    tree = with_output_folders(tree, home) | {"starter": {**starter, "dataset": dataset, "model": folder}}
    if renders or pretrains:
        _check_task(world, data.get("task", "t2i"))
    if renders:
        tree["data"] = {**data, "path": dataset}
    if pretrains:
        family = model.get("family", AUTO)
        family = next(iter(world.models), AUTO) if family == AUTO else family
        _check_family(world, family)
        tree["model"] = {**model, "path": folder, "family": family}
    return _with_world_rewards(tree, world, renders)


def default_parameters(file: Path = CONF) -> dict[str, Any]:
    """Returns the parameters of a file by their dotted names, with all defaults; empty without a usable file."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        return flatten(validate(with_world(tree)).model_dump(mode="json"))
    except (OSError, UserError, yaml.YAMLError, AttributeError):
        return {}


def _is_open(path: object, own: object) -> bool:
    """True if a path is left to the starter, by null or by any spelling of the folder that it writes."""
    return path is None or Path(str(path)).expanduser().resolve() == Path(str(own)).expanduser().resolve()


def _check_task(world: World, task: object) -> None:
    if task not in world.tasks:
        raise UserError(
            f"starter.world {world.name} is made for data.task {', '.join(world.tasks)} only, got {task}. For your own"
            " records name a saved model with model.path (images and queries: --env=qwen2_5_vl); for a small model that"
            " answers queries: --env=negative_points"
        )


def _check_family(world: World, family: str) -> None:
    if family not in world.models:
        raise UserError(
            f"the starter pretrains no small {family} on starter.world {world.name}; it pretrains"
            f" {', '.join(world.models) or 'no model'}.{nearest_hint(family, world.models)} Name a saved model with"
            " model.path, a different model.family, or a different starter.world: examples/ has worlds for small flow"
            " models."
        )


def _with_world_rewards(tree: dict[str, Any], world: World, renders: bool) -> dict[str, Any]:
    reward, chosen = tree.get("reward", AUTO), None
    if isinstance(reward, str):
        chosen = {SHAPES.name: SHAPES, world.name: world}.get(reward)
    # Other values for the world's own rewards change them; a different reward takes their place.
    if reward == AUTO and renders and optimised_rewards(tree) <= world.preset.rewards.keys():
        chosen = world
    if chosen is None:
        return tree
    # The world's records have what its judges compare with; for other judges, the records decide.
    rewards = {name: entry for name, entry in chosen.preset.rewards.items() if renders or not entry.get("judge")}
    tree = with_preset(tree, replace(chosen.preset, rewards=rewards)) | {"reward": LISTED}
    optimised = optimised_rewards(tree)
    judges = {n: entry for n, entry in chosen.installed_judges.items() if entry.get("judge_of") in (None, *optimised)}
    return with_preset(tree, Preset(rewards=judges), own_first=True)
