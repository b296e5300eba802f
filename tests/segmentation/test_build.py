from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.segmentation.small_sam2 import save_sam2
from visual_grpo.errors import UserError
from visual_grpo.segmentation.sam2 import Sam2Segmenter
from visual_grpo.segmentation.segmenter import build_segmenter
from visual_grpo.segmentation.watershed import WatershedSegmenter


def test_options_are_the_arguments_of_the_kind(tmp_path: Path) -> None:
    watershed = build_segmenter({"kind": "watershed", "edge": 0.2})
    assert isinstance(watershed, WatershedSegmenter)
    assert watershed.edge == 0.2
    sam2 = build_segmenter({"kind": "sam2", "path": str(save_sam2(tmp_path)), "device": "cpu", "batch": 3})
    assert isinstance(sam2, Sam2Segmenter)
    assert sam2.batch == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "watersheds"}, r"a kind, watershed or sam2, got .*Did you mean 'watershed'\?$"),
        ({"edge": 0.3}, r"expected options with a kind, watershed or sam2, got \{'edge': 0.3\}"),
        ({"kind": "watershed", "egde": 0.3}, r"segmenter watershed: .*'egde'; its options are edge$"),
        ({"kind": "sam2"}, r"segmenter sam2: missing a required argument: 'path'; its options are path, device"),
        ("sam2", r"expected options with a kind, watershed or sam2, got 'sam2'"),
    ],
)
def test_an_unknown_kind_or_option_is_refused_with_a_suggestion(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_segmenter(options)
