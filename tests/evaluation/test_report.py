import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.evaluation.painter import ROLLOUT, STOCK, Painter, brightness, records
from visual_grpo.evaluation.compare import compare
from visual_grpo.evaluation.generate import draw_and_score, plan_images
from visual_grpo.evaluation.pictures import WIDTH
from visual_grpo.evaluation.report import choose, main_view, sentence, write_report
from visual_grpo.images import read_image
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.types import PromptRecord

HISTORY = pd.DataFrame({"step": [1, 2], "reward/total": [0.4, 0.5]})


SPLITS = {"held_out": records("held_out", 4), "eval": records("eval", 2)}


def drawn(folder: Path, gain: float, splits: Mapping[str, Sequence[PromptRecord]] = SPLITS) -> pd.DataFrame:
    plan = plan_images(splits, seed=0, images_per_prompt=2, max_prompts=None)
    scorer = RewardSet({"brightness": (brightness, 1.0)})
    samplers = {"rollout": ROLLOUT, "stock": STOCK}
    return draw_and_score(Painter(gain), scorer, plan, samplers, folder, batch_size=8, facts={"seed": 0})


def reported(tmp_path: Path, gain: float, splits: Mapping[str, Sequence[PromptRecord]] = SPLITS) -> Path:
    before, after = drawn(tmp_path / "baseline", 0.0, splits), drawn(tmp_path / "trained", gain, splits)
    entries = compare(before, after, bootstrap_samples=100, seed=0)
    (tmp_path / "report").mkdir()
    evaluation = {"seed": 0, "adapter": "<an adapter>", "rewards": entries}
    write_report(tmp_path / "report", evaluation, tmp_path / "baseline", tmp_path / "trained", HISTORY)
    return tmp_path / "report"


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
    assert len(parser.sources) == len(pictures)
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert "&lt;an adapter&gt;" in page
    assert "<an adapter>" not in page
    total = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["rewards"][0]
    assert total["difference"] == pytest.approx(0.2, abs=0.01)
    assert f"{total['difference']:.4f}" in page


def test_losses_are_shown_if_there_are_any(tmp_path: Path) -> None:
    folder = reported(tmp_path, gain=-0.1)
    assert (folder / "losses.png").exists()
    assert not (folder / "gains.png").exists()


def test_samples_ignore_the_result_gains_and_losses_follow_it() -> None:
    rows = pd.DataFrame(
        {
            "id": ["a", "a", "b", "c", "d", "e"],
            "index": [0, 1, 0, 0, 0, 0],
            "difference": [0.1, 0.9, -0.3, 0.0, 0.4, -0.8],
        }
    )
    chosen = choose(rows, shown=3)
    assert chosen["samples"]["id"].tolist() == ["a", "c", "e"]
    assert chosen["gains"][["id", "index"]].values.tolist() == [["a", 1], ["d", 0]]
    assert chosen["losses"]["id"].tolist() == ["e", "b"]


def test_the_main_view_is_held_out_with_the_stock_sampler() -> None:
    views = [{"split": s, "sampler": k} for s in ("eval", "held_out") for k in ("rollout", "stock")]
    assert main_view(views) == ("held_out", "stock")
    assert main_view(views[:2]) == ("eval", "stock")
    assert main_view([views[2]]) == ("held_out", "rollout")


def test_a_sentence_says_the_numbers_and_what_is_undefined() -> None:
    entry = {
        "name": "total", "split": "held_out", "sampler": "stock", "baseline_mean": 0.5, "trained_mean": 0.75,
        "difference": 0.25, "ci_low": 0.1, "ci_high": 0.4, "win_rate": 0.625, "images": 8, "prompts": 4, "units": 4,
    }  # fmt: skip
    assert sentence(entry) == (
        "total, held-out prompts, stock sampler: 0.500 before, 0.750 after training, difference +0.250"
        " [+0.100, +0.400]; the trained sample wins 62% of 8 pairs (4 prompts)."
    )
    assert sentence(entry | {"units": 3}).endswith("of 8 pairs (4 prompts in 3 groups).")
    assert "[" not in sentence(entry | {"ci_low": None, "ci_high": None})
    assert sentence(entry | {"difference": None}) == "total: no pair of samples could be scored."


def test_an_edit_is_shown_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "images" / "source.png")
    edits = [replace(r, source_images=(tmp_path / "images" / "source.png",)) for r in records("held_out", 3)]
    reported(tmp_path, gain=0.2, splits={"held_out": edits})
    for name in ("samples", "gains"):
        shown = np.asarray(read_image(tmp_path / "report" / f"{name}.png"))
        assert (shown == (255, 0, 0)).all(-1).sum() == 3 * WIDTH * WIDTH
