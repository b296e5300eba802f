"""Datasets of a few kilobytes that would take gigabytes are reported, in bounded memory."""

from __future__ import annotations

import pytest

from tests.records.bombs import HUGE
from tests.records.fuzz import measured, run
from visual_grpo.errors import UserError

GROWTH = 150
"""MB of memory; each of the bombs would take 300 or more."""


def test_images_and_text(tmp_path):
    kinds = ("bombs_images", "bombs_lines", "bombs_csv", "bombs_captions")
    grown, (images, lines, csv, captions) = measured(tmp_path, *kinds, count=30)
    assert grown < GROWTH < HUGE / 1e6

    assert images["accepted"] == 31, "the good ones, and the first frame of the animation"
    listed = images["rejected"]["listed"]
    messages = {entry["message"].split()[0].rpartition("/")[2].rstrip(":"): entry["message"] for entry in listed}
    assert dict(zip(messages, (entry["reason"] for entry in listed), strict=True)) == {
        "zeros.png": "too_many_pixels",
        "header.png": "too_many_pixels",
        "header.gif": "too_many_pixels",
        "header.bmp": "too_many_pixels",
        "header.ppm": "too_many_pixels",
        "large.png": "too_many_pixels",
        "program.eps": "corrupt_image",
        "target_image": "file_too_large",
    }
    assert "900000000 pixels" in messages["zeros.png"]
    assert "is 5000x1000 pixels, 5,000,000 in all, more than data.max_pixels=4000000" in messages["large.png"]
    assert "needs another program" in messages["program.eps"]
    assert "'huge.png' has 300 MB, more than data.max_file_mb=10" in messages["target_image"]

    assert lines["accepted"] == 31, "also the line after the bombs"
    assert lines["rejected"]["by_reason"] == {"not_json": 1, "unknown_key": 1, "text_too_long": 1}
    assert "the line is longer than data.max_record_mb=0.01" in str(lines["rejected"]["listed"])

    assert csv["accepted"] == 31, "also the row after the bombs"
    assert csv["rejected"]["by_reason"]["text_too_long"] >= 2

    assert captions["accepted"] == 30
    assert captions["rejected"]["by_reason"] == {"text_too_long": 1}


@pytest.mark.parametrize("kind", ["bombs_cells", "bombs_masks"])
def test_tables(tmp_path, kind):
    with pytest.raises(
        UserError, match=r"after row 0: decoding takes more than 20 MB of memory.*raise data.max_file_mb"
    ):
        run(tmp_path, kind, 0, task="segmentation")
    assert (tmp_path / "data/train.parquet").stat().st_size < 100_000
