"""Little images as PNG files, and a count of how often images are processed."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from trigon.models.load import Processors


class CountingProcessor:
    """A Hugging Face processor that counts its calls: one for each image, or pair of frames."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.processor(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)


def counting(processors: Processors) -> Processors:
    """Return the processors of a model with counts of the calls."""
    return replace(
        processors,
        image_processor=CountingProcessor(processors.image_processor),
        video_processor=processors.video_processor and CountingProcessor(processors.video_processor),
    )


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of seeded noise."""
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def png(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """Return a PNG file of seeded noise."""
    return encoded(noise(width, height, seed), "PNG")


def odd_files(width: int = 600, height: int = 500) -> dict[str, bytes]:
    """Return files whose stored pixels are not what a model sees: rotated, transparent, deep."""
    ramp = np.linspace(0, 1, width)[None] * np.linspace(0.2, 1, height)[:, None]
    photo = Image.fromarray((ramp[:, :, None] * [255, 128, 64]).astype(np.uint8))
    rotated = Image.Exif()
    rotated[ExifTags.Base.Orientation] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    grey = photo.convert("L")
    palette = photo.quantize(16)
    translucent = photo.copy()
    translucent.putalpha(grey)
    return {
        "EXIF": encoded(photo, "JPEG", exif=rotated),
        "XMP": encoded(photo, "JPEG", xmp=xmp),
        "RGBA": encoded(translucent, "PNG"),
        "LA": encoded(Image.merge("LA", (grey, grey)), "PNG"),
        "transparent RGB": encoded(photo, "PNG", transparency=photo.getpixel((9, 9))),
        "transparent L": encoded(grey, "PNG", transparency=grey.getpixel((9, 9))),
        "palette": encoded(palette, "PNG"),
        "transparent palette": encoded(palette, "PNG", transparency=3),
        "one bit": encoded(photo.convert("1"), "PNG"),
        "16-bit grey": encoded(Image.fromarray((ramp * 65535).astype(np.uint16)), "PNG"),
        "CMYK": encoded(photo.convert("CMYK"), "JPEG"),
    }


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()
