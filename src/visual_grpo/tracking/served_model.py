"""Adapters as an MLflow model (pyfunc) that loads and serves without the project's folder.

``mlflow.diffusers`` keeps one LoRA of one pipeline; GLM-Image has two adapters in two formats, and Qwen2.5-VL is no
pipeline. So `package` writes a model that MLflow loads by this module's name, with nothing pickled::

    MLmodel, requirements.txt, README.md      signature, versions of the libraries, the card
    data/visual_grpo/adapters/                the folder that the training left, without ``best`` and ``last``
    data/visual_grpo/base/                    the base model, where it is small enough
    data/visual_grpo/served.json              where it is otherwise, and the digest of its content
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ValidationError

from visual_grpo import components
from visual_grpo.config import Parameters, SamplerConfig
from visual_grpo.config.presets import pinned
from visual_grpo.errors import UserError
from visual_grpo.evaluation.generate import image_seed
from visual_grpo.images import fit, read_image, read_size, stretch, stretch_mask, to_pil, to_tensor
from visual_grpo.model_card import CARD
from visual_grpo.saved_model import content_digest, may_be_hub_id
from visual_grpo.trained_adapters import BEST, HELD_OUT, LAST, check_base, read_facts
from visual_grpo.types import PromptRecord, TextSample

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from PIL import Image

    from visual_grpo.policies.family import Model
    from visual_grpo.rewards.negative_points import NegativePointsReward
    from visual_grpo.types import Sample

FOLDER, SERVED, BASE, ADAPTERS = "visual_grpo", "served.json", "base", "adapters"
DEVICE = "device"
"""The one setting that loading takes: ``load_model(uri, model_config={"device": "cpu"})``."""
SAMPLER = {
    "tokens": {"temperature": "double", "top_p": "double", "top_k": "long"},
    "flow": {"steps": "long", "guidance_scale": "double"},
}
"""Kind of module -> the settings of its sampler that a request may give, with their MLflow types."""
_SEEDED_AS = "prompt"
"""The id that seeds are made of: that of ``generate.prompt``, so that both draw the same image at the same seed."""


def package(adapters: Path, folder: Path, *, card: str, about: Mapping[str, str], base_copy_mb: float) -> None:
    """Writes the model, with the metadata ``about``, into ``folder``, which is empty.

    Raises:
        UserError: the base model is gone, or is not the one that the adapters were trained on.
    """
    import mlflow

    facts = read_facts(adapters)
    config, model = Parameters.model_validate(facts["parameters"]), facts["model"]
    base = _describe_base(adapters, model, config, base_copy_mb)
    with TemporaryDirectory() as place:
        inside = Path(place) / FOLDER
        shutil.copytree(adapters, inside / ADAPTERS, ignore=shutil.ignore_patterns(BEST, LAST))
        (inside / ADAPTERS / CARD).write_text(card, encoding="utf-8")
        if base["copied"]:
            shutil.copytree(model, inside / BASE, ignore=shutil.ignore_patterns(".*"))
        (inside / SERVED).write_text(json.dumps(base, indent=1), encoding="utf-8")
        mlflow.pyfunc.save_model(
            folder,
            loader_module=__name__,
            data_path=str(inside),
            signature=_signature(config, model),
            input_example=_example(adapters, config),
            pip_requirements=_requirements(
                config
            ),  # MLflow would find them by loading the model, in ten times as long.
            model_config={DEVICE: "auto"},
            metadata=dict(about),
        )
    (folder / CARD).write_text(card, encoding="utf-8")
    for name in ("uv.lock", "pyproject.toml", ".python-version"):  # MLflow's copies; a lock can name a company's hosts.
        (folder / name).unlink(missing_ok=True)


def _describe_base(adapters: Path, model: str, config: Parameters, base_copy_mb: float) -> dict[str, Any]:
    """The base model's place, its digest, and whether it is copied."""
    folder = Path(model)
    if may_be_hub_id(model):
        return {"base": model, "content": None, "copied": False, "revision": config.model.revision}
    if not folder.is_dir():
        raise UserError(f"The base model {model} of the adapters in {adapters} is gone. Put it back.")
    content = content_digest(folder)
    check_base(adapters, model, content)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"base": str(folder.resolve()), "content": content, "copied": size <= base_copy_mb * 1e6, "bytes": size}


