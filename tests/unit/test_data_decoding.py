"""The memory of decoded images: what one takes, what all threads take together, and bombs."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Collection

import numpy as np
import pytest
from PIL import Image, ImageCms

from trigon.data.images import BUDGET_BYTES, BYTES_PER_PIXEL, ByteBudget, decoding_bytes, image_size, open_image
from trigon.data.rows import UnusableRow

SIDE = 2600  # 6.8 MP: far above what else a process allocates meanwhile
PIXELS = SIDE * SIDE
ROTATED = Image.Exif()
ROTATED[0x0112] = 6

# Decodes each file in turn, and prints by how many bytes the resident memory rose at its peak.
MEASURE = """
import ctypes, sys
from PIL import Image
from trigon.data.images import open_image

def kb(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

def decode(name):
    with open(name, "rb") as file:
        open_image(file.read(), where=name, image_dir=None, max_pixels=10**9)

decode(sys.argv[1])  # loads the decoders
for name in sys.argv[2:]:
    Image.core.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)  # what was decoded before would be used again
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = kb("VmRSS")
    decode(name)
    print((kb("VmHWM") - before) * 1024)
"""


def plain(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.full((SIDE, SIDE), 300, np.uint16))
    image = Image.new(mode, (SIDE, SIDE), 1)
    if mode == "P":
        image.putpalette([1, 2, 3] * 256)
    return image


def bombs() -> dict[str, tuple[str, bytes]]:
    """Return the format and the content of files that are small, and large when decoded."""
    rgb, rgba, palette = plain("RGB"), plain("RGBA"), plain("P")
    several = {"save_all": True, "append_images": [plain("RGB")] * 2}
    files = {
        "rgb": (rgb, "PNG", {}),
        "rgba": (rgba, "PNG", {}),
        "grey and alpha": (plain("LA"), "PNG", {}),
        "16 bits": (plain("I;16"), "PNG", {}),
        "palette with alpha": (palette, "PNG", {"transparency": 0}),
        "animated png": (rgb, "PNG", several),
        "jpeg": (rgb, "JPEG", {}),
        "progressive jpeg": (rgb, "JPEG", {"progressive": True, "subsampling": 0}),
        "progressive cmyk": (plain("CMYK"), "JPEG", {"progressive": True, "subsampling": 0}),
        "several jpegs": (rgb, "MPO", several | {"progressive": True, "subsampling": 0}),
        "rotated jpeg": (rgb, "JPEG", {"exif": ROTATED}),
        "animated webp": (rgb, "WEBP", several),
        "lossless webp with alpha": (rgba, "WEBP", {"lossless": True}),
        "animated gif": (palette, "GIF", {"save_all": True, "append_images": [palette] * 2}),
        "gif with alpha": (palette, "GIF", {"transparency": 0}),
        "tiff with alpha": (rgba, "TIFF", {"compression": "tiff_deflate"}),
        "rotated tiff": (rgb, "TIFF", {"compression": "tiff_deflate", "exif": ROTATED}),
        "jpeg 2000 with alpha": (rgba, "JPEG2000", {}),
        "avif with alpha": (rgba, "AVIF", {"speed": 10}),
    }
    made = {}
    for name, (image, image_format, options) in files.items():
        stream = io.BytesIO()
        image.save(stream, image_format, **options)
        made[name] = (image_format, stream.getvalue())
    made["several cmyk"] = ("MPO", with_more_pictures(made["progressive cmyk"][1]))
    for name, (image_format, content) in made.items():
        with Image.open(io.BytesIO(content)) as opened:
            assert opened.format == image_format, name
    return made


def with_more_pictures(jpeg: bytes) -> bytes:
    """Return a JPEG with the segment by which Pillow takes it for one of several pictures."""
    small = Image.new("RGB", (8, 8))
    stream = io.BytesIO()
    small.save(stream, "MPO", save_all=True, append_images=[small])
    content = stream.getvalue()
    start = content.index(b"\xff\xe2")
    end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    return jpeg[:2] + content[start:end] + jpeg[2:]


@pytest.mark.extended
@pytest.mark.faults
def test_decoding_takes_no_more_memory_than_is_reserved_for_it(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not reset the peak of the resident memory (/proc/self/clear_refs)")
    small = tmp_path / "small.png"
    Image.new("RGBA", (8, 8)).save(small)
    made = bombs()
    for name, (_, content) in made.items():
        (tmp_path / name).write_bytes(content)
    allowance = 6 << 20  # strips, and what the allocator keeps
    reserved = {name: decoding_bytes(SIDE, SIDE, image_format) for name, (image_format, _) in made.items()}

    def above(names: Collection[str]) -> dict[str, int]:
        files = [str(tmp_path / name) for name in names]
        command = [sys.executable, "-c", MEASURE, str(small), *files]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        peaks.update(zip(names, map(int, result.stdout.split()), strict=True))
        return {name: peaks[name] / PIXELS for name in names if peaks[name] > reserved[name] + allowance}

    peaks: dict[str, int] = {}
    exceeding = above(made)
    for _ in range(2):
        # Pages of libraries that the kernel took from a busy machine's process come back while an
        # image is decoded, and count.
        exceeding = above(exceeding) if exceeding else {}
    assert exceeding == {}
    assert max(peaks.values()) > 4 * PIXELS  # it measures something


@pytest.mark.faults
@pytest.mark.parametrize(
    ("image_format", "mode", "accepted"),
    [("JPEG", "RGB", True), ("PNG", "RGBA", True), ("TIFF", "RGBA", True), ("WEBP", "RGB", False)],
)
def test_an_image_may_take_twelve_bytes_for_each_of_max_image_pixels(image_format, mode, accepted):
    stream = io.BytesIO()
    Image.new(mode, (100, 100)).save(stream, image_format)
    sources = {"where": "train:7/images/0", "image_dir": None, "max_pixels": 100 * 100}
    if accepted:
        assert image_size(stream.getvalue(), **sources) == (100, 100)
        return
    with pytest.raises(UnusableRow) as error:
        image_size(stream.getvalue(), **sources)
    assert error.value.reason == "image_pixels"
    assert str(error.value) == (
        "train:7/images/0: decoding 100 x 100 pixels of WEBP takes 200,000 bytes, more than 120,000, which are 12 for "
        "each of max_image_pixels=10,000"
    )


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(chunk: bytes, size: tuple[int, int] = (4, 4)) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress((b"\0" + b"\1\2\3" * 4) * 4))
    return b"\x89PNG\r\n\x1a\n" + header + chunk + pixels + png_chunk(b"IEND", b"")


def tiff_with_tiles(side: int) -> bytes:
    """Return a TIFF of 16 x 16 pixels, in one deflated tile of side x side."""
    tile = zlib.compress(b"\0" * (1 << 20))
    entries = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    entries += [(324, 8 + 2 + 12 * 10 + 4), (325, len(tile))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + struct.pack("<I", 0) + tile


def profile_of(size: int) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + b"\0" * size


HOSTILE = {
    "169 MP in a small file": png_chunk(b"IDAT", b""),
    "text of a GB": png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (1 << 26), 9)),
    "international text of a GB": png_chunk(b"iTXt", b"C\0\1\0\0\0" + zlib.compress(b"\0" * (1 << 26), 9)),
    "colour profile of a GB": png_chunk(b"iCCP", b"x\0\0" + zlib.compress(b"\0" * (1 << 26), 9)),
}


@pytest.mark.faults
def test_bombs_are_refused_or_decoded_within_the_memory_of_a_small_image(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not reset the peak of the resident memory (/proc/self/clear_refs)")
    files = {name: png_with(chunk) for name, chunk in HOSTILE.items()}
    files["169 MP in a small file"] = png_with(b"", (13_000, 13_000))
    files["a tile of 900 MB"] = tiff_with_tiles(30_000)
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 8)).save(jpeg, "JPEG", icc_profile=profile_of(1 << 23))
    files["jpeg with a profile of 8 MB"] = jpeg.getvalue()
    small = tmp_path / "small.png"
    Image.new("RGB", (8, 8)).save(small)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    program = MEASURE.replace("max_pixels=10**9", "max_pixels=64_000_000").replace(
        "    decode(name)\n    print", "    try:\n        decode(name)\n    except ValueError:\n        pass\n    print"
    )
    # UnusableRow is an error of this package: it is caught by its base class.
    program = program.replace("except ValueError", "except Exception")
    command = [sys.executable, "-c", program, str(small), *(str(tmp_path / name) for name in files)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    peaks = dict(zip(files, map(int, result.stdout.split()), strict=True))
    assert {name: peak for name, peak in peaks.items() if peak > 80 << 20} == {}


def by_the_whole_image(image: Image.Image) -> Image.Image:
    """Return what open_image did before it converted in strips."""
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "I;16", "RGB with a transparent colour", "L with one"])
def test_strips_give_the_pixels_of_the_whole_image(kind, monkeypatch):
    monkeypatch.setattr("trigon.system.images._STRIP_PIXELS", 100)
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
    found = open_image(stream.getvalue(), where="x", image_dir=None, max_pixels=10_000)
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


def test_the_largest_image_of_the_default_fits_into_the_budget():
    from trigon.config.schema import DataConfig

    assert BYTES_PER_PIXEL * DataConfig().max_image_pixels <= BUDGET_BYTES
