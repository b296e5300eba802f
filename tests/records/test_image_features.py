"""What is measured of an image."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFilter

from visual_grpo.images import ImageError
from visual_grpo.records.image_features import image_features


def features(folder, pixels):
    file = folder / "a.png"
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file)
    return image_features(file)


def test_of_a_plain_grey(tmp_path):
    found = features(tmp_path, np.full((64, 32, 3), 51))
    assert found == pytest.approx({"brightness": 0.2, "contrast": 0, "colourfulness": 0, "sharpness": 0}, abs=1e-9)


def test_of_black_beside_white(tmp_path):
    pixels = np.zeros((64, 64, 3))
    pixels[:, 32:] = 255
    found = features(tmp_path, pixels)
    assert found["brightness"] == pytest.approx(0.5)
    assert found["contrast"] == pytest.approx(0.5)
    assert found["colourfulness"] == pytest.approx(0, abs=1e-9)
    # The second difference is 1 and -1 at the two columns beside the edge.
    assert found["sharpness"] == pytest.approx((2 / 64) ** 0.5)


def test_of_colours(tmp_path):
    red, blue = np.zeros((2, 32, 32, 3))
    red[..., 0] = blue[..., 2] = 255
    assert features(tmp_path, red)["colourfulness"] == pytest.approx(0.3 * np.hypot(1, 0.5))
    assert features(tmp_path, red)["brightness"] == pytest.approx(0.299)
    # Red - green is 1 and 0, yellow - blue 0.5 and -1.
    expected = np.hypot(0.5, 0.75) + 0.3 * np.hypot(0.5, -0.25)
    assert features(tmp_path, np.vstack([red, blue]))["colourfulness"] == pytest.approx(expected)


def test_a_blurred_picture_is_less_sharp_and_a_larger_one_of_the_same_is_as_bright(tmp_path):
    noise = Image.effect_noise((200, 200), 80).convert("RGB")
    sharp = features(tmp_path, noise)
    assert features(tmp_path, noise.filter(ImageFilter.GaussianBlur(2)))["sharpness"] < 0.3 * sharp["sharpness"]
    tripled = features(tmp_path, noise.resize((600, 600), Image.Resampling.NEAREST))
    assert tripled == pytest.approx(sharp, abs=1e-9), "reduced to what it is made of"


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"a\.png"):
        image_features(tmp_path / "a.png")
