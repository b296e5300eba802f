"""A training whose reward does not see outlines: the demo's verdict says that they got worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.small_project import paste, project_copy

REWARDS = '''
"""The shapes of the demo, of which those with an intersection over union of 0.9 are as good as perfect ones."""

import torch

from visual_grpo.starter.shapes import judging
from visual_grpo.starter.shapes.shapes_reward import ShapesReward


def capped(iou, asked):
    of_asked, matches = iou[torch.arange(len(asked)), asked], iou.argmax(1) == asked
    return 0.5 * (of_asked / 0.9).clamp(max=1) + 0.5 * matches, matches & (of_asked > 0.7)


class CappedShapes(ShapesReward):
    def __call__(self, prompts, samples):
        judging._shape = capped
        return super().__call__(prompts, samples)


def palette(prompts, samples):
    objects = [judging.find_objects(image[None]) for image in samples]
    return torch.cat([judging.nearness(one, judging.color_distances(one).amin(-1)) for one in objects])
'''
CONF = """
policy: {train: dit}
rewards:
  shapes: {function: "capped:CappedShapes"}
  rendering: {function: "capped:palette", weight: 0.0}
grpo: {steps: 40}
evaluation: {controls: []}
"""


@pytest.mark.slow
def test_the_guard_falls_with_outlines_that_the_reward_does_not_see(tmp_path: Path) -> None:
    project = project_copy(tmp_path)
    (project / "capped.py").write_text(REWARDS, encoding="utf-8")
    (project / "conf/local/parameters.yml").write_text(CONF, encoding="utf-8")
    paste(".venv/bin/kedro run", project).check_returncode()
    headline = json.loads((project / "data/08_reporting/evaluation/evaluation.json").read_text())["headline"]
    assert headline["verdict"] == "better"
    assert [guard["name"] for guard in headline["fallen"]] == ["outline"]
    assert "But its shapes are less well formed (outline fell from" in headline["sentence"]
