"""Writes adapters as an MLflow model that loads without the project's folder.

``mlflow.diffusers`` keeps one LoRA of one pipeline; GLM-Image has two adapters in two formats, and Qwen2.5-VL is no
pipeline. So the model is a thin pyfunc: `served_model` is loaded by name (nothing is pickled) and reads::

    MLmodel, requirements.txt, README.md      signature, versions of the libraries, the card
    data/visual_grpo/adapters/                the folder that the training left, without ``best`` and ``last``
    data/visual_grpo/base/                    the base model, where it is small enough
    data/visual_grpo/served.json              else where it is, and the digest of its content
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.model_card import CARD
from visual_grpo.saved_model import content_digest, may_be_hub_id
from visual_grpo.tracking.served_image import png
from visual_grpo.tracking.versions import INSIDE
from visual_grpo.trained_adapters import BEST, HELD_OUT, LAST, check_base, read_facts

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

SERVED, BASE, ADAPTERS = "served.json", "base", "adapters"
"""What `served_model` reads, in the folder that it is given."""
LOADER = "visual_grpo.tracking.served_model"
DEVICE = "device"
"""The one setting that loading takes: ``load_model(uri, model_config={"device": "cpu"})``."""
SAMPLER = {"tokens": ("temperature", "top_p", "top_k"), "flow": ("steps", "guidance_scale")}
"""Kind of module -> the settings of its sampler that a request may give."""
_TYPES = {"temperature": "double", "top_p": "double", "top_k": "long", "steps": "long", "guidance_scale": "double"}
_UV = ("uv.lock", "pyproject.toml", ".python-version")
"""Files of the working folder that MLflow may add; a lock can name the hosts of a company."""


def package(adapters: Path, folder: Path, *, card: str, about: Mapping[str, str], base_copy_mb: float) -> None:
    """Writes the model into ``folder``, which is empty.

    Args:
        about: what the model's metadata say.
        base_copy_mb: largest base model in a local folder (MB, 10^6 bytes) that is copied.

    Raises:
        UserError: the base model is gone, or is not the one that the adapters were trained on.
    """
    import mlflow

    facts = read_facts(adapters)
    config = Parameters.model_validate(facts["parameters"])
    base = _base(adapters, facts["model"], config, base_copy_mb)
    with TemporaryDirectory() as place:
        inside = Path(place) / Path(INSIDE).name
        shutil.copytree(adapters, inside / ADAPTERS, ignore=shutil.ignore_patterns(BEST, LAST))
        (inside / ADAPTERS / CARD).write_text(card, encoding="utf-8")
        if base["copied"]:
            shutil.copytree(facts["model"], inside / BASE, ignore=shutil.ignore_patterns(".*"))
        (inside / SERVED).write_text(json.dumps(base, indent=1), encoding="utf-8")
        mlflow.pyfunc.save_model(
            folder,
            loader_module=LOADER,
            data_path=str(inside),
            signature=signature(config, facts["model"]),
            input_example=_example(adapters, config),
            pip_requirements=_requirements(config),  # Else found by loading the model: ten times as long.
            model_config={DEVICE: "auto"},
            metadata=dict(about),
        )
    (folder / CARD).write_text(card, encoding="utf-8")
    for name in _UV:
        (folder / name).unlink(missing_ok=True)


def signature(config: Parameters, model: str) -> ModelSignature:
    """What a request gives and gets, by the task of the training and the modules of its model."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import AnyType

    task, family = config.data.task, components.family_of(config, model)
    if task == "t2i":
        inputs = Schema([ColSpec("string")])  # Without a name, so that a list of prompts is taken.
    else:
        inputs = Schema([ColSpec("string", "prompt"), ColSpec(AnyType(), "image", required=False)])
    said = [ColSpec("string", "answer"), ColSpec("binary", "mask", required=False)]
    sample = said if task == "segmentation" else [ColSpec("binary", "image")]
    outputs = Schema([ColSpec("string", "prompt"), ColSpec("long", "seed"), *sample])
    stock = config.sampling.stock.model_dump()
    names = [name for kind, names in SAMPLER.items() if kind in family.kinds() for name in names]
    params = [ParamSpec("seed", "long", 0), ParamSpec("samples", "long", 1)]
    params += [ParamSpec(name, _TYPES[name], stock[name]) for name in names]
    return ModelSignature(inputs=inputs, outputs=outputs, params=ParamSchema(params))


def _base(adapters: Path, model: str, config: Parameters, base_copy_mb: float) -> dict[str, Any]:
    """What ``served.json`` says of the base model: its place, its digest, and whether it is copied."""
    folder = Path(model)
    if may_be_hub_id(model):
        return {"base": model, "content": None, "copied": False, "revision": config.model.revision}
    if not folder.is_dir():
        raise UserError(
            f"The base model {model} of the adapters in {adapters} is gone, and without it they are of no use. Put it"
            " back, then run the command again."
        )
    content = content_digest(folder)
    check_base(adapters, model, content)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"base": str(folder.resolve()), "content": content, "copied": size <= base_copy_mb * 1e6, "bytes": size}


def _example(adapters: Path, config: Parameters) -> list[Any]:
    """A prompt that the training never saw, where it says which these are; with a grey image, if one is needed."""
    file = adapters / HELD_OUT
    held_out: list[str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    prompt = (held_out or ["a small red circle on the left"])[0]
    if config.data.task == "t2i":
        return [prompt]
    from PIL import Image

    grey = png(Image.new("RGB", (config.data.width, config.data.height), "grey"))
    return [{"prompt": prompt, "image": base64.b64encode(grey).decode()}]


def _requirements(config: Parameters) -> list[str]:
    """The libraries that this package and the model ask for, in the versions that are installed; not the package
    itself, which is on no index: it must be installed where the model is loaded."""
    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in metadata.requires("visual-grpo") or []]
    names = [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    names += [] if config.model.base_weights == "full" else ["bitsandbytes"]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in names]
