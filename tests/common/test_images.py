"""Reading images of every mode, resizing, and conversion to tensors."""

from __future__ import annotations

import errno
import io
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageDraw, ImageOps

from visual_grpo.common.images import (
    ImageError,
    TooManyPixelsError,
    fit,
    is_intact_png,
    pixel_limit,
    read_image,
    read_size,
    stretch,
    stretch_mask,
    to_pil,
    to_rgb,
    to_tensor,
)
from visual_grpo.common.machine_errors import machine_fault

COLOUR = (200, 100, 50)


def lab():
    return ImageCms.profileToProfile(
        Image.new("RGB", (4, 4), COLOUR),
        ImageCms.createProfile("sRGB"),
        ImageCms.createProfile("LAB"),
        outputMode="LAB",
    )


def palette_with_transparency(transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, *COLOUR])
    image.info["transparency"] = transparency
    return image


def with_transparent_colour(mode, colour):
    image = Image.new(mode, (4, 4), colour)
    image.info["transparency"] = colour
    return image


WHITE = (255, 255, 255)
GREY = (128, 128, 128)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (4, 4), 1), WHITE),
        (Image.new("L", (4, 4), 128), GREY),
        (Image.new("LA", (4, 4), (0, 0)), WHITE),
        (Image.new("LA", (4, 4), (128, 255)), GREY),
        (Image.new("RGB", (4, 4), COLOUR).convert("P", palette=Image.Palette.ADAPTIVE), COLOUR),
        (palette_with_transparency(1), WHITE),
        (palette_with_transparency(0), COLOUR),
        (palette_with_transparency(bytes([255, 0])), WHITE),
        (Image.new("RGBA", (4, 4), (*COLOUR, 255)).convert("PA"), COLOUR),
        (Image.new("RGB", (4, 4), COLOUR), COLOUR),
        (with_transparent_colour("RGB", COLOUR), WHITE),
        (with_transparent_colour("L", 7), WHITE),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 127)), GREY),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 127)).convert("RGBa"), GREY),
        (Image.new("RGBX", (4, 4), (*COLOUR, 0)), COLOUR),
        (Image.new("RGB", (4, 4), COLOUR).convert("CMYK"), COLOUR),
        (Image.new("RGB", (4, 4), COLOUR).convert("YCbCr"), COLOUR),
        (Image.new("RGB", (4, 4), COLOUR).convert("HSV"), COLOUR),
        (lab(), COLOUR),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_every_mode_gives_its_colour_with_transparency_over_white(image, expected):
    converted = to_rgb(image)
    assert converted.mode == "RGB"
    assert np.abs(np.asarray(converted)[0, 0].astype(int) - expected).max() <= 3


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        (np.array([[0, 32896, 65535]], np.uint16), "I;16", [0, 128, 255]),
        (np.array([[0, 100, 200]], np.uint16), "I;16", [0, 0, 1]),  # a dark 16-bit image stays dark
        (np.array([[0, 100, 255]], np.int32), "I", [0, 100, 255]),
        (np.array([[0, 32896, 65535]], np.int32), "I", [0, 128, 255]),
        (np.array([[-100, 0, 300]], np.int32), "I", [0, 64, 255]),
        (np.array([[0, 10**6, 2 * 10**6]], np.int32), "I", [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), "F", [0, 128, 255]),
        (np.array([[-0.02, 0.5, 1.02]], np.float32), "F", [0, 128, 255]),
        (np.array([[0, 0.75, 1.5]], np.float32), "F", [0, 1, 2]),
        (np.array([[0, 100, 255]], np.float32), "F", [0, 100, 255]),
        (np.array([[-1, 0, 3]], np.float32), "F", [0, 64, 255]),
        (np.array([[-7, -7, -7]], np.float32), "F", [0, 0, 0]),
    ],
)
def test_deep_images_are_scaled_to_8_bits(values, mode, expected):
    image = Image.fromarray(values)
    assert image.mode == mode
    assert np.asarray(to_rgb(image))[0].tolist() == [[value] * 3 for value in expected]


