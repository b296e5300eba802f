"""Makes the pictures of the README and of the gallery from what a run left:

    python benchmarks/pictures.py answers data docs/answers.webp
    python benchmarks/pictures.py answers data/wan_small docs/gallery/videos.webp
    python benchmarks/pictures.py pairs data/text docs/gallery/words.webp
    python benchmarks/pictures.py blind data blind.png            # a sheet to look at
    python benchmarks/pictures.py blind data blind.png --answers AB=BAB==ABBABBAAB=BA

``blind`` shows twenty pairs, numbered, in an order that is random but the same each time. A person who does not know
which is trained writes down A, B or = for each pair, for a question such as "which fits the prompt better?"; with these
answers it prints how often the trained sample was preferred.

``answers`` shows held-out prompts of a drawn world, and whether all is right; ``pairs`` the first and the last held-out
prompt, before and after training, and prints them with their rewards. Videos play. Neither looks at the results.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from visual_grpo.common.images import read_image
from visual_grpo.common.videos import SUFFIX, read_frames
from visual_grpo.evaluation import page, pictures, report
from visual_grpo.evaluation.samples import read_scores

COLUMNS = 3
"""Of `answers`. With more, prompts are too small on a phone."""
BLIND = 20
GREEN, RED = "#1a7f37", "#b3261e"
WIDTH = 960
"""Largest width of a picture in pixels."""
FILM, MILLISECONDS = 10, 200
"""Pictures of a film, and how long each is shown: a video of a few frames would be over before one has looked."""


def answers(output: Path) -> list[Image.Image]:
    """Draws held-out prompts evenly spaced over all of them, before and after training; a picture for each frame of
    videos."""
    baseline, trained = (output / "07_model_output" / side for side in ("baseline", "trained"))
    chosen = report.choose(report.all_pairs(baseline, trained), "held_out", "eval", shown=2 * COLUMNS)["samples"]
    sides = {"base": (baseline, "baseline"), "trained": (trained, "trained")}
    shown, captions = {}, {}
    for name, (folder, column) in sides.items():
        files = [row[f"file_{column}"] for row in chosen.to_dict("records")]
        scores = read_scores(folder).set_index("file")
        right = scores.filter(regex="^part/.*/all$").loc[files].iloc[:, 0] == 1
        shown[name] = [_frames(folder / file) for file in files]
        captions[name] = [pictures.text(f"{name} {'✓' if yes else '✗'}", GREEN if yes else RED) for yes in right]
    prompts = [pictures.text(prompt) for prompt in chosen["prompt"]]

    def at(frame: int) -> Image.Image:
        bands = []
        for columns in (slice(COLUMNS), slice(COLUMNS, None)):
            cells = [prompts[columns]]
            for name, films in shown.items():
                cells += [[pictures.scaled(film[frame]) for film in films[columns]], captions[name][columns]]
            bands.append(pictures.table(cells))
        return pictures.framed(bands)

    return [at(frame) for frame in range(len(shown["base"][0]))]


def pairs(output: Path) -> list[Image.Image]:
    """Draws two pairs of held-out prompts: what is edited, the base model's sample, the trained model's, each with its
    name; a picture for each frame of videos.

    Each prompt has a row, or both are in one where a sample is high. Prompts would be too small on a phone."""
    baseline, trained = (output / "07_model_output" / side for side in ("baseline", "trained"))
    chosen = report.choose(report.all_pairs(baseline, trained), "held_out", "eval", shown=2)["samples"]
    rows = []
    for pair in chosen.to_dict("records"):
        shown = {name: baseline / path for name, path in page.given(pair).items() if name != "target"}
        shown |= {"base": baseline / pair["file_baseline"], "trained": trained / pair["file_trained"]}
        names = list(shown)
        rows.append([[pictures.scaled(frame) for frame in _frames(file)] for file in shown.values()])
        print(f"{pair['prompt']}: reward {pair['total_baseline']:.2f} → {pair['total_trained']:.2f}")
    frames = max(len(cell) for row in rows for cell in row)
    films = [[[cell[min(frame, len(cell) - 1)] for cell in row] for row in rows] for frame in range(frames)]
    is_high = rows[0][-1][0].height > 2 * rows[0][-1][0].width
    heads = [_large(name) for name in names]
    return [
        pictures.framed([pictures.table([[*heads, *heads], [*film[0], *film[1]]] if is_high else [heads, *film])])
        for film in films
    ]


def _large(name: str) -> Image.Image:
    """Renders a name that can still be read where the whole picture is as wide as a phone."""
    small = pictures.text(name, width=pictures.WIDTH // 2)
    return small.resize((2 * small.width, 2 * small.height), Image.Resampling.LANCZOS)


def blind(output: Path) -> list[Image.Image]:
    """Draws the pairs of `_shuffled` with their sources, a video as a strip of frames; nothing says what is trained."""
    columns = []
    for number, (pair, sides) in enumerate(_shuffled(output), start=1):
        folder = output / "07_model_output/baseline"
        sources = [folder / path for name, path in page.given(pair).items() if name != "target"]
        given, upper, lower = (
            [pictures.scaled(pictures.of_file(f)) for f in files] for files in (sources, sides[:1], sides[1:])
        )
        prompt, a, b = (pictures.text(words) for words in (f"{number}. {pair['prompt']}", "A", "B"))
        columns.append([prompt, *given, a, *upper, b, *lower])
    bands = [columns[start : start + BLIND // 2] for start in range(0, len(columns), BLIND // 2)]
    return [pictures.framed([pictures.table([list(row) for row in zip(*band, strict=True)]) for band in bands])]


def preferred(output: Path, answers: str) -> str:
    """Counts ``answers``, one of A, B and = for each pair of `blind`."""
    chosen = _shuffled(output)
    if len(answers) != len(chosen) or not set(answers) <= set("AB="):
        raise SystemExit(f"expected {len(chosen)} answers of A, B and =, got {answers!r}")
    trained = output / "07_model_output/trained"
    sides = ["AB"[[trained in file.parents for file in files].index(True)] for _, files in chosen]
    won = sum(answer == side for answer, side in zip(answers, sides, strict=True))
    equal = answers.count("=")
    return f"trained {won}, base {len(answers) - won - equal}, equal {equal}"


def _shuffled(output: Path) -> list[tuple[Mapping[Any, Any], list[Path]]]:
    """Returns `BLIND` held-out pairs at the eval sampler, evenly spaced over the prompts, and their two files in an
    order that follows from a hash of the trained sample, so that it differs between trainings."""
    baseline, trained = (output / "07_model_output" / side for side in ("baseline", "trained"))
    chosen = report.choose(report.all_pairs(baseline, trained), "held_out", "eval", shown=BLIND)["samples"]
    shuffled: list[tuple[Mapping[Any, Any], list[Path]]] = []
    for pair in chosen.to_dict("records"):
        files = [baseline / pair["file_baseline"], trained / pair["file_trained"]]
        shuffled.append((pair, files[:: 1 - 2 * (hashlib.sha256(files[1].read_bytes()).digest()[0] % 2)]))
    return shuffled


def _frames(file: Path) -> list[Tensor | Image.Image]:
    """Returns the pictures of a video, at times that divide its length evenly, or an image."""
    return list(read_frames(file, FILM)) if file.suffix == SUFFIX else [read_image(file)]


def main() -> None:
    asked = _arguments()
    if asked.answers:
        print(preferred(asked.output, asked.answers))
        return
    first, *others = {"answers": answers, "pairs": pairs, "blind": blind}[asked.kind](asked.output)
    for picture in (first, *others):
        if asked.kind != "blind":
            picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    if asked.file.suffix == ".png" and not others:
        first.save(asked.file)
        return
    playing: dict[str, Any] = {"duration": MILLISECONDS, "loop": 0} if others else {}
    first.save(asked.file, quality=80, method=6, save_all=bool(others), append_images=others, **playing)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("answers", "pairs", "blind"))
    parser.add_argument("output", type=Path, help="the run's folder of outputs")
    parser.add_argument("file", type=Path)
    parser.add_argument("--answers", help="to a question about each pair of blind: A, B or =")
    return parser.parse_args()


if __name__ == "__main__":
    main()
