"""A world: what is rendered, how it is rewarded, and the small models that are pretrained on it.

The demo's world comes with the package; more are in ``examples/``, or a user writes one. Functions are named
``package.module:function``: they import torch and diffusers, and every command looks up its world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from visual_grpo.common.errors import UserError
from visual_grpo.common.importing import load_attribute
from visual_grpo.config import Parameters, StarterConfig, Task
from visual_grpo.config.presets import Preset
from visual_grpo.rewards.remote.local_worker import python_of

_MODULES = {name.removesuffix("_steps") for name in StarterConfig.model_fields if name.endswith("_steps")}


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The pretraining of a family's small model."""

    pretrain: Mapping[str, tuple[str, ...]]
    """Function ``(job, advance)`` -> the modules that it trains, each for ``starter.MODULE_steps``. Functions run in
    parallel, each in a separate process; the longest starts first."""
    assemble: str | None = None
    """``(job, folder)``: saves the whole model in ``folder`` from the parts in ``job.folder``. None = the only function
    of ``pretrain`` saves all of it."""

    def __post_init__(self) -> None:
        trained = {module for modules in self.pretrain.values() for module in modules}
        if not trained or not trained <= _MODULES:
            raise UserError(
                f"SmallModel.pretrain trains {', '.join(sorted(trained)) or 'nothing'}; expected modules among"
                f" {', '.join(sorted(_MODULES))}, whose steps are starter.MODULE_steps."
            )

    @property
    def functions(self) -> list[str]:
        return [*self.pretrain, *filter(None, [self.assemble])]


@dataclass(frozen=True, kw_only=True)
class World:
    """A dataset that is rendered, with its rewards and small models."""

    name: str
    """Also the name of the dataset's folder."""
    tasks: tuple[Task, ...]
    """``data.task`` that it is rendered for; results of any but the first have a folder of their own."""
    render: str
    """``(folder, records_per_prompt, height, width, seed, task)``: writes the dataset (`pretraining.write_dataset`)."""
    models: Mapping[str, SmallModel]
    """Small models by family; the first is the default."""
    preset: Preset
    """Sections ``rewards`` and ``modules`` of the parameters, for its data."""
    texts: str | None = None
    """``(task)``: the texts whose words the small models know, so that others are named; None = they read any word."""
    worker_judges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further entries of ``rewards``, each a judge in a worker of the same name; used where that is installed."""

    @property
    def installed_judges(self) -> dict[str, Mapping[str, Any]]:
        return {name: entry for name, entry in self.worker_judges.items() if python_of(name).is_file()}


_GLM = "visual_grpo.starter.glm_image"
SHAPES = World(
    name="shapes",
    tasks=("t2i", "i2i", "mixed"),
    render="visual_grpo.starter.shapes.dataset:draw_dataset",
    texts="visual_grpo.starter.shapes.render:texts",
    models={
        "glm_image": SmallModel(
            pretrain={
                f"{_GLM}.pretrain_decoder:pretrain_decoder_half": ("vae", "dit"),
                f"{_GLM}.pretrain_ar:pretrain_language_half": ("ar",),
            },
            assemble=f"{_GLM}.modules:save_pipeline",
        ),
    },
    preset=Preset(
        rewards={
            "shapes": {"function": "visual_grpo.starter.shapes.shapes_reward:ShapesReward", "weight": 1.0},
            "rendering": {"function": "visual_grpo.starter.shapes.shapes_reward:RenderingReward", "weight": 0.0},
            "outline": {"function": "visual_grpo.starter.shapes.outline:OutlineGuard", "weight": 0.0},
            # The whole picture, as a person compares it with the one that was asked for.
            "delta_e": {"judge": True},
        },
        # The tokens decide nearly all of `shapes`, so the decoder is also rewarded for clean colours and outlines.
        modules={"dit": {"rendering": 1.0}},
    ),
)


def find_world(name: object) -> World:
    """Returns `SHAPES` for its name, or the world that ``package.module:WORLD`` names. Raises UserError."""
    if isinstance(name, str) and ":" in name:
        world = load_attribute(name, "starter.world")
        if not isinstance(world, World):
            raise UserError(f"starter.world is {name!r}, which is a {type(world).__name__}, not a World.")
        return world
    if name != SHAPES.name:
        raise UserError(
            f"starter.world is {name!r}; expected {SHAPES.name}, or package.module:WORLD for any other, such as"
            " examples.words:WORLD."
        )
    return SHAPES


def own_functions(config: Parameters) -> list[str]:
    """Returns the functions outside of this package that render the data and pretrain the model of ``config``."""
    world = find_world(config.starter.world)
    called = [world.render] if config.data_is_rendered else []
    called += world.models[config.model.family].functions if config.model_is_pretrained else []
    return [function for function in called if not function.startswith("visual_grpo.")]


def require_functions(config: Parameters) -> None:
    """Raises UserError where a function of `own_functions` cannot be imported."""
    for function in own_functions(config):
        if not callable(found := load_attribute(function, "a function of starter.world")):
            raise UserError(f"{function} (of {config.starter.world}) is a {type(found).__name__}, not a function.")
