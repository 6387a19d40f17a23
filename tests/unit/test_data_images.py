"""Images of all formats, damaged ones too: size and decoded image agree, or both fail."""

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from trigon.data.images import encoded_image, file_for_display, image_size, open_image
from trigon.data.media_files import file_name
from trigon.data.rows import UnusableRow
from trigon.errors import BadRow

MAX_PIXELS = 1_000_000


def encoded(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def sample_image(width=6, height=4):
    """Return a red image with one blue pixel at the top left."""
    image = Image.new("RGB", (width, height), (255, 0, 0))
    image.putpixel((0, 0), (0, 0, 255))
    return image


def size(source, image_dir=None):
    return image_size(source, where="train:0/images/0", image_dir=image_dir, max_pixels=MAX_PIXELS)


def opened(source, image_dir=None):
    return open_image(source, where="train:0/images/0", image_dir=image_dir, max_pixels=MAX_PIXELS)


def file_of(source, image_dir=None):
    return encoded_image(source, where="train:0/images/0", image_dir=image_dir, max_pixels=MAX_PIXELS)


def rejection(source, image_dir=None):
    """Return (reason, message) of the error that decoding raises."""
    with pytest.raises(UnusableRow) as caught:
        opened(source, image_dir)
    assert isinstance(caught.value, BadRow)
    assert str(caught.value).startswith("train:0/images/0")
    return caught.value.reason, str(caught.value)


def pixels(image):
    return np.asarray(image).tolist()


# Sources


def test_every_type_of_source_gives_the_same_image(tmp_path):
    image = sample_image()
    data = encoded(image, "PNG")
    (tmp_path / "figure.png").write_bytes(data)
    sources = [
        image,
        data,
        {"bytes": data, "path": None},
        {"bytes": data, "path": "elsewhere.png"},
        {"bytes": None, "path": "figure.png"},
        "figure.png",
        Path("figure.png"),
        str(tmp_path / "figure.png"),
    ]
    for source in sources:
        assert size(source, tmp_path) == (6, 4)
        assert pixels(opened(source, tmp_path)) == pixels(image)


def test_opening_does_not_change_a_pil_image():
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    opened(image)
    assert image.mode == "RGBA"
    assert pixels(image) == [[[0, 0, 0, 0]] * 2] * 2


def test_the_file_name_of_an_image():
    assert file_name("figures/a.png") == "a.png"
    assert file_name({"bytes": b"...", "path": "b.png"}) == "b.png"
    assert file_name({"bytes": b"...", "path": None}) == ""
    assert file_name(b"...") == ""
    assert file_name(sample_image()) == ""


# Files


def test_the_encoded_file_is_returned_byte_for_byte(tmp_path):
    data = encoded(sample_image(), "JPEG", exif=b"Exif\x00\x00nonsense")
    (tmp_path / "figure.jpg").write_bytes(data)
    for source in (data, bytearray(data), {"bytes": data, "path": "elsewhere"}, {"path": "figure.jpg"}, "figure.jpg"):
        found = file_of(source, tmp_path)
        assert type(found) is bytes
        assert found == data


def image_from(data):
    return Image.open(io.BytesIO(data))


def pil_images():
    random = np.random.RandomState(0)
    noise = Image.fromarray(random.randint(0, 255, (12, 16, 3), dtype=np.uint8))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    return {
        "plain": noise,
        "rotated": image_from(encoded(noise, "JPEG", exif=rotated)),
        "with a colour profile": image_from(encoded(noise, "PNG", icc_profile=b"profile" * 100)),
        "one colour transparent": image_from(encoded(noise, "PNG", transparency=noise.getpixel((0, 0)))),
        "transparent": Image.fromarray(random.randint(0, 255, (12, 16, 4), dtype=np.uint8)),
        "palette, transparent": image_from(encoded(palette, "PNG", transparency=0)),
        "16 bits": Image.fromarray(random.randint(0, 65535, (4, 4), dtype=np.uint16)),
        "two frames": image_from(encoded(noise, "GIF", save_all=True, append_images=[noise.rotate(180)])),
    }


@pytest.mark.parametrize("kind", list(pil_images()))
def test_a_pil_image_is_encoded_to_a_file_that_decodes_to_the_same_image(kind):
    image = pil_images()[kind]
    expected = opened(image)
    found = file_of(image)
    assert size(found) == expected.size
    assert pixels(opened(found)) == pixels(expected)
    assert image.info == pil_images()[kind].info
    assert b"profile" not in found


def test_a_file_is_rejected_by_its_header(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "large.png").write_bytes(png_header(1001, 1001))
    expected = {
        "empty.png": "image_unreadable",
        "large.png": "image_pixels",
        "../large.png": "image_outside",
        "nowhere.png": "image_missing",
        b"not an image at all": "image_unreadable",
        encoded(Image.new("RGB", (200, 1)), "PNG"): "image_shape",
    }
    for source, reason in expected.items():
        with pytest.raises(UnusableRow) as caught:
            file_of(source, tmp_path)
        assert caught.value.reason == reason
        assert str(caught.value).startswith("train:0/images/0")


def test_encoding_a_file_does_not_decode_it():
    data = encoded(Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8)), "PNG")
    cut = data[: len(data) // 2]
    assert rejection(cut)[0] == "image_unreadable"
    assert file_of(cut) == cut


@pytest.mark.parametrize("source", [None, {"bytes": None, "path": None}, {}, "", 17, ["a.png"]])
def test_an_invalid_source_is_a_missing_image(tmp_path, source):
    assert rejection(source, tmp_path)[0] == "image_missing"


# Orientation


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "expected_size", "blue_at"),
    [
        (1, (6, 4), (0, 0)),
        (2, (6, 4), (5, 0)),
        (3, (6, 4), (5, 3)),
        (4, (6, 4), (0, 3)),
        (5, (4, 6), (0, 0)),
        (6, (4, 6), (3, 0)),
        (7, (4, 6), (3, 5)),
        (8, (4, 6), (0, 5)),
        (99, (6, 4), (0, 0)),
    ],
)
def test_exif_orientation_applies_to_image_and_size(format, orientation, expected_size, blue_at):
    # Scaled up, so that the corner has JPEG blocks of 8 x 8 pixels of its own.
    image = sample_image().resize((96, 64), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = orientation
    source = encoded(image, format, exif=exif)
    width, height = expected_size
    assert size(source) == (16 * width, 16 * height)
    upright = opened(source)
    assert upright.size == (16 * width, 16 * height)
    red, _, blue = upright.getpixel((16 * blue_at[0] + 8, 16 * blue_at[1] + 8))
    assert blue > 200
    assert red < 50


def test_an_image_with_damaged_exif_data_is_usable():
    source = encoded(sample_image(), "JPEG", exif=b"Exif\x00\x00nonsense")
    assert size(source) == (6, 4)
    assert opened(source).size == (6, 4)


# Colours


def test_transparency_becomes_white():
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 0), (255, 0, 0, 255), (0, 0, 0, 51)])
    assert pixels(opened(encoded(image, "PNG"))) == [[[255, 255, 255], [255, 0, 0], [204, 204, 204]]]


