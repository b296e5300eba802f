"""Adapters as an MLflow model (pyfunc) that loads and serves without the project's folder.

``mlflow.diffusers`` keeps one LoRA of one pipeline; GLM-Image has two adapters in two formats, and Qwen2.5-VL is no
pipeline. So `package` writes a model that MLflow loads by this module's name, with nothing pickled::

    MLmodel, requirements.txt, README.md      signature, versions of the libraries, the card
    data/visual_grpo/adapters/                the folder that the training left, without ``best`` and ``last``
    data/visual_grpo/base/                    the base model, where it is small enough
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.environment_variables import MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.models import Model as SavedModel
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType
from packaging.requirements import Requirement
from PIL import Image
from pydantic import ValidationError

from visual_grpo.adapter_folder import BEST, LAST, adapter_digest, check_base, read_facts
from visual_grpo.common.digests import may_be_hub_id
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import find_link, require_no_links
from visual_grpo.common.images import (
    fit,
    read_image,
    read_size,
    scale_to_area,
    stretch,
    stretch_mask,
    to_pil,
    to_png,
    to_tensor,
)
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.common.videos import encoded_video
from visual_grpo.config import Parameters, SamplerConfig, Task
from visual_grpo.evaluation.samples import generate_batches, requests
from visual_grpo.models.run_spec import resolve
from visual_grpo.rewards.build import negative_points
from visual_grpo.tracking.model_card import CARD
from visual_grpo.tracking.sync import DIGEST
from visual_grpo.training import components

if TYPE_CHECKING:
    from visual_grpo.models.model import Model

FOLDER, BASE, ADAPTERS = "visual_grpo", "base", "adapters"
SAMPLER = {"temperature": "double", "top_p": "double", "top_k": "long", "steps": "long", "guidance_scale": "double"}
"""Settings of `sampling.eval` that a request may give, with their MLflow types."""
LIMITS = {
    "max_samples": 256,  # Rows times samples.
    "max_characters": 20_000,  # Of a prompt, as in prepared data.
    "max_steps": 200,  # Denoising steps, unless the training's own are more.
    "max_images": 16,  # Source images of a row.
    "max_pixels": 178_956_970,  # Of all source images together.
}
"""The most that one request may ask for; ``model_config`` changes it where a version is loaded."""
_EXAMPLE = "a small red circle on the left"
_SEEDED_AS = "prompt"
"""The id that seeds are made of, as for ``generate.prompt``: both generate the same image at the same seed."""


def package(adapters: Path, folder: Path, *, card: str, about: Mapping[str, str], base_copy_mb: float) -> None:
    """Writes the model, with the metadata ``about``, into an empty ``folder``; raises as `_check_base` does.

    Raises UserError also if the adapters' folder has links.
    """
    require_no_links(adapters)
    facts = read_facts(adapters)
    config, model = Parameters.model_validate(facts["parameters"]), facts["model"]
    _check_base(adapters, model)
    base, lora = Path(model), config.model.lora
    with TemporaryDirectory() as place:
        inside = Path(place) / FOLDER
        shutil.copytree(adapters, inside / ADAPTERS, ignore=shutil.ignore_patterns(BEST, LAST))
        (inside / ADAPTERS / CARD).write_text(card, encoding="utf-8")
        size = sum(file.stat().st_size for file in base.rglob("*") if file.is_file())
        # Without the digest of its files, the record could name any folder of this machine.
        known = facts.get("model_content") is not None
        if base.is_dir() and known and size <= base_copy_mb * 1e6 and find_link(base) is None:
            shutil.copytree(base, inside / BASE, ignore=shutil.ignore_patterns(".*"))
        placed = {"base": str(base.resolve()) if base.is_dir() else model}
        if lora is not None:
            placed["lora"] = str(here.resolve()) if (here := Path(lora).expanduser()).is_file() else lora
        mlflow.pyfunc.save_model(
            folder,
            loader_module=__name__,
            data_path=str(inside),
            signature=_signature(config.data.task, config.sampling.eval.model_dump()),
            input_example=[_EXAMPLE] if config.data.task == "t2i" else [{"prompt": _EXAMPLE}],
            # MLflow would load the model to find them, which takes ten times as long.
            pip_requirements=_requirements(config.model.base_weights),
            model_config={"device": "auto", **placed, **LIMITS},
            metadata=dict(about),
        )
    (folder / CARD).write_text(card, encoding="utf-8")
    for name in ("uv.lock", "pyproject.toml", ".python-version"):  # MLflow's copies; a lock can name a company's hosts.
        (folder / name).unlink(missing_ok=True)


def _check_base(adapters: Path, model: str) -> None:
    """Raises UserError if the base model's folder is gone, or has other files than the adapters were trained on."""
    if not may_be_hub_id(model) and not Path(model).is_dir():
        remedy = (
            'Put it back, or name it where you load the version: load_model(..., model_config={"base": FOLDER}),'
            """ or SERVING_MODEL_CONFIG='{"base": "FOLDER"}' in the environment of "mlflow models serve"."""
        )
        raise UserError(f"The base model {model} of the adapters in {adapters} is gone. {remedy}")
    check_base(adapters, model)