def test_a_big_endian_16_bit_tiff_is_read_in_its_own_byte_order(tmp_path):
    Image.frombytes("I;16B", (2, 1), bytes([0x80, 0x80, 0xFF, 0xFF])).save(tmp_path / "a.tif")
    assert np.asarray(read_image(tmp_path / "a.tif"))[0, :, 0].tolist() == [128, 255]


def test_a_float_image_with_nan_is_refused(tmp_path):
    Image.fromarray(np.array([[0, np.nan]], np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(ImageError, match="not finite"):
        read_image(tmp_path / "a.tif")


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def photo(orientation: int) -> Image.Image:
    """48x16, red on the left, as a camera would store it."""
    image = Image.new("RGB", (48, 16), "blue")
    image.paste("red", (0, 0, 24, 16))
    image.getexif()[0x0112] = orientation
    return image


def test_a_photo_with_orientation_6_is_turned_clockwise(tmp_path):
    image = photo(6)
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    upright = read_image(tmp_path / "a.jpg")
    assert upright.size == read_size(tmp_path / "a.jpg") == (16, 48)
    top, bottom = np.asarray(upright)[[8, 40], 8]
    assert top[0] > 200 > 50 > top[2]
    assert bottom[2] > 200 > 50 > bottom[0]


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_agrees_with_pillow(tmp_path, orientation):
    image = photo(orientation)
    image.putpixel((0, 0), (0, 255, 0))
    image.save(tmp_path / "a.png", exif=image.getexif())
    with Image.open(tmp_path / "a.png") as stored:
        expected = ImageOps.exif_transpose(stored)
    assert same(read_image(tmp_path / "a.png"), expected)
    assert read_size(tmp_path / "a.png") == expected.size


def test_a_tile_that_is_much_larger_than_its_image_is_refused(tmp_path):
    width, height, one_byte, offset = (256, 64), (257, 64), ((258, 8), (259, 1), (262, 1), (277, 1)), (324, 8)
    tags = [width, height, *one_byte, (322, 40_000), (323, 40_000), offset, (325, 64)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags))
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4))
    for read in (read_size, read_image):
        with pytest.raises(ImageError, match="its tiles are much larger than the image"):
            read(tmp_path / "a.tif")


