"""The node that draws prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import new_folder
from visual_grpo.common.types import PromptRecord, Sample, TextSample
from visual_grpo.config import Parameters
from visual_grpo.data.preparation import ad_hoc_records
from visual_grpo.evaluation.pictures import caption, grid, of_sample
from visual_grpo.evaluation.samples import Request, generate_batches, requests
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.adapter_lookup import adapters_of, model_of
from visual_grpo.training import components


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(draw_prompts, ["parameters"], "generated", name="draw_prompts"),
        ],
        namespace="generate",
        prefix_datasets_with_namespace=False,
        tags=["apart", "model", "judges.adapter"],
    )


LISTED = "metadata.jsonl"
"""File, prompt and seed of each picture: an image folder, so that score reads it."""
_SHEET_COLUMNS, _SHEET_MOST = 5, 100


def draw_prompts(parameters: Parameters) -> Path:
    """Writes a picture of each sample, a list of them, and a contact sheet."""
    settings = parameters.generate
    with _prompts(parameters) as records:
        adapters = adapters_of(parameters)
        model_path = model_of(parameters, adapters)
        scorer = components.build_scorer(parameters, components.make_run_spec(parameters, model_path).modules)
        model = components.build_model(parameters, model_path, adapters)
        sampler = getattr(parameters.sampling, settings.sampler)
        asked = requests(records, settings.samples, settings.seed)
        drawn: list[tuple[Request, Sample]] = []
        with console.progress("Drawing", len(asked)) as bar:
            for batch, samples in generate_batches(model, asked, sampler, parameters.evaluation.batch_size):
                drawn += zip(batch, samples, strict=True)
                bar.advance(len(batch))
        folder = new_folder(Path(parameters.output) / "07_model_output/generated")
        _write(folder, drawn, scorer, settings.samples)
    with_what = "without an adapter" if adapters is None else f"with the adapter {parameters.adapter}"
    console.note(f"Drew {counted(len(drawn), 'picture')} of {counted(len(records), 'prompt')} {with_what}.")
    return folder


@contextmanager
def _prompts(parameters: Parameters) -> Iterator[Sequence[PromptRecord]]:
    settings = parameters.generate
    if (settings.prompt is None) == (settings.prompts is None):
        raise UserError(
            "generate needs either one prompt or a file of prompts:\n"
            "  --params='generate.prompt=a small red circle on the left'\n"
            "  --params=generate.prompts=prompts.txt"
        )
    if settings.prompts is None:
        yield [PromptRecord(id="prompt", prompt=str(settings.prompt))]
        return

    with ad_hoc_records(settings.prompts, parameters.data, "generate.prompts") as records:
        yield records


def _write(folder: Path, drawn: Sequence[tuple[Request, Sample]], judge: RewardSet, each: int) -> None:
    digits = len(str(len(drawn)))
    rows, pictures = [], []
    for number, (request, sample) in enumerate(drawn, start=1):
        file = f"{number:0{digits}d}.png"
        pictures.append(of_sample(request.record, sample, judge))
        pictures[-1].save(folder / file)
        answer = {"answer": sample.text} if isinstance(sample, TextSample) else {}
        rows.append({"file_name": file, "text": request.record.prompt, "seed": request.seed, **answer})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / LISTED).write_text(lines, encoding="utf-8")
    captions = [caption(str(row["text"]), str(row["file_name"]), LISTED) for row in rows]
    columns = each * max(1, _SHEET_COLUMNS // each)  # The samples of a prompt are in one row.
    sheet = grid(pictures[:_SHEET_MOST], captions[:_SHEET_MOST], columns=min(columns, len(pictures)))
    sheet.save(folder / "contact_sheet.png")