def test_a_transparent_palette_becomes_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    assert pixels(opened(encoded(image, "PNG", transparency=0))) == [[[255, 255, 255], [40, 50, 60]]]


def test_sixteen_bit_grey_keeps_its_range():
    image = Image.fromarray(np.array([[0, 0x0100, 0x80FF, 0xFFFF]], dtype=np.uint16))
    expected = [[[0] * 3, [1] * 3, [128] * 3, [255] * 3]]
    assert pixels(opened(encoded(image, "PNG"))) == expected
    assert pixels(opened(encoded(image, "TIFF"))) == expected


@pytest.mark.parametrize(
    ("mode", "format"), [("1", "PNG"), ("L", "JPEG"), ("LA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG")]
)
def test_every_mode_becomes_rgb(mode, format):
    source = encoded(Image.new("RGB", (6, 4), "white").convert(mode), format)
    assert size(source) == (6, 4)
    image = opened(source)
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_pixels_without_a_defined_white_value_are_rejected():
    for image in (Image.new("F", (2, 2)), Image.new("I", (2, 2), 70_000)):
        reason, message = rejection(encoded(image, "TIFF"))
        assert reason == "image_unreadable"
        assert "white value is not defined" in message


def test_the_first_frame_of_an_animation_is_used():
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    source = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert size(source) == (3, 3)
    assert opened(source).getpixel((0, 0)) == (255, 0, 0)


# Damage


