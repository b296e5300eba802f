"""A version of the registered model as MLflow loads and serves it (a pyfunc; `packaging` writes what it reads).

``mlflow.pyfunc.load_model("models:/visual_grpo@champion").predict(["a small red circle"])`` gives a table with a row a
sample. Images and masks in it are the bytes of PNG files, because these serve both uses: in Python
``Image.open(io.BytesIO(table.image[0]))`` or ``Path("circle.png").write_bytes(table.image[0])``, and a scoring server
(``mlflow models serve``) writes bytes as base64 by itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
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
from visual_grpo.images import fit, read_image, stretch, stretch_mask, to_pil, to_tensor
from visual_grpo.saved_model import content_digest, may_be_hub_id
from visual_grpo.tracking.packaging import ADAPTERS, BASE, DEVICE, SERVED
from visual_grpo.tracking.served_image import listed, png, read
from visual_grpo.trained_adapters import read_facts
from visual_grpo.types import PromptRecord, TextSample

if TYPE_CHECKING:
    from visual_grpo.policies.family import Model
    from visual_grpo.rewards.negative_points import NegativePointsReward
    from visual_grpo.types import Sample

_SEEDED_AS = "prompt"
"""The id that seeds are made of: that of ``generate.prompt``, so that both draw the same image at the same seed."""


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> ServedModel:
    """Called by MLflow with the folder ``data/visual_grpo`` of a version, and what ``model_config`` says."""
    folder = Path(path)
    facts = read_facts(folder / ADAPTERS)
    model = _base(folder, json.loads((folder / SERVED).read_text(encoding="utf-8")))
    tree = pinned(facts["parameters"])
    device = (model_config or {}).get(DEVICE, "auto")
    config = Parameters.model_validate({**tree, "model": {**tree["model"], "path": model, "device": device}})
    return ServedModel(config, components.build_model(config, model, folder / ADAPTERS))


class ServedModel:
    """A base model with the adapters of one training."""

    def __init__(self, config: Parameters, model: Model) -> None:
        self._config, self._model = config, model
        self._segments = config.data.task == "segmentation"
        self._judge = _negative_points(config) if self._segments else None
        self._one_at_a_time = threading.Lock()

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Draws samples, in the order of the rows.

        Args:
            model_input: text to image: one column of prompts. Other tasks: ``prompt`` and ``image``, the content of an
                image file: bytes, or text in base64, also as a ``data:`` URL; in Python also a ``pathlib.Path`` or a
                Pillow image. Text is never read as a path, so that no request makes a server open its files. Of an
                edit with several source images a list of these.
            params: ``seed`` (0), ``samples`` of each row (1), and settings of the sampler (those of ``sampling.stock``
                in the training): ``steps`` and ``guidance_scale``, ``temperature``, ``top_p`` and ``top_k``.

        Returns:
            A row a sample: ``prompt``, ``seed`` (that of the sample) and ``image``; of segmentation ``answer`` (text)
            and ``mask`` (white = the object, at the image's size; None where the answer names none). Images are PNG
            files as bytes.

        Raises:
            MlflowException: a parameter or an image that cannot be used. A scoring server answers with its message; of
                any other error it would show the traceback to whoever asks.
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
                PromptRecord(
                    id=str(row), prompt=prompt, source_images=self._prepared(sources, Path(folder) / str(row), row)
                )
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
        sources = [listed(image) for image in images]
        if self._config.data.task != "mixed" and not all(sources):
            row = sources.index([])
            raise UserError(f"row {row} has no image, and this model was trained for {self._config.data.task}")
        return [str(prompt) for prompt in table["prompt"]], sources

    def _prepared(self, sources: Sequence[Any], folder: Path, row: int) -> tuple[Path, ...]:
        """The images as data preparation stores them: stretched for a query about one, else cropped."""
        if not sources:
            return ()
        folder.mkdir()
        height, width = self._config.data.height, self._config.data.width
        files = []
        for number, source in enumerate(sources):
            files.append(folder / f"{number}.png")
            image = read(source, row, self._config.data.max_pixels)
            (stretch if self._segments else fit)(image, height, width).save(files[-1])
        return tuple(files)

    def _draw(self, asked: Sequence[tuple[PromptRecord, int]], sampler: SamplerConfig) -> list[Sample]:
        size = self._config.evaluation.batch_size
        drawn: list[Sample] = []
        # A batch has records with equally many images.
        for _, same in groupby(asked, lambda pair: len(pair[0].source_images)):
            pairs = list(same)
            for start in range(0, len(pairs), size):
                batch = pairs[start : start + size]
                drawn += self._model.generate([record for record, _ in batch], [seed for _, seed in batch], sampler)
        return drawn

    def _shown(
        self, records: Sequence[PromptRecord], images: Sequence[Sequence[Any]], drawn: Sequence[Sample]
    ) -> list[dict[str, Any]]:
        """The columns of each sample."""
        if not self._segments:
            return [{"image": png(to_pil(sample))} for sample in drawn]
        masks: list[bytes | None] = []
        for record, pairs in groupby(zip(records, drawn, strict=True), lambda pair: pair[0]):
            masks += self._masks(record, [answer for _, answer in pairs], images[int(record.id)][0])
        return [{"answer": answer.text, "mask": mask} for answer, mask in zip(drawn, masks, strict=True)]

    def _masks(self, record: PromptRecord, answers: Sequence[TextSample], source: Any) -> list[bytes | None]:
        """Those of the answers to one query, at the size of the image that was given."""
        if self._judge is None:
            return [None] * len(answers)
        from PIL import Image

        width, height = read(source, int(record.id), self._config.data.max_pixels).size
        found = self._judge.masks(to_tensor(read_image(record.source_images[0])), answers)
        whites = [None if mask is None else Image.fromarray(mask.cpu().numpy().astype("uint8") * 255) for mask in found]
        return [None if white is None else png(stretch_mask(white, height, width)) for white in whites]


def _base(folder: Path, served: Mapping[str, Any]) -> str:
    """Where the base model is.

    Raises:
        UserError: it was too large for the version, and is gone or not the same any more.
    """
    if served["copied"]:
        return str(folder / BASE)
    model: str = served["base"]
    if served["content"] is None and may_be_hub_id(model):
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
    """As the training's stock sampler, with what the request gives."""
    set_here = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplerConfig.model_validate({**stock.model_dump(), **set_here})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"the parameters of this request cannot be used: {problems}") from error
