"""Boxes, points and masks of queries: what fits, and what is refused with both numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data.making import embedded, jsonl, parquet, picture
from tests.data.test_image_store import one, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.masks import read_mask
from visual_grpo.data.queries import require_fit
from visual_grpo.data.record import Rejected

WIDTH, HEIGHT = 160, 96
OBJECT = (34, 32, 73, 56)
"""Corners, which belong to it."""


def object_mask(corners=OBJECT, size=(WIDTH, HEIGHT)):
    pixels = np.zeros(size[::-1], bool)
    x1, y1, x2, y2 = corners
    pixels[y1 : y2 + 1, x1 : x2 + 1] = True
    return pixels


def refusal(box=None, points=None, pixels=None):
    with pytest.raises(Rejected) as rejected:
        require_fit(box, points, object_mask() if pixels is None else pixels)
    return rejected.value.message


@pytest.mark.parametrize(
    "box",
    [
        OBJECT,
        [34, 32, 74, 57],  # The end does not belong to it.
        [36, 34, 71, 54],  # Two pixels too tight,
        [32.5, 30.25, 75, 58],  # or loose,
        [0, 0, WIDTH, HEIGHT],  # however much.
    ],
)
def test_a_box_around_the_object_fits(box):
    require_fit(box, None, object_mask())


def test_stray_pixels_of_a_mask_do_not_count():
    pixels = object_mask()
    pixels[90, 150:153] = True
    require_fit(list(OBJECT), None, pixels)


X1, Y1, X2, Y2 = OBJECT
BOXES = {
    "[x, y, width, height] in pixels": (X1, Y1, X2 - X1 + 1, Y2 - Y1 + 1),
    "[centre x, centre y, width, height] in pixels": (54, 44.5, 40, 25),
    "[y1, x1, y2, x2] in pixels": (Y1, X1, Y2, X2),
    "[x1, y1, x2, y2] as fractions": (X1 / WIDTH, Y1 / HEIGHT, X2 / WIDTH, Y2 / HEIGHT),
    "[x, y, width, height] as fractions": (X1 / WIDTH, Y1 / HEIGHT, 40 / WIDTH, 25 / HEIGHT),
    "[centre x, centre y, width, height] as fractions": (54 / WIDTH, 44.5 / HEIGHT, 40 / WIDTH, 25 / HEIGHT),
    "[x1, y1, x2, y2] in thousandths": (212, 333, 456, 583),
    "[y1, x1, y2, x2] in thousandths": (333, 212, 583, 456),
}


@pytest.mark.parametrize("convention", BOXES)
def test_a_box_in_another_convention_is_refused_with_both_numbers_and_that(convention):
    box = list(BOXES[convention])
    message = refusal(box)
    assert message.startswith(
        f"box {box} does not contain the object, whose box in the mask is {list(OBJECT)}; read as"
    )
    assert f"read as {convention}" in message


def test_a_box_of_no_known_convention_is_refused_without_advice():
    message = refusal([90, 60, 120, 80])
    assert message == f"box [90, 60, 120, 80] does not contain the object, whose box in the mask is {list(OBJECT)}"


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([[1, 1], [2, 2]], "point [1, 1] lies outside the object, whose box in the mask is [34, 32, 73, 56]"),
        ([[40, 40], [120, 40]], "point [120, 40] lies outside the object, whose box in the mask is [34, 32, 73, 56]"),
        ([[0.3, 0.4], [0.4, 0.5]], "read as [x, y] as fractions of the image's size, it would fit"),
        ([[300, 400]], "read as [x, y] in thousandths of the image's size, it would fit"),
        ([[50, 70]], "read as [y, x] in pixels, it would fit"),
    ],
)
def test_a_point_outside_the_object_is_refused(points, said):
    assert said in refusal(points=points)


def test_a_point_may_miss_the_object_by_two_pixels():
    require_fit(None, [[32, 44], [54, 58]], object_mask())


@pytest.mark.parametrize(
    "box", [5, "1,2,3,4", [1, 2, 3], [1, 2, 3, "4"], [1, 2, 3, True], [1, 2, 3, math.nan], [1, 2, 3, 10**400]]
)
def test_what_is_no_box_is_refused(box):
    assert refusal(box).startswith("box must be [x1, y1, x2, y2]")


@pytest.mark.parametrize("points", [5, "a", [], [1, 2], [[1, 2, 3]], [[1, 2], [3]], [[1, 2], [3, "4"]], [None]])
def test_what_are_no_points_is_refused(points):
    assert refusal(points=points).startswith("points must be [[x, y], ...]")


@given(st.data())
def test_a_box_is_used_as_pixels_or_refused(data):
    """Whatever the convention, no accepted box cuts the object, and what is refused has both numbers."""
    x1, y1 = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 60))
    width, height = data.draw(st.integers(8, 59)), data.draw(st.integers(8, 35))
    corners = (x1, y1, x1 + width - 1, y1 + height - 1)
    x2, y2 = x1 + width, y1 + height
    given_boxes = {
        "pixels": [x1, y1, x2, y2],
        "width": [x1, y1, width, height],
        "centre": [x1 + width / 2, y1 + height / 2, width, height],
        "swapped": [y1, x1, y2, x2],
        "fractions": [x1 / WIDTH, y1 / HEIGHT, x2 / WIDTH, y2 / HEIGHT],
        "thousandths": [x1 * 1000 // WIDTH, y1 * 1000 // HEIGHT, x2 * 1000 // WIDTH, y2 * 1000 // HEIGHT],
    }
    convention = data.draw(st.sampled_from(sorted(given_boxes)))
    box = given_boxes[convention]
    # A box that leaves out a tenth of the object at a side is never taken; a pixel less at each side always is.
    margin = max(2, max(width, height) / 20)
    excess = max(box[0] - x1, box[1] - y1, x2 - 1 - box[2], y2 - 1 - box[3]) - margin
    if excess <= 0:
        require_fit(box, None, object_mask(corners))
    elif excess > 0.1 * max(width, height) + 1:
        message = refusal(box, pixels=object_mask(corners))
        assert f"box {box}" in message
        assert f"is {list(corners)}; read as" in message
        assert convention != "pixels"


def palette(*values):
    """A mask of class numbers in a coloured palette, an area each."""
    image = Image.fromarray(areas(*values))
    image.putpalette([0, 0, 0, *(channel for number in range(1, 256) for channel in (number, 255 - number, 7))])
    return image


def areas(*values):
    pixels = np.zeros((64, 64), np.uint8)
    for number, value in enumerate(values):
        pixels[8 + 16 * number : 20 + 16 * number, 12:24] = value
    return pixels


class TestMasks:
    """How the masks of a dataset are read, and what is said about them."""

    def prepare(self, folder, masks, **changes):
        """Prepares a folder of images, and of masks of a box."""
        (folder / "data/masks/box").mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(masks):
            picture(folder / f"data/images/{number}.png", (64, 64), (number, 0, 0))
            (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
                folder / f"data/masks/box/{number}.png"
            )
        return prepare(folder, height=64, width=64, **changes)

    def test_a_number_for_the_object_is_noted_on_every_run(self, tmp_path):
        for folder, found, noted in (
            ("border", [areas(1, 255), areas(1, 255), areas(1)], "with the values 0, 1 and 255: 1 is taken as the obj"),
            (
                "class",
                [palette(15, 255)] * 2,
                "with one class number in a palette: it is taken as the obj",
            ),
        ):
            for _ in range(2):  # The second finds the prepared files.
                table = self.prepare(tmp_path / folder, found)
                assert {int(read_mask(record.target_image).sum()) for record in table} == {12 * 12}
                assert table.report["warnings"][0].startswith(f"2 masks (such as masks/box/0.png) {noted}")

    def test_one_query_is_of_one_class(self, tmp_path):
        table = self.prepare(tmp_path, [palette(15), palette(8), palette(15)])
        (entry,) = table.report["rejected"]["listed"]
        assert (entry["file"], entry["reason"]) == ("masks/box/1.png", "ambiguous_mask")
        assert entry["message"] == "the object is stored as 8, and as 15 in an earlier mask of 'box'"
        assert "data.mask_value" in entry["remedy"]

    def test_the_object_is_chosen_by_a_parameter_or_a_record(self, tmp_path):
        masks = [areas(5, 9), palette(9, 5)]
        with pytest.raises(
            UserError, match=r"0\.png: nothing says which value .* has the values 0, 5, 9\. Give .* data\.m"
        ):
            self.prepare(tmp_path, masks)
        for value, top in ((5, [8, 24]), (9, [24, 8])):  # The second must not find the first's files.
            table = self.prepare(tmp_path, masks, mask_value=value)
            assert [record.metadata["box"][1] for record in table] == top
        rows = [
            {"image": "images/0.png", "query": f"b{n}", "mask": "masks/box/0.png", "mask_value": n} for n in (9, 5, "5")
        ]
        jsonl(tmp_path / "data/records.jsonl", rows)
        table = prepare(tmp_path, height=64, width=64, mask_value=9)
        assert [record.metadata["box"][1] for record in table] == [24, 8]
        (entry,) = table.report["rejected"]["listed"]
        assert entry["message"] == "mask_value must be a whole number, got '5'"

    def test_masks_in_a_table_are_read_like_files(self, tmp_path):
        row = {"image": embedded((64, 64))}
        values = {"one": (1,), "border": (1, 255), "classes": (5, 9), "white": (255,)}
        rows = [{**row, "text": name, "id": name, "mask": areas(*found).tolist()} for name, found in values.items()]
        soft = areas(1) * 0.9 + np.roll(areas(1), 16, 0) * 0.2
        rows.append({**row, "text": "soft", "id": "soft", "mask": soft.tolist()})
        parquet(tmp_path / "data/test.parquet", [{**row, "mask": np.float64(row["mask"]).tolist()} for row in rows])
        table = prepare(tmp_path, height=64, width=64)
        assert {record.id: int(read_mask(record.target_image).sum()) for record in table} == dict.fromkeys(
            ("one", "border", "white", "soft"), 12 * 12
        )
        (entry,) = table.report["rejected"]["listed"]
        assert entry["id"] == "classes"
        assert "the mask has the values 0, 5, 9" in entry["message"]

    @pytest.mark.parametrize(
        ("orientation", "size", "mask_orientation", "noted"),
        [
            (3, (48, 64), 1, True),
            (2, (48, 64), 1, True),
            (3, (48, 64), 3, False),
            (1, (48, 64), 1, False),
            (6, (48, 64), 1, False),
            (6, (64, 64), 1, True),
        ],
    )
    def test_an_image_that_is_turned_without_its_mask_is_noted(
        self, tmp_path, orientation, size, mask_orientation, noted
    ):
        """An image that is turned by 90 degrees fits its mask only if both are upright, unless it is square."""
        for folder, turned, colour in (("images", orientation, "red"), ("masks/box", mask_orientation, "black")):
            upright = size[::-1] if turned > 4 else size
            image = Image.new("RGB", upright, colour)
            image.paste("white", (4, 4, 20, 20))
            exif = image.getexif()
            exif[0x0112] = turned
            (tmp_path / "data" / folder).mkdir(parents=True)
            image.save(tmp_path / "data" / folder / "a.png", exif=exif)
        warnings = prepare(tmp_path, height=32, width=32).report["warnings"]
        wanted = "1 mask (such as masks/box/a.png) not rotated by EXIF, unlike their images: check that they show the"
        assert warnings == ([f"{wanted} upright images"] if noted else [])


def test_a_box_that_does_not_fit_rejects_its_record(tmp_path):
    rows = [one(tmp_path, id="good", box=[12, 8, 23, 31]), one(tmp_path, id="width", bbox=[12, 8, 12, 24])]
    jsonl(tmp_path / "data/records.jsonl", [*rows, one(tmp_path, id="point", points=[[1, 1]])])
    table = prepare(tmp_path)
    assert [record.id for record in table] == ["good"]
    listed = {entry["id"]: entry["reason"] for entry in table.report["rejected"]["listed"]}
    assert listed == {"width": "wrong_box", "point": "wrong_points"}
