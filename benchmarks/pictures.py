"""Makes the pictures of the README and of the gallery from what a run left:

    python benchmarks/pictures.py film data docs/film.webp
    python benchmarks/pictures.py pairs data/text docs/gallery/words.webp

``film`` shows the fixed held-out prompts of the training, from the base model to the last step; ``pairs`` the first and
the last held-out prompt, before and after training. Neither looks at the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from visual_grpo.common.images import read_image
from visual_grpo.config.adapter_folder import read_facts
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import pictures, report
from visual_grpo.evaluation.samples import read_scores

COLUMNS = 6
"""Columns of the film at most, the base model's included."""
WIDTH = 960
"""Largest width of a picture in pixels."""


def film(output: Path) -> Image.Image:
    """Draws a row per prompt and a column per evaluation; the rows of the files are as high as those of the report."""
    adapters, baseline = output / "06_models/adapters", output / "07_model_output/baseline"
    prompts = read_facts(adapters)["film"]
    files = sorted(adapters.glob("film-*.png"))
    chosen = np.linspace(0, len(files) - 1, COLUMNS).round().astype(int)[1:]  # After one step it is the base model.
    scores = read_scores(baseline)
    first = scores[(scores["sampler"] == "eval") & (scores["split"] == "held_out") & (scores["index"] == 0)]
    base = [read_image(baseline / first.set_index("prompt")["file"][prompt]) for prompt in prompts]
    columns = [pictures.table([[pictures.scaled(image)] for image in base]), *(read_image(files[i]) for i in chosen)]
    heads = ["base", *(f"step {int(files[i].stem.removeprefix('film-'))}" for i in chosen)]
    names = pictures.table([[fill(prompt, columns[0].height // len(prompts))] for prompt in prompts])
    rows = [[names, *columns], [pictures.text("", width=1), *(pictures.text(head, pictures.MUTED) for head in heads)]]
    return pictures.framed([pictures.table(rows)])


def fill(prompt: str, height: int) -> Image.Image:
    """Draws a prompt in a cell of a film's height."""
    cell = Image.new("RGB", (pictures.WIDTH * 3 // 4, height - pictures.LEADING), pictures.PAPER)
    cell.paste(pictures.text(prompt, width=cell.width), (0, cell.height // 2 - pictures.LINE_HEIGHT))
    return cell


def pairs(output: Path) -> Image.Image:
    """Draws two pairs of held-out prompts, the base model's samples above, below the pictures that are edited."""
    baseline, trained = (output / "07_model_output" / side for side in ("baseline", "trained"))
    chosen = report.choose(report.all_pairs(baseline, trained), "held_out", "eval", shown=2)["samples"]
    sheet = report.pair_sheet(chosen, baseline, trained)
    if read_facts(output / "06_models/adapters")["parameters"]["data"]["task"] != "i2i":
        return sheet
    records = {record.id: record for record in RecordTable(output / "05_model_input/records.parquet")}
    files = [read_image(records[name].source_images[0]) for name in chosen["id"]]
    return pictures.framed([pictures.grid(files, ["source"] * len(files), columns=len(files)), sheet])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("film", "pairs"))
    parser.add_argument("output", type=Path, help="the run's folder of outputs")
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    picture = {"film": film, "pairs": pairs}[asked.kind](asked.output)
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(asked.file, quality=80, method=6)


if __name__ == "__main__":
    main()
