"""Reading masks: what the values of each kind mean, and those that are refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter

from visual_grpo.common.images import ImageError
from visual_grpo.common.masks import AmbiguousMaskError, read_mask, read_mask_image


def grey(values, dtype=np.uint8):
    return Image.fromarray(np.array([values], dtype))


def with_palette(image, *colours):
    image.putpalette([channel for colour in colours for channel in colour])
    return image


def cut_out(mode, *pixels):
    image = Image.new(mode, (2, 1))
    image.putdata(pixels)
    return image


@pytest.mark.parametrize(
    "image",
    [
        grey([False, True], bool),
        grey([0, 1]),
        grey([127, 128]),
        grey([0, 1], np.uint16),
        grey([100, 255], np.uint16),
        grey([32767, 32768], np.uint16),
        grey([0, 65535], np.int32),
        grey([0.4, 0.6], np.float32),
        with_palette(grey([1, 0]), (255, 255, 255), (0, 0, 0)),  # White first, as some encoders write it.
        with_palette(grey([0, 1]), (0, 0, 0), (128, 0, 0)),
        cut_out("RGB", (0, 0, 0), (0, 0, 200)),
        cut_out("RGBA", (255, 255, 255, 0), (9, 9, 9, 255)),
        cut_out("RGBA", (0, 0, 0, 255), (255, 255, 255, 255)),
        cut_out("LA", (255, 100), (0, 200)),
    ],
)
def test_the_right_pixel_of_every_kind_of_mask_is_the_object(image, tmp_path):
    image.save(tmp_path / "m.tif" if image.mode in ("F", "I") else tmp_path / "m.png")
    (path,) = tmp_path.iterdir()
    mask = read_mask(path)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[False, True]]


def test_an_upright_mask(tmp_path):
    image = grey([0, 255, 255])
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "m.png", exif=exif)
    assert read_mask(tmp_path / "m.png").tolist() == [[False], [True], [True]]


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, 70000.0], [0.0, np.nan]])
def test_a_mask_of_other_values_is_refused(values, tmp_path):
    grey(values, np.float32).save(tmp_path / "m.tif")
    with pytest.raises(ImageError, match=r"m.tif: a mask's values must lie within 0\.\.1"):
        read_mask(tmp_path / "m.tif")


SIZE = (96, 72)
OBJECT, OTHER = (20, 15, 59, 39), (70, 45, 84, 59)
"""Corners, which belong to them."""
VOC = [(0, 0, 0)] * 256
VOC[8], VOC[15], VOC[255] = (64, 0, 0), (192, 128, 128), (224, 224, 192)


def drawn(*values, mode="L", shape="rectangle"):
    """A mask of an object, of another and of a border around both, each of a value or not there."""
    image = Image.new(mode, SIZE)
    draw = getattr(ImageDraw.Draw(image), shape)
    for value, box in zip(values[:2], (OBJECT, OTHER), strict=False):
        x1, y1, x2, y2 = box
        if len(values) > 2:
            draw((x1 - 2, y1 - 2, x2 + 2, y2 + 2), fill=values[2])
        if value is not None:
            draw(box, fill=value)
    return image


def truth(shape="rectangle"):
    return np.asarray(drawn(255, shape=shape)) > 0


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def reopened(image, quality):
    """As after a mask was kept as JPEG."""
    return Image.open(saved(image, "JPEG", quality=quality))


def smooth():
    """An ellipse that an editor draws with smooth edges."""
    large = Image.new("L", (SIZE[0] * 4, SIZE[1] * 4))
    ImageDraw.Draw(large).ellipse([4 * number for number in OBJECT], fill=255)
    return large.resize(SIZE, Image.Resampling.BOX)


def numbered(count, dtype):
    """Squares of 8 x 8 pixels numbered from 0."""
    numbers = np.arange(96).reshape(8, 12) % count
    return Image.fromarray(np.repeat(np.repeat(numbers, 8, 0), 8, 1).astype(dtype))


def panoptic():
    pixels = np.asarray(numbered(60, np.int32))
    return Image.fromarray(np.stack([pixels * 37 % 256, pixels * 91 % 256, pixels * 151 % 256], 2).astype(np.uint8))


SHARP = {
    "0 and 1": drawn(1),
    "0 and 255": drawn(255),
    "a light grey": drawn(200),
    "two-valued": drawn(1, mode="1"),
    "16 bits": Image.fromarray(np.asarray(drawn(1), np.uint16) * 65535),
    "0, 1 and an ignored border": drawn(1, None, 255),
    "one dark class in a palette": with_palette(drawn(8, mode="P"), *VOC),
    "one class in a palette, with a border": with_palette(drawn(15, None, 255, mode="P"), *VOC),
    "one colour": drawn((0, 200, 0), mode="RGB"),
}
SOFT = {
    "smooth edges": smooth(),
    "smooth edges of a colour": Image.composite(Image.new("RGB", SIZE, "red"), Image.new("RGB", SIZE), smooth()),
    "feathered": drawn(255).filter(ImageFilter.GaussianBlur(3)),
    "scaled up": drawn(255).resize((48, 36)).resize(SIZE),
    **{f"JPEG {quality}": reopened(drawn(255, shape="ellipse"), quality) for quality in (30, 75, 95)},
    "red in JPEG": reopened(drawn("red", mode="RGB"), 75),
}
REFUSED = {
    "one small class number": (drawn(5), "0, 5"),
    "two class numbers": (drawn(1, 2), "0, 1, 2"),
    "class numbers without 0": (Image.fromarray(np.where(truth(), 130, 3).astype(np.uint8)), "3, 130"),
    "a class number and a border": (drawn(5, None, 255), "0, 5, 255"),
    "classes in a palette": (with_palette(drawn(15, 8, 255, mode="P"), *VOC), "0, 8, 15, 255"),
    "a border alone in a palette": (with_palette(drawn(None, None, 255, mode="P"), *VOC), "0, 255"),
    "a trimap": (drawn(255, 128), "0, 128, 255"),
    "instances": (numbered(40, np.uint8), "0, 1, 2, 3, 4, 5, 6, 7, ... (40 in all)"),
    "instances of 16 bits": (Image.fromarray(np.asarray(drawn(1, 2), np.uint16) * 1000 + 24000), "24000, 25000, 26000"),
    "light instances": (Image.fromarray(np.asarray(numbered(90, np.uint16)) * 700), "0, 700, 1400"),
    "classes as colours": (drawn(VOC[15], VOC[8], mode="RGB"), "the colours (0, 0, 0), (64, 0, 0), (192, 128, 128)"),
    "a border as a colour": (drawn(VOC[15], None, VOC[255], mode="RGB"), "(0, 0, 0), (192, 128, 128), (224, 224, 192)"),
    "panoptic colours": (panoptic(), "(60 in all)"),
}


@pytest.mark.parametrize("kind", SHARP)
def test_a_sharp_mask_is_read_exactly(kind):
    assert (read_mask(saved(SHARP[kind])).numpy() == truth()).all()


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("file", ["PNG", "JPEG"])
def test_a_soft_mask_is_cut_at_half_of_its_range(kind, file):
    mask = read_mask(saved(SOFT[kind], file)).numpy()
    wanted = truth("ellipse" if kind.startswith(("smooth", "JPEG")) else "rectangle")
    assert (mask & wanted).sum() / (mask | wanted).sum() > 0.9


@pytest.mark.parametrize("kind", REFUSED)
def test_classes_and_objects_are_refused_with_their_values(kind):
    image, values = REFUSED[kind]
    with pytest.raises(AmbiguousMaskError, match="nothing says which value is the object") as error:
        read_mask(saved(image))
    assert values in str(error.value)


def test_areas_of_several_kinds_are_refused_in_jpeg_too():
    for image in (drawn(255, 128), drawn("red", "lime", mode="RGB"), drawn(5, 9)):
        with pytest.raises(AmbiguousMaskError):
            read_mask(saved(image.resize((SIZE[0] * 4, SIZE[1] * 4), Image.Resampling.NEAREST), "JPEG", quality=90))


def test_what_was_taken_for_the_object_is_remarked():
    border = read_mask_image(saved(SHARP["0, 1 and an ignored border"]))
    assert "1 is taken as the object, and 255 as an ignored border" in border.remark
    palette = read_mask_image(saved(SHARP["one class in a palette, with a border"]))
    assert palette.label == 15
    assert "it is taken as the object, and 255 as an ignored border" in palette.remark
    assert read_mask_image(saved(drawn(255))).remark == ""


@pytest.mark.parametrize("kind", ["classes in a palette", "one small class number", "two class numbers"])
def test_a_value_chooses_the_object(kind):
    image = REFUSED[kind][0]
    value = image.getpixel(OBJECT[:2])
    assert (np.asarray(read_mask_image(saved(image), value).image) > 0).tolist() == truth().tolist()
    with pytest.raises(AmbiguousMaskError, match="no pixel has mask_value=77; the mask has the values 0, "):
        read_mask_image(saved(image), 77)
    with pytest.raises(AmbiguousMaskError, match="mask_value=1 needs a mask of one channel; the mask has the colours"):
        read_mask_image(saved(REFUSED["classes as colours"][0]), 1)


@given(st.lists(st.integers(1, 223), min_size=1, max_size=4, unique=True), st.booleans(), st.booleans())
def test_no_class_disappears_in_silence(labels, border, coloured):
    """Stripes of class numbers: the mask is exactly one of them, or the message has them all."""
    values = [0, *labels, *([255] if border else [])]
    pixels = np.repeat(np.array([values], np.uint8), 5, 1).repeat(6, 0)
    image = Image.fromarray(pixels)
    if coloured:
        image = with_palette(image, (0, 0, 0), *((number, 255 - number, 7) for number in range(1, 256)))
    known = len(labels) == 1 and (coloured or labels == [1] or (labels[0] > 127 and not border))
    if known:
        assert (read_mask(saved(image)).numpy() == (pixels == labels[0])).all()
    else:
        with pytest.raises(AmbiguousMaskError, match=", ".join(map(str, sorted(values)))):
            read_mask(saved(image))


def test_noise_without_an_area_of_one_value_is_cut_at_half(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    assert (read_mask(tmp_path / "noise.png").numpy() == (pixels > 127)).all()
