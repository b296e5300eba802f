"""The models that are measured: released ones of full size with random weights, and small ones of the same classes.

The small models are those of the project's tests; they are made where they are needed, in a second each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recording import Machine

from tests.models.families.flux import tiny as flux
from tests.models.families.flux2_klein import tiny as flux2_klein
from tests.models.families.glm_image import tiny as glm_image
from tests.models.families.ltx import tiny as ltx
from tests.models.families.qwen2_5_vl import tiny as qwen2_5_vl
from tests.models.families.qwen_image import tiny as qwen_image
from tests.models.families.sd3 import tiny as sd3
from tests.models.families.wan import tiny as wan
from tests.models.families.z_image import tiny as z_image
from tests.operations.plan.configurations import parameters_of
from visual_grpo.config import Parameters, merged
from visual_grpo.operations.gpu_measurement import single_module

Tree = Mapping[str, Any]
_3B: Tree = {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct", "options": {"max_tokens": 256}}}
_512: Tree = {"data": {"height": 512, "width": 512}}


def _few(samples: int, **model: str) -> Tree:
    return {"grpo": {"group_size": samples}, "model": model}


RELEASED: Mapping[str, tuple[str, str, Tree]] = {
    "sd3": ("sd3", "dit", {}),
    "z_image": ("z_image", "dit", _few(4)),
    "flux": ("flux", "dit", _few(4)),
    "qwen_image": ("qwen_image", "dit", _few(2)),
    "wan": ("wan", "dit", _few(4, offload="none")),
    "ltx": ("ltx", "dit", _few(4)),
    "flux2_klein": ("flux2_klein", "dit", _few(4)),
    "glm_decoder": ("glm_image", "dit", merged(_512, _few(4))),
    "flux2_klein_8bit": ("flux2_klein", "dit", _few(4, base_weights="8bit")),
    "flux2_klein_4bit": ("flux2_klein", "dit", _few(4, base_weights="4bit")),
    "qwen_vl_3b": ("qwen2_5_vl", "vl", _3B),
    "glm": ("glm_image", "ar", merged(_512, {"sampling": {"rollout": {"steps": 2}}})),
}
"""Name -> the project's configuration, its trained module, and what is changed in it: fewer samples save time."""
COMPILED = ("flux2_klein", "sd3", "qwen_vl_3b", "glm")
"""Where all is tiny, the first alone is compiled and planned: the project's tests have the others."""

SMALL: Mapping[str, tuple[Callable[[Path], Any], dict[str, object]]] = {
    "sd3": (lambda folder: sd3.pipeline().save_pretrained(folder), {"max_sequence_length": 32}),
    "flux": (lambda folder: flux.pipeline().save_pretrained(folder), {"max_sequence_length": 64}),
    "flux2_klein": (lambda folder: flux2_klein.pipeline().save_pretrained(folder), {"max_sequence_length": 256}),
    "qwen_image": (lambda folder: qwen_image.pipeline().save_pretrained(folder), {"max_sequence_length": 200}),
    "z_image": (lambda folder: z_image.pipeline().save_pretrained(folder), {"max_sequence_length": 64}),
    "wan": (lambda folder: wan.pipeline().save_pretrained(folder), {"max_sequence_length": 64}),
    "ltx": (lambda folder: ltx.pipeline().save_pretrained(folder), {"max_sequence_length": 64}),
    "glm_image": (glm_image.save, {}),
    "qwen2_5_vl": (qwen2_5_vl.save_qwen2_5_vl, {"max_tokens": 20}),
}
"""The project's configuration -> what saves a small model of its family, and options that fit it."""
SIZE = (64, 96)
FRAMES = {"wan": wan.FRAMES, "ltx": ltx.FRAMES}


def released(name: str, machine: Machine) -> Parameters:
    """A training of one module, of as many prompts as `gpu_check` takes; of a small model where all is tiny."""
    environment, module, changes = RELEASED[name]
    if machine.tiny:
        folder = small_folder(environment, machine, weights=False)
        bits = changes.get("model", {}).get("base_weights", "full")
        given = {"device": machine.device, "dtype": "bfloat16", "base_weights": bits}
        return small(environment, module, folder, {"model": given})
    return single_module(parameters_of(environment, merged(changes, {"model": {"device": machine.device}})), module)


def small(environment: str, module: str, folder: Path, changes: Tree) -> Parameters:
    """The configuration of a released model, for a small one in ``folder``."""
    _, options = SMALL[environment]
    answers = module == "vl"
    few: dict[str, Any] = {
        "data": {"height": SIZE[0], "width": SIZE[0] if answers else SIZE[1], "frames": FRAMES.get(environment)},
        "model": {"path": str(folder), "options": options},
        "plan": {"prompt_words": 10},
        "grpo": {"group_size": 4, "micro_batch_size": 2, "warmup_steps": 0},
        "sampling": {} if answers else {"rollout": {"steps": 3}},
    }
    return single_module(parameters_of(environment, merged(few, changes)), module)


def small_folder(environment: str, machine: Machine, *, weights: bool = True) -> Path:
    """Saves the small model, if it is not there, in the scratch folder; without weights, it gets random ones."""
    folder = machine.work / f"{environment}{'' if weights else '-without-weights'}"
    if not folder.is_dir():
        save, _ = SMALL[environment]
        save(folder)
        for file in () if weights else folder.rglob("*.safetensors"):
            file.unlink()
    return folder
