"""Images of all formats, damaged ones too: size and decoded image agree, or both fail."""

import io
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from support.images import encoded
from trigon.config.schema import DataConfig
from trigon.data.images import (
    BUDGET_BYTES,
    BYTES_PER_PIXEL,
    ByteBudget,
    OpenedFile,
    decoding_bytes,
    encoded_image,
    file_for_display,
    image_content,
    image_size,
    open_image,
)
from trigon.data.media_files import MediaSource
from trigon.data.rows import UnusableRow
from trigon.errors import BadRow
from trigon.system.image_formats import FORMATS, image_suffixes, read_image

MAX_PIXELS = 1_000_000


def sample_image(width=6, height=4):
    """Return a red image with one blue pixel at the top left."""
    image = Image.new("RGB", (width, height), (255, 0, 0))
    image.putpixel((0, 0), (0, 0, 255))
    return image


def size(source, image_dir=None):
    return image_size(MediaSource(source, "train:0/images/0", MAX_PIXELS, image_dir))


def opened(source, image_dir=None):
    return open_image(MediaSource(source, "train:0/images/0", MAX_PIXELS, image_dir))


def file_of(source, image_dir=None):
    return encoded_image(MediaSource(source, "train:0/images/0", MAX_PIXELS, image_dir))


def rejection(source, image_dir=None):
    """Return (reason, message) of the error that decoding raises."""
    with pytest.raises(UnusableRow) as caught:
        opened(source, image_dir)
    assert isinstance(caught.value, BadRow)
    assert str(caught.value).startswith("train:0/images/0")
    return caught.value.reason, str(caught.value)


def pixels(image):
    return np.asarray(image).tolist()


def test_a_file_is_rejected_by_its_header(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "large.png").write_bytes(png_with(size=(1001, 1001)))
    (tmp_path / "own.png").write_bytes(encoded(sample_image(), "PNG"))
    os.mkfifo(tmp_path / "pipe.png")  # opening it would block
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8))
    cut = encoded(noise, "PNG")[:3000]
    for source, reason in (
        ("empty.png", "image_unreadable"),
        (b"", "image_unreadable"),
        (b"not an image at all", "image_unreadable"),
        (encoded(sample_image(), "EPS"), "image_unreadable"),  # other formats are never tried
        (encoded(sample_image(), "PDF"), "image_unreadable"),
        ("large.png", "image_pixels"),
        (encoded(Image.new("RGB", (200, 1)), "PNG"), "image_shape"),
        (Image.new("RGB", (1, 10_000)), "image_shape"),
        *((source, "image_missing") for source in (None, {"bytes": None, "path": None}, {}, "", 17, ["a.png"])),
        *((path, "image_missing") for path in ("nowhere.png", ".", "a\0b.png", "x" * 5000, "pipe.png")),
        *((url, "image_outside") for url in ("https://a.org/a.png", "file:///etc/passwd", "s3://b/a.png", "data:,")),
    ):
        assert rejection(source, tmp_path)[0] == reason
        with pytest.raises(UnusableRow, match=r"^train:0/images/0") as caught:
            file_of(source, tmp_path)
        assert caught.value.reason == reason
    assert str(tmp_path / "nowhere.png") in rejection("nowhere.png", tmp_path)[1]
    assert "is a URL" in rejection("https://example.org/a.png", tmp_path)[1]
    assert rejection(str(tmp_path / "own.png"))[0] == "image_outside"  # no path without an image folder
    assert size(encoded(Image.new("RGB", (199, 1)), "PNG")) == (199, 1)
    assert size(encoded(Image.new("RGB", (1, 1)), "PNG")) == (1, 1)
    assert rejection(cut)[0] == "image_unreadable"
    assert file_of(cut) == cut  # which does not decode it


# Orientation


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
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


# Colours


def palette(*values):
    image = Image.new("P", (len(values), 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata(values)
    return image


def rgba():
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 0), (255, 0, 0, 255), (0, 0, 0, 51)])
    return image


GREY16 = Image.fromarray(np.array([[0, 0x0100, 0x80FF, 0xFFFF]], dtype=np.uint16))
RED, BLUE = (Image.new("RGB", (1, 1), colour) for colour in ("red", "blue"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (encoded(rgba(), "PNG"), [[255, 255, 255], [255, 0, 0], [204, 204, 204]]),
        (encoded(palette(0, 1), "PNG", transparency=0), [[255, 255, 255], [40, 50, 60]]),
        (encoded(GREY16, "PNG"), [[0] * 3, [1] * 3, [128] * 3, [255] * 3]),
        (encoded(GREY16, "TIFF"), [[0] * 3, [1] * 3, [128] * 3, [255] * 3]),
        (encoded(RED, "GIF", save_all=True, append_images=[BLUE]), [[255, 0, 0]]),  # the first frame
        *(
            (encoded(Image.new("RGB", (2, 1), "white").convert(mode), form), [[255] * 3] * 2)
            for mode, form in [("1", "PNG"), ("L", "JPEG"), ("LA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG")]
        ),
    ],
)
def test_every_mode_becomes_rgb_on_white(source, expected):
    assert size(source) == (len(expected), 1)
    assert opened(source).mode == "RGB"
    assert pixels(opened(source)) == [expected]


