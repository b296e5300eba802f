"""The node that generates samples of prompts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from textwrap import shorten
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.adapter_folder import LATEST
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.types import PromptRecord, Sample, TextSample
from visual_grpo.config import DataConfig, Parameters
from visual_grpo.config.pipelines import GenerateConfig
from visual_grpo.data.preparation import ad_hoc_records
from visual_grpo.data.tabular import LISTED
from visual_grpo.evaluation.pictures import Painter, beside, caption, grid, of_sample, save, suffix_of
from visual_grpo.evaluation.samples import Request, generate_batches, requests
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.rewards.build import negative_points
from visual_grpo.starter.worlds import find_world
from visual_grpo.tracking.adapter_lookup import adapters_or_base
from visual_grpo.training import components


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                generate_for_prompts,
                ["params:run_spec", "path:adapters", "path:generated", "draft"],
                "generated",
                name="generate_for_prompts",
            )
        ],
        tags=["apart", "model", "unscored", "parameters_of.adapter"],
    )


_SOURCES = "sources"
"""Folder for copies of the sources, since the prepared ones of ``generate.prompts`` are deleted after the run."""
_SHEET_COLUMNS, _SHEET_MOST = 5, 100
_LONGEST_LIST = 200
"""Characters of the list of unknown words."""
_NEEDS = {"i2i": "an edit needs an image to edit", "segmentation": "a query is about an image"}


def generate_for_prompts(spec: RunSpec, latest: Path, present: Path, draft: Path) -> Path:
    """Writes a picture of each sample, a list of them, and a contact sheet, which will replace ``present``."""
    parameters, settings = spec.config, spec.config.generate
    with _prompts(settings, parameters.data) as records:
        adapters = adapters_or_base(parameters.adapter, latest)
        _show_replaced(present, parameters.adapter, adapters)
        _show_unknown_words(parameters, records)
        painter = negative_points(parameters.rewards)
        model = components.build_generator(spec, adapters, settings.sampler)
        sampler = spec.sampler(settings.sampler)
        asked = requests(records, settings.samples, settings.seed)
        generated: list[tuple[Request, Sample]] = []
        with console.progress("Generating samples", len(asked)) as bar:
            for batch, samples in generate_batches(model, asked, sampler, parameters.evaluation.batch_size):
                generated += zip(batch, samples, strict=True)
                bar.advance(len(batch))
        _write(draft, generated, painter, settings.samples)
    with_what = "without an adapter" if adapters is None else f"with the adapter {parameters.adapter}"
    console.note(f"Generated {counted(len(generated), 'picture')} for {counted(len(records), 'prompt')} {with_what}.")
    return draft


def _show_replaced(folder: Path, name: str, adapters: Path | None) -> None:
    """Says which pictures will be replaced, and what keeps them."""
    if not (folder / LISTED).is_file():
        return
    count = len((folder / LISTED).read_bytes().splitlines())  # Of bytes: texts split at U+2028, too.
    adapter = name if adapters is None or name != LATEST else adapters
    console.note(
        f"This replaces {counted(count, 'earlier picture')} in {folder}. To keep them, name a different folder for the"
        f" new ones: output=FOLDER,adapter={adapter}"
    )


def _show_unknown_words(parameters: Parameters, records: Sequence[PromptRecord]) -> None:
    """Names the words that the small model was not pretrained on."""
    world = find_world(parameters.starter.world)
    if not parameters.model_is_pretrained or world.texts is None:
        return
    known = _words(resolve_name(world.texts)(parameters.data.task))
    if unknown := [word for word in _words(record.prompt for record in records) if word not in known]:
        console.note(
            f"Warning: the small base model was pretrained on rendered {world.name} and nothing else. It does not know:"
            f" {shorten(', '.join(unknown), _LONGEST_LIST, placeholder=' ...')}"
        )


def _words(texts: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text))


@contextmanager
def _prompts(settings: GenerateConfig, data: DataConfig) -> Iterator[Sequence[PromptRecord]]:
    if (settings.prompt is None) == (settings.prompts is None):
        raise UserError(
            "generate needs either one prompt or a file of prompts:\n"
            "  --params='generate.prompt=a small red circle on the left'\n"
            "  --params=generate.prompts=prompts.txt"
        )
    if settings.prompts is None:
        if (need := _NEEDS.get(data.task)) is not None:
            raise UserError(
                f"generate.prompt is a text alone, and data.task is {data.task}: {need}. Give the records with their"
                " images instead, as data.path has them: generate.prompts=FOLDER"
            )
        yield [PromptRecord(id="prompt", prompt=str(settings.prompt))]
        return

    with ad_hoc_records(settings.prompts, data, "generate.prompts") as records:
        yield records


def _write(folder: Path, generated: Sequence[tuple[Request, Sample]], painter: Painter, each: int) -> None:
    digits = len(str(len(generated)))
    rows: list[dict[str, Any]] = []
    pictures = []
    for number, (request, sample) in enumerate(generated, start=1):
        file = f"{number:0{digits}d}{suffix_of(sample)}"
        save(request.record, sample, painter, folder / file)
        pictures.append(of_sample(request.record, sample, painter))
        row = {"file_name": file, "text": request.record.prompt, "seed": request.seed, "record": request.record.id}
        if isinstance(sample, TextSample):
            row["answer"] = sample.text  # Its picture shows the source.
        elif request.record.source_images:
            row["source_images"] = [_copied(source, folder) for source in request.record.source_images]
        rows.append(row)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / LISTED).write_text(lines, encoding="utf-8")
    captions = [caption(str(row["text"]), str(row["file_name"]), LISTED) for row in rows]
    columns = each * max(1, _SHEET_COLUMNS // each)  # The samples of a prompt are in one row.
    sources = [beside(request.record, sample) for request, sample in generated]
    most = slice(_SHEET_MOST)
    sheet = grid(pictures[most], captions[most], min(columns, len(pictures)), sources[most])
    sheet.save(folder / "contact_sheet.png")


def _copied(source: Path, folder: Path) -> str:
    """Copies a prepared source, whose name is unique, and returns its path relative to ``folder``."""
    (folder / _SOURCES).mkdir(exist_ok=True)
    shutil.copyfile(source, folder / _SOURCES / source.name)
    return f"{_SOURCES}/{source.name}"