def test_unreadable_images_are_rejected(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    for source in (b"", b"not an image at all", encoded(sample_image(), "PNG")[:20], "empty.png"):
        assert rejection(source, tmp_path)[0] == "image_unreadable"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_image_is_rejected_when_decoded(format):
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8))
    source = encoded(noise, format)
    assert opened(source).size == (64, 64)
    assert rejection(source[: len(source) // 2])[0] == "image_unreadable"


def test_damaged_bytes_are_rejected_or_have_the_same_size_when_decoded():
    """A thousand images with a few changed bytes raise no other error than UnusableRow."""
    random = np.random.RandomState(0)
    noise = Image.fromarray(random.randint(0, 255, (12, 16, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    originals = [encoded(noise, format, exif=exif) for format in ("JPEG", "PNG", "WEBP")]
    originals += [encoded(noise, format) for format in ("GIF", "BMP", "PPM", "JPEG2000")]
    decoded = rejected = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged EXIF blocks
        for trial in range(1000):
            damaged = bytearray(originals[trial % len(originals)])
            for _ in range(random.randint(1, 5)):
                damaged[random.randint(min(len(damaged), 200))] = random.randint(256)
            try:
                image = opened(bytes(damaged))
            except UnusableRow:
                rejected += 1
            else:
                decoded += 1
                assert image.mode == "RGB"
                assert image.size == size(bytes(damaged))
    assert decoded > 50
    assert rejected > 50


def test_other_formats_are_never_tried():
    assert rejection(encoded(sample_image(), "EPS"))[0] == "image_unreadable"
    assert rejection(encoded(sample_image(), "PDF"))[0] == "image_unreadable"


# Size


def png_header(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [1001, 10_000, 13_000, 60_000])
def test_huge_images_are_rejected_from_their_header(side):
    """Above max_image_pixels, and above the two limits at which Pillow warns and raises."""
    with pytest.raises(UnusableRow) as caught:
        size(png_header(side, side))
    assert caught.value.reason == "image_pixels"
    assert rejection(png_header(side, side))[0] == "image_pixels"


def test_the_pixel_limit_itself_is_allowed():
    assert size(png_header(1000, 1000)) == (1000, 1000)
    reason, message = rejection(png_header(1000, 1001))
    assert reason == "image_pixels"
    assert "1000 x 1001 = 1,001,000 pixels, more than max_image_pixels=1,000,000" in message


def test_an_image_of_one_pixel_is_accepted():
    assert size(encoded(Image.new("RGB", (1, 1)), "PNG")) == (1, 1)


def test_images_of_a_large_aspect_ratio_are_rejected():
    assert size(encoded(Image.new("RGB", (199, 1)), "PNG")) == (199, 1)
    assert rejection(encoded(Image.new("RGB", (200, 1)), "PNG"))[0] == "image_shape"
    assert rejection(Image.new("RGB", (1, 10_000)))[0] == "image_shape"


# Paths


def test_a_missing_file_is_named(tmp_path):
    reason, message = rejection("nowhere.png", tmp_path)
    assert reason == "image_missing"
    assert str(tmp_path / "nowhere.png") in message
    assert rejection("", tmp_path)[0] == "image_missing"
    assert rejection(".", tmp_path)[0] == "image_missing"
    assert rejection("a\0b.png", tmp_path)[0] == "image_missing"
    assert rejection("x" * 5000, tmp_path)[0] == "image_missing"


def test_paths_outside_the_image_folder_are_rejected(tmp_path):
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    outside = tmp_path / "secret.png"
    outside.write_bytes(encoded(sample_image(), "PNG"))
    (folder / "link.png").symlink_to(outside)
    (folder / "inner" / "own.png").write_bytes(encoded(sample_image(), "PNG"))
    for reference in (str(outside), "../secret.png", "inner/../../secret.png", "link.png", "/etc/passwd"):
        assert rejection(reference, folder)[0] == "image_outside"
        assert rejection({"bytes": None, "path": reference}, folder)[0] == "image_outside"
    assert size("inner/../inner/own.png", folder) == (6, 4)


def test_a_linked_image_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "figure.png").write_bytes(encoded(sample_image(), "PNG"))
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    assert size("figure.png", tmp_path / "linked") == (6, 4)


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "file:///etc/passwd", "s3://bucket/a.png", "data:image/png;base64,"]
)
def test_urls_are_rejected(tmp_path, url):
    reason, message = rejection(url, tmp_path)
    assert reason == "image_outside"
    assert "is a URL" in message


def test_without_an_image_folder_no_path_is_read(tmp_path):
    (tmp_path / "figure.png").write_bytes(encoded(sample_image(), "PNG"))
    assert rejection(str(tmp_path / "figure.png"))[0] == "image_outside"


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would block
    assert rejection("pipe.png", tmp_path)[0] == "image_missing"


def test_a_small_file_is_displayed_as_it_is(tmp_path):
    file = encoded(Image.new("RGB", (20, 10), "red"), "PNG")
    assert file_for_display(file, max_bytes=len(file), max_side=5, where="x") == (file, ".png")


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "BMP"])
def test_a_large_file_is_reduced_for_display(image_format):
    noise = np.random.default_rng(0).integers(0, 256, (400, 200, 3), dtype=np.uint8)
    file = encoded(Image.fromarray(noise), image_format)
    reduced, suffix = file_for_display(file, max_bytes=1000, max_side=100, where="x")
    assert suffix == ".jpg"
    with Image.open(io.BytesIO(reduced)) as image:
        assert (image.format, image.size) == ("JPEG", (50, 100))


def test_a_format_that_browsers_do_not_show_is_converted_and_turned_upright():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = encoded(Image.new("RGB", (20, 10), "red"), "JPEG2000")
    content, suffix = file_for_display(file, max_bytes=10**6, max_side=100, where="x")
    assert suffix == ".jpg"
    turned = encoded(Image.new("RGB", (300, 100), "red"), "JPEG", exif=exif, quality=100)
    content, _ = file_for_display(turned, max_bytes=10, max_side=90, where="x")
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (30, 90)


def test_a_file_that_reducing_would_enlarge_is_kept():
    file = encoded(Image.new("P", (64, 64)), "PNG")
    assert file_for_display(file, max_bytes=10, max_side=64, where="x") == (file, ".png")
