"""Which reward can judge which: the table, the page that shows it, and what a report proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.markdown import ROOT
from visual_grpo.rewards.catalogue import BUILT_IN
from visual_grpo.rewards.judges import FAMILIES, missing_judges
from visual_grpo.rewards.remote.local_worker import python_of
from visual_grpo.rewards.remote.rubrics import RUBRICS

WORKER = BUILT_IN["http"]


def worker(name: str, **entry: Any) -> dict[str, Any]:
    return {"function": WORKER, "options": {"worker": f"workers/{name}"}, **entry}


def test_the_table_names_rewards_and_workers_that_exist_each_once() -> None:
    named = [kind for families in FAMILIES.values() for kinds in families.values() for kind in kinds]
    workers = {folder.parent.name for folder in (ROOT / "workers").glob("*/worker.py")}
    assert set(named) <= {*BUILT_IN, *workers, *(f"vlm_judge ({rubric})" for rubric in RUBRICS)}
    assert [name for name in named if named.count(name) > 1] == ["imagereward"] * 2, "one answer for each reward"


@pytest.mark.parametrize(
    ("rewards", "optimised", "missing"),
    [
        ({"clip_score": {}}, ["clip_score"], {"clip_score": ("CLIP", "imagereward", True)}),
        # Another head on the same network is no second opinion.
        (
            {"pick_score": {}, "clip_score": {"judge": True}},
            ["pick_score"],
            {"pick_score": ("CLIP", "imagereward", True)},
        ),
        ({"pick_score": {}, "second": worker("imagereward", judge=True)}, ["pick_score"], {}),
        (
            {"pick_score": {}, "second": worker("imagereward")},
            ["pick_score"],
            {"pick_score": ("CLIP", "imagereward", True)},
        ),
        # A judge of something else.
        ({"ocr": {}, "target_layout": {"judge": True}}, ["ocr"], {"ocr": ("rapidocr", "tesseract", True)}),
        ({"signs": {"function": BUILT_IN["ocr"]}}, ["signs"], {"signs": ("rapidocr", "tesseract", True)}),
        ({"seen": worker("hpsv3")}, ["seen"], {"seen": ("Qwen-VL", "clip_score", False)}),
        ({"ssim": {}, "target_layout": {"judge": True}}, ["ssim"], {}),
        ({"ssim": {}}, ["ssim"], {"ssim": ("structure in small windows", "target_layout", False)}),
        (
            {"vlm_judge": {"options": {"rubric": "instruction"}}},
            ["vlm_judge"],
            {"vlm_judge": ("a vision-language model of your choice", "editreward", True)},
        ),
        ({"vlm_judge": {"options": {"rubric": "Is it {prompt}?"}}}, ["vlm_judge"], {}),
        ({"mine": {"function": "my_rewards:mine"}, "http": {"options": {"url": "x"}}}, ["mine", "http"], {}),
        ({"clip_score": {"weight": 0.0}, "mine": {"function": "my_rewards:mine"}}, ["mine"], {}),
    ],
)
def test_an_optimised_reward_without_a_judge_of_another_family_is_named(
    rewards: dict[str, Any], optimised: list[str], missing: dict[str, tuple[str, str, bool]]
) -> None:
    found = {
        one.reward: (one.family, next(iter(one.others)), one.install is not None)
        for one in missing_judges(rewards, optimised)
    }
    assert found == missing


def test_what_is_installed_comes_first_with_the_line_to_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = missing_judges({"ocr": {}}, ["ocr"])
    assert (list(one.others), one.install) == (["tesseract", "easyocr", "vlm_judge (text)"], "tesseract")
    python_of("easyocr").parent.mkdir(parents=True)
    python_of("easyocr").touch()
    (one,) = missing_judges({"ocr": {}}, ["ocr"])
    assert (list(one.others), one.install) == (["easyocr", "tesseract", "vlm_judge (text)"], None)
    assert one.line == f'easyocr: {{function: "{WORKER}", judge: true, options: {{worker: workers/easyocr}}}}'
