import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.evaluation.painter import records
from tests.evaluation.reports import reported
from tests.evaluation.test_pictures import where
from visual_grpo.evaluation.pictures import BETTER, WIDTH, WORSE
from visual_grpo.evaluation.report import choose, pair_sheet
from visual_grpo.images import read_image

NAN = float("nan")


class Images(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.sources.append(dict(attrs)["src"] or "")


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    folder = reported(tmp_path, gain=0.2)
    page = (folder / "evaluation.html").read_text(encoding="utf-8")
    parser = Images()
    parser.feed(page)
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {"samples.png", "differences.png", "gains.png", "training.png"}
    kinds = [source.partition(";base64,")[0] for source in parser.sources]
    # Both sides of four held-out prompts (samples, gains), and the curve of the reward.
    assert Counter(kinds) == {"data:image/webp": 2 * (4 + 4), "data:image/svg+xml": 1}
    assert "http" not in page.replace("http-equiv", "")
    total = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["rewards"][0]
    assert total["difference"] == pytest.approx(0.2, abs=0.01)
    assert f"{total['difference']:+.3f}" in page


def test_losses_are_shown_if_there_are_any(tmp_path: Path) -> None:
    folder = reported(tmp_path, gain=-0.1)
    assert (folder / "losses.png").exists()
    assert not (folder / "gains.png").exists()


def pairs(total_baseline: list[float], total_trained: list[float], **columns: list[Any]) -> pd.DataFrame:
    count = len(total_baseline)
    rows = {"split": ["held_out"] * count, "sampler": ["stock"] * count, "index": [0] * count} | columns
    frame = pd.DataFrame(rows | {"total_baseline": total_baseline, "total_trained": total_trained})
    return frame.assign(difference=frame["total_trained"] - frame["total_baseline"])


def test_samples_ignore_the_result_gains_and_losses_follow_it() -> None:
    rows = pairs(
        [0.0] * 6, [0.1, 0.9, -0.3, 0.0, 0.4, -0.8], id=["a", "a", "b", "c", "d", "e"], index=[0, 1, 0, 0, 0, 0]
    )
    chosen = choose(rows, "held_out", "stock", shown=3)
    assert chosen["samples"]["id"].tolist() == ["a", "c", "e"]
    assert chosen["gains"][["id", "index"]].values.tolist() == [["a", 1], ["d", 0]]
    assert chosen["losses"]["id"].tolist() == ["e", "b"]
    assert chosen["unscored"].empty


def test_losses_are_those_of_all_samplers_and_of_the_shown_split() -> None:
    rows = pairs(
        [1.0] * 4,
        [1.5, 0.4, 0.1, 0.0],
        id=["a", "b", "a", "c"],
        sampler=["stock", "stock", "sde", "stock"],
        split=["held_out", "held_out", "held_out", "eval"],
    )
    chosen = choose(rows, "held_out", "stock")
    assert chosen["losses"][["id", "sampler"]].values.tolist() == [["a", "sde"], ["b", "stock"]]
    assert chosen["samples"]["id"].tolist() == ["a", "b"]


def test_what_could_not_be_scored_is_shown_the_trained_models_first() -> None:
    rows = pairs([NAN, 1.0, 1.0, 1.0], [1.0, NAN, 1.0, NAN], id=["a", "b", "c", "d"])
    chosen = choose(rows, "held_out", "stock")
    assert chosen["unscored"]["id"].tolist() == ["b", "d", "a"]
    assert chosen["samples"]["id"].tolist() == ["a", "b", "c", "d"], "a sample is not left out for its result"
    assert chosen["gains"].empty
    assert chosen["losses"].empty


def test_an_edit_is_shown_with_its_sources_above(tmp_path: Path) -> None:
    for colour in ("red", "lime"):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{colour}.png")
    plain, one, two = records("held_out", 3)
    edits = [
        plain,
        replace(one, source_images=(tmp_path / "red.png",)),
        replace(two, source_images=(tmp_path / "red.png", tmp_path / "lime.png")),
    ]
    folder = reported(tmp_path, gain=0.2, splits={"held_out": edits})
    assert where(read_image(folder / "gains.png"), "red").any()
    shown = read_image(folder / "samples.png")
    red, lime = (where(shown, colour) for colour in ("red", "lime"))
    columns = np.flatnonzero(red.any(0))
    assert columns.min() > shown.width // 3, "the first pair has no source"
    assert red[:, columns.min()].sum() == WIDTH
    assert np.flatnonzero(lime.any(0)).min() > columns.max(), "two sources are side by side"
    assert np.flatnonzero(red.any(1)).max() < shown.height // 2


@pytest.mark.parametrize(
    ("before", "after", "colour"), [(0.2, 0.9, BETTER), (0.9, 0.2, WORSE), (0.004, 0.001, None), (NAN, 1.0, None)]
)
def test_the_sheet_has_the_baseline_above_and_colours_gains_and_losses(
    tmp_path: Path, before: float, after: float, colour: str | None
) -> None:
    for name in ("blue", "orange"):
        Image.new("RGB", (64, 64), name).save(tmp_path / f"{name}.png")
    columns = {"id": ["a"], "prompt": ["a prompt"], "file_baseline": ["blue.png"], "file_trained": ["orange.png"]}
    shown = pair_sheet(pairs([before], [after], **columns), tmp_path, tmp_path)
    assert [c for c in (BETTER, WORSE) if where(shown, c).any()] == ([] if colour is None else [colour])
    blue, orange = (np.flatnonzero(where(shown, name).any(1)) for name in ("blue", "orange"))
    assert blue.max() < orange.min()
