"""Little images as PNG files."""

from __future__ import annotations

import io

import numpy as np
from PIL import ExifTags, Image


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
