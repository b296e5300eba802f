import json
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
from visual_grpo.evaluation.examples import choose
from visual_grpo.evaluation.pictures import WIDTH
from visual_grpo.images import read_image


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
    assert len(parser.sources) == 2 * (4 + 4)  # Both sides of four held-out prompts: samples, gains.
    assert all(source.startswith("data:image/webp;base64,") for source in parser.sources)
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
    nan = float("nan")
    rows = pairs([nan, 1.0, 1.0, 1.0], [1.0, nan, 1.0, nan], id=["a", "b", "c", "d"])
    chosen = choose(rows, "held_out", "stock")
    assert chosen["unscored"]["id"].tolist() == ["b", "d", "a"]
    assert chosen["samples"]["id"].tolist() == ["a", "b", "c", "d"], "a sample is not left out for its result"
    assert chosen["gains"].empty
    assert chosen["losses"].empty


def test_an_edit_is_shown_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "images" / "source.png")
    edits = [replace(r, source_images=(tmp_path / "images" / "source.png",)) for r in records("held_out", 3)]
    reported(tmp_path, gain=0.2, splits={"held_out": edits})
    for name in ("samples", "gains"):
        shown = np.asarray(read_image(tmp_path / "report" / f"{name}.png"))
        assert (shown == (255, 0, 0)).all(-1).sum() == 3 * WIDTH * WIDTH