def test_pixels_without_a_defined_white_value_are_rejected():
    for image in (Image.new("F", (2, 2)), Image.new("I", (2, 2), 70_000)):
        reason, message = rejection(encoded(image, "TIFF"))
        assert reason == "image_unreadable"
        assert "white value is not defined" in message


# Damage


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_image_is_rejected_when_decoded(format):
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8))
    source = encoded(noise, format)
    assert opened(source).size == (64, 64)
    assert rejection(source[: len(source) // 2])[0] == "image_unreadable"


# Size and paths


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(chunk=b"", size=(4, 4)):
    """Return a PNG file of 4 x 4 pixels, whose header may say another size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress((b"\0" + b"\1\2\3" * 4) * 4))
    return b"\x89PNG\r\n\x1a\n" + header + chunk + pixels + png_chunk(b"IEND", b"")


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [1001, 13_000, 60_000])
def test_huge_images_are_rejected_from_their_header(side):
    """Above max_image_pixels, and above the two limits at which Pillow warns and raises."""
    file = png_with(size=(side, side))
    with pytest.raises(UnusableRow) as caught:
        size(file)
    assert caught.value.reason == rejection(file)[0] == "image_pixels"
    limit = "above the limit of Pillow" if side == 60_000 else f"{side} x {side} = {side**2:,} pixels, more than max_im"
    assert limit in str(caught.value)
    assert size(png_with(size=(1000, 1000))) == (1000, 1000)


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


def test_a_large_file_is_reduced_for_display_and_turned():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 200, 3), dtype=np.uint8))
    for image_format in ("PNG", "BMP"):
        reduced, suffix = file_for_display(encoded(noise, image_format), max_bytes=1000, max_side=100, where="x")
        with Image.open(io.BytesIO(reduced)) as image:
            assert (suffix, image.format, image.size) == (".jpg", "JPEG", (50, 100))
    small = encoded(Image.new("RGB", (20, 10), "red"), "PNG")
    assert file_for_display(small, max_bytes=len(small), max_side=5, where="x") == (small, ".png")
    flat = encoded(Image.new("P", (64, 64)), "PNG")  # reducing would enlarge it
    assert file_for_display(flat, max_bytes=10, max_side=64, where="x") == (flat, ".png")
    unshown = encoded(Image.new("RGB", (20, 10), "red"), "JPEG2000")
    assert file_for_display(unshown, max_bytes=10**6, max_side=100, where="x")[1] == ".jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = encoded(Image.new("RGB", (300, 100), "red"), "JPEG", exif=exif, quality=100)
    content, _ = file_for_display(turned, max_bytes=10, max_side=90, where="x")
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (30, 90)


# The memory of decoded images: what one takes, what all threads take together, and bombs

SIDE = 2600  # 6.8 MP: far above what else a process allocates meanwhile
PIXELS = SIDE * SIDE
ROTATED = Image.Exif()
ROTATED[0x0112] = 6

# Decodes each file in turn, and prints by how many bytes the resident memory rose at its peak.
MEASURE = """
import ctypes, sys
from contextlib import suppress
from PIL import Image
from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.data.rows import UnusableRow

def kb(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

def decode(name):
    with open(name, "rb") as file, suppress(UnusableRow):
        open_image(MediaSource(file.read(), name, max_pixels=int(sys.argv[1])))

decode(sys.argv[2])  # loads the decoders
for name in sys.argv[3:]:
    Image.core.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)  # what was decoded before would be used again
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kb("VmRSS")
    decode(name)
    print((kb("VmHWM") - before) * 1024)
"""


def measured(folder: Path, files: dict[str, bytes], *, max_pixels: int) -> dict[str, int]:
    """Return the bytes that decoding each file takes, or refusing it."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not reset the peak of the resident memory (/proc/self/clear_refs)")
    for name, content in {"small.png": encoded(Image.new("RGBA", (8, 8)), "PNG"), **files}.items():
        (folder / name).write_bytes(content)
    paths = [str(folder / name) for name in ("small.png", *files)]
    command = [sys.executable, "-c", MEASURE, str(max_pixels), *paths]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return dict(zip(files, map(int, result.stdout.split()), strict=True))


def plain(mode: str) -> Image.Image:
    image = Image.new(mode, (SIDE, SIDE), 1)
    if mode == "P":
        image.putpalette([1, 2, 3] * 256)
    return image


def test_each_format_that_is_read_has_known_suffixes(tmp_path):
    common = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
    assert set(common) <= set(image_suffixes())
    assert not {".eps", ".pdf", ".mp4", ".svg", ""} & set(image_suffixes())
    read = set()
    for suffix in common:
        path = tmp_path / f"image{suffix}"
        sample_image().save(path)
        assert read_image(str(path)).size == (6, 4), suffix
        with Image.open(path) as image:
            read.add(image.format)
    assert read == set(FORMATS)


def bombs() -> dict[str, tuple[str, bytes]]:
    """Return the format and the content of files that are small, and large when decoded."""
    rgb, rgba, palette = plain("RGB"), plain("RGBA"), plain("P")
    several = {"save_all": True, "append_images": [plain("RGB")] * 2}
    files = {
        "rgba": (rgba, "PNG", {}),
        "grey and alpha": (plain("LA"), "PNG", {}),
        "palette with alpha": (palette, "PNG", {"transparency": 0}),
        "progressive jpeg": (rgb, "JPEG", {"progressive": True, "subsampling": 0}),
        "progressive cmyk": (plain("CMYK"), "JPEG", {"progressive": True, "subsampling": 0}),
        "several jpegs": (rgb, "MPO", several | {"progressive": True, "subsampling": 0}),
        "rotated jpeg": (rgb, "JPEG", {"exif": ROTATED}),
        "animated webp": (rgb, "WEBP", several),
        "lossless webp with alpha": (rgba, "WEBP", {"lossless": True}),
        "gif with alpha": (palette, "GIF", {"transparency": 0}),
        "tiff with alpha": (rgba, "TIFF", {"compression": "tiff_deflate"}),
        "rotated tiff": (rgb, "TIFF", {"compression": "tiff_deflate", "exif": ROTATED}),
        "jpeg 2000 with alpha": (rgba, "JPEG2000", {}),
        "avif with alpha": (rgba, "AVIF", {"speed": 10}),
    }
    made = {
        name: (image_format, encoded(image, image_format, **options))
        for name, (image, image_format, options) in files.items()
    }
    made["several cmyk"] = ("MPO", with_more_pictures(made["progressive cmyk"][1]))
    for name, (image_format, content) in made.items():
        with Image.open(io.BytesIO(content)) as opened:
            assert opened.format == image_format, name
    return made


def with_more_pictures(jpeg: bytes) -> bytes:
    """Return a JPEG with the segment by which Pillow takes it for one of several pictures."""
    small = Image.new("RGB", (8, 8))
    content = encoded(small, "MPO", save_all=True, append_images=[small])
    start = content.index(b"\xff\xe2")
    end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    return jpeg[:2] + content[start:end] + jpeg[2:]


@pytest.mark.extended
@pytest.mark.faults
def test_decoding_takes_no_more_memory_than_is_reserved_for_it(tmp_path):
    made = bombs()
    files = {name: content for name, (_, content) in made.items()}
    allowed = {
        name: decoding_bytes(SIDE, SIDE, image_format) + (6 << 20)  # strips, and what the allocator keeps
        for name, (image_format, _) in made.items()
    }
    highest = 0
    for _ in range(3):
        # Pages of libraries that the kernel took from a busy machine's process come back while an
        # image is decoded, and count: those that exceed are measured again.
        peaks = measured(tmp_path, files, max_pixels=10**9)
        highest = max(highest, *peaks.values())
        files = {name: files[name] for name, peak in peaks.items() if peak > allowed[name]}
        if not files:
            break
    assert list(files) == []
    assert highest > 4 * PIXELS  # it measures something


@pytest.mark.faults
def test_an_image_may_take_twelve_bytes_for_each_of_max_image_pixels():
    for mode, image_format in (("RGB", "JPEG"), ("RGBA", "PNG"), ("RGBA", "TIFF"), ("RGB", "WEBP")):
        file = encoded(Image.new(mode, (100, 100)), image_format)
        source = MediaSource(file, "train:7/images/0", max_pixels=100 * 100)
        if image_format != "WEBP":
            assert image_size(source) == (100, 100)
    with pytest.raises(UnusableRow) as error:
        image_size(source)
    assert error.value.reason == "image_pixels"
    for fact in ("100 x 100 pixels of WEBP", "200,000 bytes", "120,000", "max_image_pixels=10,000"):
        assert fact in str(error.value)


def tiff_with_tiles(side: int) -> bytes:
    """Return a TIFF of 16 x 16 pixels, in one deflated tile of side x side."""
    tile = zlib.compress(b"\0" * (1 << 20))
    entries = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    entries += [(324, 8 + 2 + 12 * 10 + 4), (325, len(tile))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + struct.pack("<I", 0) + tile


def hostile_files() -> dict[str, bytes]:
    """Return small PNG files with chunks of much memory."""
    zeros = zlib.compress(b"\0" * (1 << 26), 9)
    chunks = {
        "text of a GB": (b"zTXt", b"Comment\0\0"),
        "international text of a GB": (b"iTXt", b"C\0\1\0\0\0"),
        "colour profile of a GB": (b"iCCP", b"x\0\0"),
    }
    return {name: png_with(png_chunk(kind, start + zeros)) for name, (kind, start) in chunks.items()}


@pytest.mark.faults
def test_bombs_are_refused_or_decoded_within_the_memory_of_a_small_image(tmp_path):
    files = hostile_files()
    files["169 MP in a small file"] = png_with(size=(13_000, 13_000))
    files["a tile of 900 MB"] = tiff_with_tiles(30_000)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + b"\0" * (1 << 23)
    files["jpeg with a profile of 8 MB"] = encoded(Image.new("RGB", (8, 8)), "JPEG", icc_profile=profile)
    peaks = measured(tmp_path, files, max_pixels=64_000_000)
    assert {name: peak for name, peak in peaks.items() if peak > 80 << 20} == {}


def by_the_whole_image(image: Image.Image) -> Image.Image:
    """Return what open_image did before it converted in strips."""
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "I;16", "RGB with a transparent colour", "L with one"])
def test_strips_give_the_pixels_of_the_whole_image(kind, monkeypatch):
    monkeypatch.setattr("trigon.system.image_formats._STRIP_PIXELS", 100)
    noise = np.random.default_rng(0).integers(0, 256, (37, 41, 4), dtype=np.uint8)
    options = {}
    match kind:
        case "I;16":
            image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
        case "P":
            image = Image.fromarray(noise[..., :3]).quantize(64)
            options = {"transparency": bytes(range(0, 256, 4))}
        case "RGB with a transparent colour":
            image, options = Image.fromarray(noise[..., :3] & 0xC0), {"transparency": (64, 128, 0)}
        case "L with one":
            image, options = Image.fromarray(noise[..., 0] & 0xF0), {"transparency": 0x40}
        case _:
            image = Image.fromarray(noise).convert(kind)
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    with Image.open(stream) as opened:
        opened.load()
        expected = by_the_whole_image(opened)
    found = open_image(MediaSource(stream.getvalue(), "x", max_pixels=10_000))
    assert found.mode == "RGB"
    assert found.tobytes() == expected.tobytes()


