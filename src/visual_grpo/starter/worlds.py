"""The worlds of the demo: what is rendered, how it is rewarded, and the small models that are pretrained on it.

Functions are named ``package.module:function``: they import torch and diffusers, and every command looks up its world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.importing import load_attribute
from visual_grpo.config import Task
from visual_grpo.config.presets import GUARDS, Preset
from visual_grpo.rewards.remote.local_worker import python_of


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The pretraining of a family's small model."""

    pretrain: Mapping[str, tuple[str, ...]]
    """Function ``(job, advance)`` -> the modules that it trains, each for ``starter.MODULE_steps``. Functions run in
    parallel, each in a separate process; the longest starts first."""
    assemble: str | None = None
    """``(job, folder)``: saves the whole model in ``folder`` from the parts in ``job.folder``. None = the only function
    of ``pretrain`` saves all of it."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A dataset that is rendered, with its rewards and small models."""

    name: str
    """Also that of the dataset's folder."""
    tasks: tuple[Task, ...]
    """``data.task`` that it is rendered for; results of any but the first have a folder of their own."""
    render: str
    """``(folder, records_per_prompt, height, width, seed, task)``: writes the dataset (`pretraining.write_dataset`)."""
    models: Mapping[str, SmallModel]
    """By family; the first is the default."""
    preset: Preset
    """Sections ``rewards`` and ``modules`` of the parameters, for its data."""
    judges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further entries of ``rewards``, each a judge in a worker of the same name; used where that is installed."""

    @property
    def installed_judges(self) -> dict[str, Mapping[str, Any]]:
        return {name: entry for name, entry in self.judges.items() if python_of(name).is_file()}


_GLM, _FLOW = "visual_grpo.starter.glm_image", "visual_grpo.starter.flow_models"


def _flow_model(function: str, module: str = _FLOW) -> SmallModel:
    return SmallModel(pretrain={f"{module}:{function}": ("vae", "dit")})


def _reader(worker: str, **environment: str) -> Mapping[str, Any]:
    function = "visual_grpo.rewards.remote.http_reward:HttpReward"
    options = {"worker": f"workers/{worker}", "environment": environment}
    return {"function": function, "judge": True, "judge_of": "ocr", "options": options}


_SHAPES = World(
    name="shapes",
    tasks=("t2i", "i2i", "mixed"),
    render="visual_grpo.starter.shapes.dataset:draw_dataset",
    models={
        "glm_image": SmallModel(
            pretrain={
                f"{_GLM}.pretrain_decoder:pretrain_decoder_half": ("vae", "dit"),
                f"{_GLM}.pretrain_ar:pretrain_language_half": ("ar",),
            },
            assemble=f"{_GLM}.modules:save_pipeline",
        ),
        "sd3": _flow_model("pretrain_sd3"),
        "flux": _flow_model("pretrain_flux"),
        "z_image": _flow_model("pretrain_z_image"),
        "flux_kontext": _flow_model("pretrain_kontext", "visual_grpo.starter.flow_edits"),
    },
    preset=Preset(
        rewards={
            "shapes": {"function": "visual_grpo.starter.shapes.reward:ShapesReward", "weight": 1.0},
            "rendering": {"function": "visual_grpo.starter.shapes.reward:RenderingReward", "weight": 0.0},
            "outline": {"function": "visual_grpo.starter.shapes.outline:OutlineGuard", "weight": 0.0},
            # The whole picture, as a person compares it with the one that was asked for.
            "delta_e": {"judge": True},
        },
        # The tokens decide nearly all of `shapes`, so the decoder is also rewarded for clean colours and outlines.
        modules={"dit": {"rendering": 1.0}},
    ),
)
_WORDS = World(
    name="words",
    tasks=("t2i",),
    render="visual_grpo.starter.words:draw_words",
    models={"sd3": _flow_model("pretrain_signs", "visual_grpo.starter.pretrain_on_words")},
    # A sign is a single line of text, so that detecting where text is, which takes much longer, is not needed.
    preset=Preset(
        rewards={
            "ocr": {"weight": 1.0, "options": {"line": [0, 0, 1, 1]}},
            "letters_apart": {"function": "visual_grpo.starter.words:LettersApart", "weight": 0.0},
            **GUARDS,
        }
    ),
    judges={
        "tesseract": _reader("tesseract", TESSERACT_LAYOUT="line"),
        "easyocr": _reader("easyocr", EASYOCR_LAYOUT="line"),
    },
)
_SCENES = World(
    name="scenes",
    tasks=("segmentation",),
    render="visual_grpo.starter.scenes:draw_scene_records",
    models={"qwen2_5_vl": SmallModel(pretrain={"visual_grpo.starter.pretrain_vl:pretrain_vl": ("vl",)})},
    preset=Preset(rewards={"negative_points": {"weight": 1.0}}),
)
_MOTION = World(
    name="motion",
    tasks=("t2i",),
    render="visual_grpo.starter.motion.draw:draw_dataset",
    models={"wan": _flow_model("pretrain_wan", "visual_grpo.starter.motion.pretrain_wan")},
    preset=Preset(
        rewards={
            "moving_shapes": {
                "function": "visual_grpo.starter.motion.reward:MovingShapeReward",
                "weight": 1.0,
            },
            "motion": {"weight": 0.0},
            "flicker": {"weight": 0.0},
            "delta_e": {"judge": True, "frames": "all"},
        }
    ),
)
_PAIRS = World(
    name="pairs",
    tasks=("i2i",),
    render="visual_grpo.starter.pairs:draw_dataset",
    models={"flux2_klein": _flow_model("pretrain_klein", "visual_grpo.starter.pretrain_klein")},
    preset=Preset(rewards=_SHAPES.preset.rewards),
)
WORLDS: Mapping[str, World] = {world.name: world for world in (_SHAPES, _WORDS, _SCENES, _MOTION, _PAIRS)}


def find_world(name: object) -> World:
    """Returns one of `WORLDS`, or the user's own that ``package.module:WORLD`` names. Raises UserError."""
    if isinstance(name, str) and ":" in name:
        world = load_attribute(name, "starter.world")
        if not isinstance(world, World):
            raise UserError(f"starter.world is {name!r}, which is a {type(world).__name__}, not a World.")
        return world
    if name not in tuple(WORLDS):
        raise UserError(
            f"starter.world is {name!r}; expected {', '.join(WORLDS)}, or package.module:WORLD for a world of your own."
            f"{nearest_hint(str(name), WORLDS)}"
        )
    return WORLDS[str(name)]