def _signature(config: Parameters, model: str) -> ModelSignature:
    """A request and its answer, by the task of the training and the modules of its model."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import AnyType

    task, stock = config.data.task, config.sampling.stock.model_dump()
    if task == "t2i":
        inputs = Schema([ColSpec("string")])  # Without a name, so that a list of prompts is taken.
    else:
        inputs = Schema([ColSpec("string", "prompt"), ColSpec(AnyType(), "image", required=False)])
    answer = [ColSpec("string", "answer"), ColSpec("binary", "mask", required=False)]
    sample = answer if task == "segmentation" else [ColSpec("binary", "image")]
    outputs = Schema([ColSpec("string", "prompt"), ColSpec("long", "seed"), *sample])
    params = [ParamSpec("seed", "long", 0), ParamSpec("samples", "long", 1)]
    kinds = components.family_of(config, model).kinds()
    for kind, settings in SAMPLER.items():
        params += [ParamSpec(name, dtype, stock[name]) for name, dtype in settings.items() if kind in kinds]
    return ModelSignature(inputs=inputs, outputs=outputs, params=ParamSchema(params))


def _example(adapters: Path, config: Parameters) -> list[Any]:
    """A prompt that the training never saw, where it says which these are; with a grey image, if one is needed."""
    file = adapters / HELD_OUT
    held_out: list[str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    prompt = (held_out or ["a small red circle on the left"])[0]
    if config.data.task == "t2i":
        return [prompt]
    from PIL import Image

    grey = _png(Image.new("RGB", (config.data.width, config.data.height), "grey"))
    return [{"prompt": prompt, "image": base64.b64encode(grey).decode()}]


def _requirements(config: Parameters) -> list[str]:
    """The installed versions of the libraries that the model needs; not this package itself, which is on no index."""
    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in metadata.requires("visual-grpo") or []]
    names = [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    names += [] if config.model.base_weights == "full" else ["bitsandbytes"]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in names]


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> ServedModel:
    """Called by MLflow with the folder ``data/visual_grpo`` of a version."""
    folder = Path(path)
    facts = read_facts(folder / ADAPTERS)
    model = _find_base(folder, json.loads((folder / SERVED).read_text(encoding="utf-8")))
    tree = pinned(facts["parameters"])
    device = (model_config or {}).get(DEVICE, "auto")
    config = Parameters.model_validate({**tree, "model": {**tree["model"], "path": model, "device": device}})
    return ServedModel(config, components.build_model(config, model, folder / ADAPTERS))


def _find_base(folder: Path, served: Mapping[str, Any]) -> str:
    """The base model's folder or id. Raises UserError if it was not copied, and is gone or changed."""
    model: str = served["base"]
    if served["copied"]:
        return str(folder / BASE)
    if served["content"] is None:
        return model
    if not Path(model).is_dir():
        raise UserError(
            f"The base model {model} is gone. It has {served['bytes'] / 1e6:.0f} MB, which is more than was copied into"
            " this version (promotion.base_copy_mb); the version has only its place. Put it back there."
        )
    if content_digest(model) != served["content"]:
        raise UserError(
            f"The base model {model} is not the one that the adapters were trained on: a file was changed, added or"
            " removed. Put the files back as they were."
        )
    return model