def test_an_image_that_is_a_program_is_not_run(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", "EPS")
    with pytest.raises(ImageError, match=r"a\.png: is EPS, which only an external program can render"):
        read_image(tmp_path / "a.png")


def png(width: int, height: int) -> bytes:
    """A grey PNG of any size; of its rows only the first megabytes are there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(10_000_000), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def test_more_pixels_than_allowed_are_refused_by_the_header_alone(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(20_000, 20_000))
    with pytest.raises(TooManyPixelsError, match="too many pixels to be decoded safely"):
        read_size(tmp_path / "a.png")
    with pixel_limit(2 * 20_000 * 20_000):  # Pillow warns from half of it.
        assert read_size(tmp_path / "a.png") == (20_000, 20_000)
    with pytest.raises(TooManyPixelsError):
        read_size(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_invalid_exif_data_are_ignored(tmp_path):
    photo(1).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.jpg").size == (48, 16)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_the_first_frame_of_an_animation(tmp_path, suffix):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:])
    assert np.asarray(read_image(tmp_path / f"a{suffix}"))[9, 9, 0] > 200


def test_unreadable_files_say_what_is_wrong(tmp_path):
    (tmp_path / "empty.png").touch()
    for name, start in [
        ("phone.heic", b"\0\0\0\x18ftypheic"),
        ("phone.JPG", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"),
        ("avif.heic", b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif"),
        ("stream.png", b"\xff\n"),
        ("box.png", b"\0\0\0\x0cJXL \r\n\x87\n"),
    ]:
        (tmp_path / name).write_bytes(start + bytes(100))
    buffer = io.BytesIO()
    Image.effect_noise((256, 256), 80).save(buffer, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:5000])
    for name, message in [
        ("empty.png", r"empty.png: cannot be read as an image \(empty, damaged or in an unknown format\)"),
        ("phone.heic", "phone.heic: cannot be read as an image .HEIC and JPEG XL are not supported"),
        ("phone.JPG", "phone.JPG: cannot be read as an image .HEIC and JPEG XL are not supported"),
        ("avif.heic", "avif.heic: cannot be read as an image .empty, damaged"),
        ("stream.png", "HEIC and JPEG XL are not supported"),
        ("box.png", "HEIC and JPEG XL are not supported"),
        ("cut.jpg", r"cut.jpg: cannot be read as an image \(.*truncated"),
        ("none.png", "none.png: .*No such file"),
        (".", "Is a directory"),
    ]:
        with pytest.raises(ImageError, match=message):
            read_image(tmp_path / name)
    with (tmp_path / "phone.JPG").open("rb") as file, pytest.raises(ImageError, match="HEIC and JPEG XL are not"):
        read_image(file)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), *(OSError(number, os.strerror(number)) for number in (errno.EIO, errno.EMFILE, errno.ENFILE))],
    ids=repr,
)
def test_an_error_of_the_machine_is_not_taken_for_damage_and_names_the_picture(error):
    class Failing(io.BytesIO):
        name = "a.png"

        def read(self, size=-1):
            raise error

    with pytest.raises(type(error)) as raised:
        read_image(Failing())
    assert "While a.png was read." in str(machine_fault(raised.value))


def test_intact_png(tmp_path):
    path = tmp_path / "a.png"
    assert not is_intact_png(path)
    Image.effect_noise((64, 64), 80).save(path)
    assert is_intact_png(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert not is_intact_png(path)


@pytest.mark.parametrize("size", [(300, 100), (100, 300), (100, 100), (40, 50)])
def test_fit_covers_crops_the_centre_and_does_not_distort(size):
    image = Image.new("RGB", size, "white")
    middle = (size[0] / 2, size[1] / 2)
    ImageDraw.Draw(image).ellipse([middle[0] - 15, middle[1] - 15, middle[0] + 15, middle[1] + 15], "black")
    fitted = fit(image, height=96, width=64)
    assert fitted.size == (64, 96)
    dark = np.asarray(fitted.convert("L")) < 128
    wide, high = dark.any(0).sum(), dark.any(1).sum()
    assert abs(wide - high) <= 1
    assert wide == pytest.approx(31 * max(64 / size[0], 96 / size[1]), abs=2)
    assert np.argwhere(dark).mean(0) == pytest.approx([47.5, 31.5], abs=1)


def test_fit_leaves_an_image_of_the_right_size_alone():
    image = Image.effect_noise((64, 32), 80).convert("RGB")
    assert same(fit(image, height=32, width=64), image)


def test_tensors_are_channels_height_width_and_come_back():
    image = Image.new("RGB", (5, 3), COLOUR)
    image.putpixel((4, 0), (1, 2, 3))
    tensor = to_tensor(image)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (3, 3, 5)
    assert tensor.is_contiguous()
    assert tensor[:, 0, 4].tolist() == [1, 2, 3]
    assert same(to_pil(tensor), image)


def grey(values, dtype=np.uint8):
    return Image.fromarray(np.array([values], dtype))


def test_stretching_crops_nothing_and_keeps_a_mask_two_valued():
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (0, 0, 10, 20))
    wide = np.asarray(stretch(image, height=32, width=160))
    assert wide.shape == (32, 160, 3)
    assert (wide[:, :24] == (0, 0, 255)).all()
    assert (wide[:, 56:] == (255, 0, 0)).all()
    narrow = np.asarray(stretch_mask(grey([0, 0, 255, 255]), height=2, width=3))
    assert narrow.tolist() == [[0, 255, 255]] * 2
