"""Options that a reward cannot have and records that it cannot judge: refused before anything is scored."""

from __future__ import annotations

from typing import Any

import pytest

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import RewardConfig
from visual_grpo.rewards.build import build_reward
from visual_grpo.rewards.combine import RewardSet

DETECTOR = "tests.rewards.test_object_layout:squares"
OWN = "tests.rewards.segmentation.test_own_segmenter"
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("ocr", {"line": [0.5, 0, 0.5, 1]}, r"\[top, left, bottom, right\] in shares"),
    ("ocr", {"line": [0, 0, 1, 1.5]}, r"\[top, left, bottom, right\] in shares"),
    ("object_layout", {"detector": DETECTOR, "threshold": 2}, "threshold must be from 0 to 1, got 2"),
    ("object_layout", {"detector": f"{DETECTOR}_"}, "has no 'squares_'"),
    ("negative_points", {"weights": {"contrst": 1.0}}, "contrst"),
    ("negative_points", {"weights": {"contrast": "high"}}, "weight of contrast must be a number"),
    ("negative_points", {"segmenter": {"kind": "watersed"}}, r"or sam3, or .*Did you mean 'watershed'\?"),
    ("negative_points", {"segmenter": {"edge": 0.3}}, r"a kind, watershed or .* or a function, .* got \{'edge': 0.3\}"),
    ("negative_points", {"segmenter": "watershed"}, r"segmenter: expected options with a kind, .* got 'watershed'"),
    ("negative_points", {"segmenter": {"kind": "watershed", "egde": 0.3}}, "no option 'egde'; it takes: edge"),
    (
        "negative_points",
        {"segmenter": {"kind": "watershed", "path": "facebook/sam2.1-hiera-large", "device": "cuda"}},
        "segmenter 'watershed' has no option 'path'; .* Leave out path, device, or set it to null if a configuration",
    ),
    ("negative_points", {"segmenter": {"kind": "watershed", "edge": 0}}, "edge must be a number above 0"),
    ("negative_points", {"segmenter": {"kind": "sam2"}}, "segmenter 'sam2' needs the option 'path', got none"),
    (
        "negative_points",
        {"segmenter": {"kind": "sam2", "function": "a:b"}},
        r"a kind, .* or a function, .* got \{'kind'",
    ),
    ("negative_points", {"segmenter": {"function": 3}}, r"a kind, .* or a function, .* got \{'function': 3"),
    ("negative_points", {"segmenter": {"function": f"{OWN}:blokc"}}, "has no 'blokc'.*Did you mean 'block'"),
    ("negative_points", {"segmenter": {"function": f"{OWN}:block", "sied": 3}}, "no option 'sied'; it takes: side"),
    ("negative_points", {"segmenter": {"function": f"{OWN}:Mute"}}, "must be callable with .*, got Mute"),
    ("dino_structure", {"against": "mask"}, "dino_structure: against must be source or target, got 'mask'"),
    ("clip_score", {"dtype": "float8"}, "dtype must be one of float32"),
    ("clip_score", {"batch_size": 0}, "batch_size must be at least 1"),
    ("votes", {}, "needs one of the options choices"),
    ("votes", {"choices": "a", "head": "b"}, "needs one of the options choices"),
    ("http", {"url": "127.0.0.1:80"}, "url must be an address such as http://127.0.0.1:8765, got '127.0.0.1:80'"),
    ("http", {"timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
    ("http", {"deadline": float("inf")}, "deadline must be a number of seconds above 0, got inf"),
    ("http", {"retries": -1}, "retries must be a whole number of at least 0, got -1"),
    ("http", {"batch_size": 0}, "batch_size must be a whole number of at least 1"),
    ("http", {"image_format": "gif"}, "image_format must be png or jpeg, got 'gif'"),
    ("http", {"protocol": "unirll"}, r"protocol must be worker.* Did you mean 'unirl'\?"),
    ("http", {"metadata": "objects"}, r"metadata must be a list of names, got 'objects': \[objects\]"),
    ("http", {"protocol": "unirl"}, "with protocol unirl, model must name the reward"),
    ("http", {"url": "http://other", "worker": "workers/tesseract"}, "and worker is 'workers/tesseract'; expected one"),
    ("http", {"environment": {"A": "b"}}, "environment is for a worker that this process starts"),
    ("http", {"headers": {"accept": "a\nb"}}, "the header 'accept' must be printable text"),
    ("vlm_judge", {"mode": "probability"}, "mode must be yes_probability or score"),
    ("vlm_judge", {"rubric": "alignement"}, r"rubric must be alignment.* Did you mean 'alignment'\?"),
    ("vlm_judge", {"rubric": "Is it {promt} ?"}, r"a rubric may contain \{prompt\} and \{text\}, got \{promt\}"),
    ("vlm_judge", {"rubric": "Is it {prompt ?"}, "braces do not match"),
    ("vlm_judge", {"score_range": [5, 1]}, r"score_range must be \[lowest, highest\], got \[5, 1\]"),
    ("vlm_judge", {"pattern": "Score ("}, "pattern is not a valid regular expression"),
    ("vlm_judge", {"pattern": r"\d+"}, "pattern must have one group"),
]


@pytest.mark.parametrize(("name", "options", "told"), OPTIONS)
def test_impossible_options(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        build_reward(name, RewardConfig(options=options))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("ssim", {}, "1 record has none: 'r'"),
        ("dino_identity", {}, "the reward dino_identity compares with a source image, and 1 record has none"),
        ("kept_region", {}, "none of 1 records has any; the first is 'r'. Add metadata region"),
        ("object_layout", {"detector": DETECTOR}, "none of 1 records has any; the first is 'r'"),
        ("ocr", {}, "none of 1 records has any; the first is 'r': 'a cat'"),
        ("vlm_judge", {"rubric": "text"}, "none of 1 records has any"),
        ("negative_points", {}, r"record 'r' has 0 source images and lacks \['box', 'points'\]"),
    ],
)
def test_records_without_what_a_reward_compares_with(name: str, options: dict[str, Any], told: str) -> None:
    rewards = RewardSet({name: (build_reward(name, RewardConfig(options=options)), 1.0)})
    with pytest.raises(UserError, match=told):
        rewards.check_records([PromptRecord(id="r", prompt="a cat")])