@pytest.mark.faults
def test_threads_share_the_budget_and_wait_in_order():
    budget = ByteBudget(100)
    running: list[int] = []
    most: list[int] = []
    order: list[int] = []
    lock = threading.Lock()

    def work(number: int, num_bytes: int) -> None:
        with budget.reserve(num_bytes):
            with lock:
                running.append(min(num_bytes, 100))
                order.append(number)
                most.append(sum(running))
            time.sleep(0.02)
            with budget.reserve(1000), lock:  # a thread that has some does not wait for itself
                running.remove(min(num_bytes, 100))

    with budget.reserve(100):
        threads = []
        for number, num_bytes in enumerate([60, 60, 500, 40, 40]):
            thread = threading.Thread(target=work, args=(number, num_bytes))
            thread.start()
            threads.append(thread)
            while len(budget._waiting) <= number:  # until it waits
                time.sleep(0.001)
    for thread in threads:
        thread.join(timeout=30)
    assert order == [0, 1, 2, 3, 4] or order == [0, 1, 2, 4, 3]
    assert max(most) == 100


@pytest.mark.faults
def test_memory_is_given_back_after_an_error():
    budget = ByteBudget(10)
    for _ in range(3):
        with pytest.raises(ValueError, match="damaged"), budget.reserve(10):
            raise ValueError("damaged")
    with budget.reserve(10):
        pass
    assert BYTES_PER_PIXEL * DataConfig().max_image_pixels <= BUDGET_BYTES  # the largest image of the default fits


def test_an_opened_file_that_no_row_may_have_is_its_own_content():
    whole = encoded(sample_image(), "PNG")
    empty_profile = b"\x00\x00\x00\x00iCCP" + struct.pack(">I", zlib.crc32(b"iCCP"))
    damaged = whole[:-12] + empty_profile + whole[-12:]  # Pillow raises IndexError at the end of its pixels
    for file in (damaged, encoded(sample_image(), "EPS"), encoded(sample_image(), "PCX")):  # EPS: Ghostscript
        assert image_content(OpenedFile(bytes=file, path=None)) == file
    assert image_content(OpenedFile(bytes=whole, path=None)) == image_content(sample_image())
