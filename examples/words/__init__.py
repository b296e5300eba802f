"""Words on signs, written by a small Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visual_grpo.config.presets import GUARDS, Preset
from visual_grpo.starter.worlds import SmallModel, World


def _reader(worker: str, **environment: str) -> Mapping[str, Any]:
    function = "visual_grpo.rewards.remote.http_reward:HttpReward"
    options = {"worker": f"workers/{worker}", "environment": environment}
    return {"function": function, "judge": True, "judge_of": "ocr", "options": options}


WORLD = World(
    name="words",
    tasks=("t2i",),
    render="examples.words.signs:draw_words",
    models={"sd3": SmallModel(pretrain={"examples.words.pretrain_sd3:pretrain_signs": ("vae", "dit")})},
    # A sign is a single line of text, so that detecting where text is, which takes much longer, is not needed.
    preset=Preset(
        rewards={
            "ocr": {"weight": 1.0, "options": {"line": [0, 0, 1, 1]}},
            "letters_apart": {"function": "examples.words.signs:LettersApart", "weight": 0.0},
            **GUARDS,
        }
    ),
    worker_judges={
        "tesseract": _reader("tesseract", TESSERACT_LAYOUT="line"),
        "easyocr": _reader("easyocr", EASYOCR_LAYOUT="line"),
    },
)