def _signature(task: Task, sampler: Mapping[str, Any]) -> ModelSignature:
    """Describes requests and answers, which depend on the training's task."""
    if task == "t2i":
        inputs = Schema([ColSpec("string")])  # Without a name, so that a list of prompts is taken.
    else:
        inputs = Schema([ColSpec("string", "prompt"), ColSpec(AnyType(), "image", required=False)])
    answer = [ColSpec("string", "answer"), ColSpec("binary", "mask", required=False)]
    sample = answer if task == "segmentation" else [ColSpec("binary", "image")]
    outputs = Schema([ColSpec("string", "prompt"), ColSpec("long", "seed"), *sample])
    params = [ParamSpec("seed", "long", 0), ParamSpec("samples", "long", 1)]
    params += [ParamSpec(name, dtype, sampler[name]) for name, dtype in SAMPLER.items()]
    return ModelSignature(inputs=inputs, outputs=outputs, params=ParamSchema(params))


def _requirements(base_weights: str) -> list[str]:
    """Returns the installed versions of the needed libraries; not this package, which no index has."""
    needed = [Requirement(text) for text in metadata.requires("visual-grpo") or []]
    names = [package.name for package in needed if package.marker is None or package.marker.evaluate({"extra": ""})]
    names += [] if base_weights == "full" else ["bitsandbytes"]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in names]


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> ServedModel:
    """Called by MLflow with the folder ``data/visual_grpo`` of a version; ``base`` is where a large base model is, and
    ``lora`` the LoRA that is merged into it.

    Raises UserError if the adapters or their record are not what was packaged.
    """
    folder = Path(path)
    packaged = SavedModel.load(str(folder.parents[1])).metadata or {}
    if packaged.get(DIGEST) != adapter_digest(folder / ADAPTERS):
        raise UserError(f"The adapters in {folder} differ from what was registered: weights or record were edited.")
    model = str(folder / BASE) if (folder / BASE).is_dir() else model_config["base"]
    _check_base(folder / ADAPTERS, model)
    tree = read_facts(folder / ADAPTERS)["parameters"]
    placed = {**tree["model"], "path": model, "lora": model_config.get("lora"), "device": model_config["device"]}
    spec = resolve(Parameters.model_validate({**tree, "model": placed}))
    return ServedModel(spec.config, components.build_model(spec, folder / ADAPTERS), model_config)