class ServedModel:
    """A base model with the adapters of one training."""

    def __init__(self, config: Parameters, model: Model) -> None:
        self._config, self._model = config, model
        self._segments = config.data.task == "segmentation"
        self._judge = _negative_points(config) if self._segments else None
        self._one_at_a_time = threading.Lock()

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Draws ``samples`` of each row, in the order of the rows; docs/use_adapters.md lists all columns.

        Raises:
            MlflowException: a parameter or an image that cannot be used. A scoring server shows no traceback of it.
        """
        from mlflow.exceptions import MlflowException

        try:
            return self._predict(model_input, dict(params or {}))
        except UserError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error

    def _predict(self, model_input: pd.DataFrame, given: dict[str, Any]) -> pd.DataFrame:
        seed, samples = given.pop("seed", 0), given.pop("samples", 1)
        if samples < 1 or seed < 0:
            raise UserError(f"expected samples of at least 1 and a seed of at least 0, got {samples} and {seed}")
        sampler = _sampler(self._config.sampling.stock, given)
        prompts, images = self._columns(model_input)
        with TemporaryDirectory() as folder, self._one_at_a_time:
            records = [
                PromptRecord(id=str(row), prompt=prompt, source_images=self._prepared(sources, Path(folder), row))
                for row, (prompt, sources) in enumerate(zip(prompts, images, strict=True))
            ]
            asked = [(record, image_seed(seed, _SEEDED_AS, index)) for record in records for index in range(samples)]
            drawn = self._draw(asked, sampler)
            shown = self._shown([record for record, _ in asked], images, drawn)
        rows = zip(asked, shown, strict=True)
        return pd.DataFrame([{"prompt": record.prompt, "seed": seed, **columns} for (record, seed), columns in rows])

    def _columns(self, table: pd.DataFrame) -> tuple[list[str], list[list[Any]]]:
        """The prompts, and the source images of each."""
        if self._config.data.task == "t2i":
            return [str(prompt) for prompt in table.iloc[:, 0]], [[] for _ in range(len(table))]
        images = table["image"] if "image" in table else [None] * len(table)
        sources = [_listed(image) for image in images]
        if self._config.data.task != "mixed" and not all(sources):
            row = sources.index([])
            raise UserError(f"row {row} has no image, and this model was trained for {self._config.data.task}")
        return [str(prompt) for prompt in table["prompt"]], sources

    def _prepared(self, sources: Sequence[Any], folder: Path, row: int) -> tuple[Path, ...]:
        """The images as data preparation stores them: stretched for a query about one, else cropped."""
        size = self._config.data.height, self._config.data.width
        files = [folder / f"{row}-{number}.png" for number in range(len(sources))]
        for source, file in zip(sources, files, strict=True):
            image = read(source, row, self._config.data.max_pixels)
            (stretch if self._segments else fit)(image, *size).save(file)
        return tuple(files)

    def _draw(self, asked: Sequence[tuple[PromptRecord, int]], sampler: SamplerConfig) -> list[Sample]:
        size = self._config.evaluation.batch_size
        drawn: list[Sample] = []
        # A batch has records with equally many images.
        for _, same in groupby(asked, lambda pair: len(pair[0].source_images)):
            pairs = list(same)
            for start in range(0, len(pairs), size):
                records, seeds = zip(*pairs[start : start + size], strict=True)
                drawn += self._model.generate(records, seeds, sampler)
        return drawn

    def _shown(
        self, records: Sequence[PromptRecord], images: Sequence[Sequence[Any]], drawn: Sequence[Sample]
    ) -> list[dict[str, Any]]:
        """The columns of each sample."""
        if not self._segments:
            return [{"image": _png(to_pil(sample))} for sample in drawn]
        shown: list[dict[str, Any]] = []
        for record, pairs in groupby(zip(records, drawn, strict=True), lambda pair: pair[0]):
            answers: list[TextSample] = [answer for _, answer in pairs]
            masks = self._masks(record, answers, images[int(record.id)][0])
            shown += [{"answer": one.text, "mask": mask} for one, mask in zip(answers, masks, strict=True)]
        return shown

    def _masks(self, record: PromptRecord, answers: Sequence[TextSample], source: Any) -> list[bytes | None]:
        """The masks of the answers to one query, at the size of the image that was given."""
        if self._judge is None:
            return [None] * len(answers)
        from PIL import Image

        width, height = read(source, int(record.id), self._config.data.max_pixels).size
        found = self._judge.masks(to_tensor(read_image(record.source_images[0])), answers)
        whites = [None if mask is None else Image.fromarray(mask.cpu().numpy().astype("uint8") * 255) for mask in found]
        return [None if white is None else _png(stretch_mask(white, height, width)) for white in whites]


def _negative_points(config: Parameters) -> NegativePointsReward | None:
    """The reward whose segmenter makes masks of answers; None where the training had another one."""
    from visual_grpo.rewards.catalogue import BUILT_IN, build_reward
    from visual_grpo.rewards.negative_points import NegativePointsReward

    own = BUILT_IN["negative_points"]
    for name, reward in config.rewards.items():
        if (reward.function or BUILT_IN.get(name)) == own:
            function = build_reward(name, reward).function
            assert isinstance(function, NegativePointsReward)
            return function
    return None


def _sampler(stock: SamplerConfig, given: Mapping[str, Any]) -> SamplerConfig:
    """The training's stock sampler with what the request gives."""
    set_here = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplerConfig.model_validate({**stock.model_dump(), **set_here})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"the parameters of this request cannot be used: {problems}") from error


def _listed(image: Any) -> list[Any]:
    """The images of a row: several, one, or none."""
    if isinstance(image, (list, tuple)):
        return list(image)
    # A table has NaN where a row has nothing.
    return [] if image is None or (isinstance(image, float) and pd.isna(image)) else [image]


def read(source: Any, row: int, max_pixels: int) -> Image.Image:
    """An image of a request: a file's content as bytes or base64 text (also a ``data:`` URL), a `Path`, a Pillow image.

    Text is never a path, so that no request makes a server open its files.

    Raises:
        UserError: it is none, damaged, or has too many pixels to be decoded.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, str):
        text = source.partition(",")[2] if source.startswith("data:") else source
        try:
            source = base64.b64decode("".join(text.split()), validate=True)
        except ValueError as error:
            raise UserError(
                f"row {row}: image is a text that is no base64: {text[:40]!r}; for a file give pathlib.Path(...)"
            ) from error
    if not isinstance(source, (bytes, Path)):
        raise UserError(f"row {row}: image is {type(source).__name__}; expected bytes, text in base64, or pathlib.Path")
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        width, height = read_size(file)
        if width * height > max_pixels:
            raise UserError(f"{width} x {height} pixels are more than data.max_pixels ({max_pixels}) of the training")
        return read_image(file)
    except UserError as error:
        raise UserError(f"row {row}: {error}") from error


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
