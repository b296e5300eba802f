"""Parameters of the records: the user's own, or those that the starter renders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from visual_grpo.common.digests import plain_dataset
from visual_grpo.config.base import REACHES, BuiltIn, NotEmpty, Share, Side, Strict, Task, Words
from visual_grpo.config.decides import Decides

Limit = Annotated[float, Field(ge=0, le=1)]
HUB = "hf://datasets/"
"""The beginning of the path of a dataset on the Hugging Face hub."""


class ColumnsConfig(Strict):
    """Columns of a table by hand; those that are not given are recognised by their usual names."""

    prompt: Words | None = Field(None, description="column of the prompt, the instruction or the query")
    source: list[Words] = Field([], description="column, or columns, of the image to edit or asked about")
    target: Words | None = Field(None, description="column of the target image or, of a query, the mask")
    ignored: list[Words] = Field([], description="columns that are not used")

    @field_validator("source", "ignored", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def named(self) -> list[str]:
        """Returns the columns of prompt, sources and target."""
        return [name for name in (self.prompt, *self.source, self.target) if name is not None]


class DataConfig(Strict, decides=Decides.CONTENT):
    """Place and preparation of the records."""

    path: NotEmpty = Field(
        description="folder, zip or file with records, or hf://datasets/OWNER/NAME; null = the starter makes it"
    )
    layout: Literal[
        "auto", "records", "prompts", "image_folder", "captions", "table", "coco_captions", "coco", "masks"
    ] = Field("auto", description="how path is read; auto = the first that fits")
    columns: ColumnsConfig = ColumnsConfig()
    split: Words | None = Field(
        None,
        description="split to train on, as a file, a folder or the column split names it; null = train, or the only"
        " one; all = every one",
    )
    held_out_split: Words | None = Field(
        None, description="split to hold out instead of held_out_share; its prompts and pictures never train"
    )
    revision: str | None = Field(None, description="branch, tag or commit of the hub dataset at path; null = main")
    config: Words | None = Field(
        None, description="configuration of the hub dataset at path, if it has several, such as one per language"
    )
    task: Annotated[Task, Decides.SAMPLES] = Field(
        "t2i",
        description="t2i: prompts; i2i: edits of source images; mixed: both; segmentation: a query about one source"
        " image, and its mask as the target",
    )
    mask_value: int | None = Field(
        None, ge=0, description="value of the object in masks of class numbers; a record's own mask_value comes first"
    )
    height: Annotated[Side, Decides.SAMPLES]
    width: Annotated[Side, Decides.SAMPLES]
    frames: Annotated[int | None, Decides.SAMPLES] = Field(
        None, ge=1, description="frames of a video, for a model that generates videos; null = images"
    )
    fps: Annotated[float, Decides.SAMPLES] = Field(16.0, gt=0, description="frames per second of a video")
    eval_share: Share = Field(0.1, description="share of records set aside for evaluation; their prompts may train")
    held_out_share: Share = Field(
        0.2, description="share of prompts that never occur in training; 0 = none, and no gain is judged"
    )
    sealed_share: Share = Field(
        0.0, description="share of prompts kept for the promotion gate alone: neither trained on nor held out"
    )
    strict: bool = Field(False, description="stop at the first rejected record instead of reporting it")
    allow_outside: Annotated[bool, REACHES] = Field(
        False, description="accept files outside the data's folder; only for records that you trust"
    )
    max_pixels: Annotated[int, Decides.NOTHING] = Field(
        178_956_970, ge=1024, description="pixels of an image; the default is Pillow's limit"
    )
    max_file_mb: Annotated[float, Decides.NOTHING] = Field(
        1000, gt=0, description="MB (10^6 bytes) of an image file, or of a record in a tar"
    )
    max_zip_ratio: Annotated[float, Decides.NOTHING] = Field(
        100, ge=1, description="times its own size that a zip may unpack to, if that is more than 100 MB"
    )
    max_zip_files: Annotated[int, Decides.NOTHING] = Field(10_000_000, ge=1, description="files in a zip")

    _parameter: str = PrivateAttr("data.path")

    @property
    def parameter(self) -> str:
        """The name of the parameter that ``path`` is the value of, for messages."""
        return self._parameter

    def at(self, path: str, parameter: str) -> Self:
        """Returns the same settings for the records at ``path``, the value of ``parameter``."""
        copy = self.model_copy(update={"path": path})
        copy._parameter = parameter
        return copy

    @field_validator("path")
    @classmethod
    def _without_its_address(cls, path: str) -> str:
        return plain_dataset(path)

    def unread(self) -> Iterator[str]:
        """Yields a sentence for each parameter that is given and that nothing reads.

        The validation takes them: earlier trainings may have some in their provenance.
        """
        of_hub, why = self.path.startswith(HUB), f"it is for a dataset of the hub, and path does not begin with {HUB}"
        for name, is_read, reason in (
            ("mask_value", self.task == "segmentation", f"it is for masks, and task is {self.task}"),
            ("fps", self.frames is not None, "it is for videos, and frames is null"),
            ("revision", of_hub, why),
            ("config", of_hub, why),
        ):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and not is_read:
                back = "null" if default is None else f"{default:g}"
                yield f"data.{name} is {value}, which nothing reads: {reason}. Leave it out, or set it to {back}."

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        shares = (self.eval_share, self.held_out_share, self.sealed_share)
        if sum(shares) >= 1:
            got = " + ".join(map(str, shares))
            raise ValueError(f"eval_share + held_out_share + sealed_share must be below 1, got {got}")
        return self


class StarterConfig(Strict, decides=Decides.NOTHING):  # The digests of data and model stand for it.
    """The dataset and the small model that are made on the spot where ``data.path`` and ``model.path`` are null."""

    world: BuiltIn = Field(description="what is rendered and learnt: shapes, or package.module:WORLD (examples/)")
    dataset: NotEmpty = Field(description="folder of the dataset; null = OUTPUT/01_raw/WORLD")
    model: NotEmpty = Field(description="folder of the model; null = OUTPUT/06_models/base")
    records_per_prompt: int = Field(ge=1, description="records of each of the world's prompts")
    vae_steps: int = Field(ge=1, description="optimiser steps of the VAE in each attempt")
    dit_steps: int = Field(ge=1, description="optimiser steps of the DiT")
    ar_steps: int = Field(ge=1, description="optimiser steps for each kind of record: mixed takes twice as many")
    vl_steps: int = Field(1000, ge=1, description="optimiser steps of the vision-language model")
    pretrain: bool = Field(False, description="pretrain the model even if it is there or comes with the package")
    processes: int = Field(
        2, ge=1, le=2, description="parts of the pretraining (at most 2) that run in parallel, one core each"
    )


class DataChecks(Strict):
    """Limits for new data, compared with the data of an earlier training before a training starts.

    A share or distance of 1 is never exceeded; see docs/own_data.md.
    """

    min_records: int = Field(20, ge=1, description="fewest usable records")
    max_rejected: Limit = Field(0.1, description="largest share of rejected records among those that were found")
    max_fewer_records: Limit = Field(0.3, description="largest share by which the usable records may have decreased")
    max_lost_prompts: Limit = Field(0.3, description="largest share of the earlier prompts that may be missing")
    max_kind_drift: Limit = Field(0.3, description="Kolmogorov-Smirnov distance of the numbers of sources and targets")
    max_prompt_drift: Limit = Field(
        0.3, description="Kolmogorov-Smirnov distance of each of lengths and shares of Latin letters and vowels"
    )
    max_image_drift: Limit = Field(
        0.3, description="Kolmogorov-Smirnov distance of each of size, aspect, brightness, contrast, colours, sharpness"
    )