class ServedModel:
    """A base model with the adapters of one training."""

    def __init__(self, config: Parameters, model: Model, limits: Mapping[str, Any] = LIMITS) -> None:
        """``limits``: some of `LIMITS`, perhaps among other entries."""
        self._config, self._model = config, model
        self._limits = {name: limits.get(name, most) for name, most in LIMITS.items()}
        self._segments = config.data.task == "segmentation"
        painter = negative_points(config.rewards) if self._segments else None
        self._negative_points: Any = painter and painter.function
        self._one_at_a_time = threading.Lock()

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Generates ``samples`` of each row. A scoring server hides the traceback of an MlflowException."""
        given = {name: value for name, value in (params or {}).items() if value is not None}
        try:
            return self._predict(model_input, given)
        except (UserError, ValidationError) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error

    def _predict(self, table: pd.DataFrame, given: dict[str, Any]) -> pd.DataFrame:
        began = time.monotonic()
        seed, samples = given.pop("seed", 0), given.pop("samples", 1)
        if samples < 1 or seed < 0:
            raise UserError(f"expected samples of at least 1 and a seed of at least 0, got {samples} and {seed}")
        self._check(
            "max_samples", len(table) * samples, f"{counted(len(table), 'row')} of {counted(samples, 'sample')}"
        )
        own = self._config.sampling.eval
        sampler = SamplerConfig.model_validate({**own.model_dump(), **given})
        if sampler.steps != own.steps:
            self._check("max_steps", sampler.steps or 0, f"{sampler.steps} steps")
        prompts = _prompts(table)
        for row, prompt in enumerate(prompts):
            self._check("max_characters", len(prompt), f"row {row}: a prompt of {len(prompt):,} characters")
        images = self._images(table)
        with TemporaryDirectory() as folder, self._one_at_a_time:
            _require_awaited(began)
            records = [
                PromptRecord(id=_SEEDED_AS, prompt=prompt, source_images=self._prepared(images[row], folder, row))
                for row, prompt in enumerate(prompts)
            ]
            asked = requests(records, samples, seed)
            batches = generate_batches(self._model, asked, sampler, self._config.evaluation.batch_size)
            drawn = chain.from_iterable(batch for _, batch in batches)
            rows = []
            for at, (one, sample) in enumerate(zip(asked, drawn, strict=True)):
                shown = self._shown(one.record, images[at // samples], sample)
                rows.append({"prompt": one.record.prompt, "seed": one.seed, **shown})
                _require_awaited(began)
        return pd.DataFrame(rows)

    def _check(self, limit: str, asked: int, what: str) -> None:
        """Raises UserError for more than a request may ask for."""
        if asked > (most := self._limits[limit]):
            raise UserError(
                f"{what}: more than {limit}={most} of a request. Ask for less at a time, or raise"
                f" model_config[{limit!r}] where the version is loaded (for a server: in SERVING_MODEL_CONFIG)"
            )

    def _images(self, table: pd.DataFrame) -> list[list[Image.Image]]:
        """The source images of each row: several, one, or none."""
        task, most = self._config.data.task, self._config.data.max_pixels
        given: list[Any] = [[]] * len(table)
        if task != "t2i" and "image" in table:
            # A table has NaN where a row has nothing.
            given = [
                list(one) if isinstance(one, (list, tuple, np.ndarray)) else [] if pd.isna(one) else [one]
                for one in table["image"]
            ]
        if task in ("i2i", "segmentation") and not all(given):
            raise UserError(f"row {given.index([])} has no image, and this model was trained for {task}")
        images: list[list[Image.Image]] = []
        pixels = 0
        for row, sources in enumerate(given):
            self._check("max_images", len(sources), f"row {row}: {len(sources)} images")
            images.append([])
            for source in sources:
                images[-1].append(read(source, row, most))
                pixels += images[-1][-1].width * images[-1][-1].height
                self._check("max_pixels", pixels, f"row {row}: {pixels:,} pixels in all images so far")
        return images

    def _prepared(self, images: Sequence[Image.Image], folder: str, row: int) -> tuple[Path, ...]:
        """Writes the images as data preparation does: stretched for a segmentation, else the first one cropped."""
        files = tuple(Path(folder, f"{row}-{number}.png") for number in range(len(images)))
        for number, (image, file) in enumerate(zip(images, files, strict=True)):
            resize = stretch if self._segments else scale_to_area if number else fit
            resize(image, self._config.data.height, self._config.data.width).save(file)
        return files

    def _shown(self, record: PromptRecord, images: Sequence[Image.Image], sample: Any) -> dict[str, Any]:
        """Returns the columns of a sample; a mask has the size of the request's image."""
        if isinstance(sample, VideoSample):
            return {"image": encoded_video(sample)}
        if not self._segments:
            return {"image": to_png(to_pil(sample))}
        mask = None
        if self._negative_points is not None:
            [mask] = self._negative_points.masks(to_tensor(read_image(record.source_images[0])), [sample])
        if mask is None:
            return {"answer": sample.text, "mask": None}
        white = Image.fromarray(mask.cpu().numpy().astype("uint8") * 255)
        return {"answer": sample.text, "mask": to_png(stretch_mask(white, images[0].height, images[0].width))}


def _prompts(table: pd.DataFrame) -> list[str]:
    """The prompt of each row; for t2i, MLflow has dropped all columns but the first, and called that of a list 0."""
    column = "prompt" if "prompt" in table else table.columns[0]
    if column not in ("prompt", 0, "0"):
        raise UserError(f"expected a list of prompts, or a table with the column prompt first, got {column!r} first")
    prompts = []
    for row, (given, missing) in enumerate(zip(table[column], table[column].isna(), strict=True)):
        prompt = given.item() if isinstance(given, np.ndarray) and given.ndim == 0 else given  # Of a JSON record.
        if missing or str(prompt) == "None":  # What MLflow makes of null in a list.
            raise UserError(f"row {row} has no prompt")
        if not isinstance(prompt, str):
            raise UserError(f"row {row}: expected one text as prompt, got {prompt!r}")
        prompts.append(prompt)
    return prompts


def _require_awaited(began: float) -> None:
    """Raises UserError once MLflow's server has answered 504: it lets the work go on, and later requests wait for it.

    ``mlflow models serve`` sets both variables.
    """
    most = MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT
    if os.environ.get("_MLFLOW_IS_IN_SERVING_ENVIRONMENT") and most.is_set() and time.monotonic() - began > most.get():
        raise UserError(f"this took longer than the server's timeout, {most.get()} s")


def read(source: str | bytes, row: int, max_pixels: int) -> Image.Image:
    """Decodes an image of a request: a file's content, as bytes or base64 text. Text is never a path on the server."""
    try:
        content = base64.b64decode("".join(source.split()), validate=True) if isinstance(source, str) else source
        width, height = read_size(io.BytesIO(content))
        if width * height > max_pixels:
            raise UserError(f"{width} x {height} pixels are more than data.max_pixels ({max_pixels}) of the training")
        return read_image(io.BytesIO(content))
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"row {row}: image is not the content of a file, as bytes or base64 text: {error}") from error
