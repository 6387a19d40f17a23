"""Samples as texts and tables, in the forms that loggers take."""

from __future__ import annotations

import base64
import html
import io
import re
import sys
from collections.abc import Callable, Sequence

from PIL import Image

from trigon.data.images import open_image
from trigon.data.media_files import MediaSource
from trigon.errors import BadRow
from trigon.report.delivery import MAX_IMAGE_SIDE, Sample
from trigon.report.rollouts import RolloutRow
from trigon.report.run_folder import ReadImages
from trigon.system.terminal import format_number, sanitize

COLUMNS = (
    "prompt_id",
    "sample",
    "prompt",
    "response",
    "ground_truth",
    "reward",
    "parts",
    "advantage",
    "finish_reason",
    "num_tokens",
)
"""The columns of a table of samples, besides the column of the images."""

MAX_CHARACTERS = 20_000


def make_samples(rows: Sequence[RolloutRow], read_images: ReadImages, *, warn: Callable[[str], None]) -> list[Sample]:
    """Return rows with the images of their prompts, decoded and reduced.

    A prompt whose images cannot be read has none, and warn is called with a message.
    """
    images: dict[str, tuple[Image.Image, ...]] = {}
    for row in rows:
        if row.prompt_id not in images:
            try:
                images[row.prompt_id] = tuple(map(_reduced, read_images(row.prompt_id) if row.images else ()))
            except BadRow as error:
                warn(f"the loggers do not get the images of {row.prompt_id}: {error}")
                images[row.prompt_id] = ()
    return [Sample(row, images[row.prompt_id]) for row in rows]


def _reduced(encoded: bytes) -> Image.Image:
    image = open_image(MediaSource(encoded, "image", max_pixels=sys.maxsize))
    image.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    return image


def cells(sample: Sample) -> list[str | float | None]:
    """Return the cells of COLUMNS. Control characters are shown as text; nothing is escaped."""
    row = sample.row
    parts = ", ".join(f"{name} {format_number(value)}" for name, value in sorted(row.parts.items()))
    return [
        _clean(row.prompt_id),
        row.sample,
        _clean(row.prompt),
        _clean(row.response),
        _clean(str(row.ground_truth)),
        row.reward,
        _clean(parts or row.error),
        row.advantage,
        row.finish_reason,
        row.num_tokens,
    ]


def image_strip(images: Sequence[Image.Image]) -> Image.Image | None:
    """Return images side by side as one, since not every table takes several in a cell.

    None if there are none.
    """
    if len(images) < 2:
        return images[0] if images else None
    gap = 4
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    strip = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        strip.paste(image, (left, 0))
        left += image.width + gap
    return strip


def as_text(samples: Sequence[Sample]) -> str:
    """Return samples as plain text, one block each."""
    blocks = []
    for sample in samples:
        lines = (f"{name}: {_shown(cell)}" for name, cell in zip(COLUMNS, cells(sample), strict=True))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def as_html(samples: Sequence[Sample]) -> str:
    """Return samples as an HTML table with their images in it. All text is escaped."""
    lines = ["<table border=1 style='border-collapse: collapse; font: 13px sans-serif'>"]
    lines.append("<tr>" + "".join(f"<th>{name}</th>" for name in ("images", *COLUMNS)) + "</tr>")
    for sample in samples:
        images = "".join(f"<img src='data:image/png;base64,{_base64(image)}'>" for image in sample.images)
        texts = "".join(
            f"<td style='white-space: pre-wrap; vertical-align: top'>{html.escape(_shown(cell))}</td>"
            for cell in cells(sample)
        )
        lines.append(f"<tr><td>{images}</td>{texts}</tr>")
    return "\n".join((*lines, "</table>"))


def one_per_prompt(samples: Sequence[Sample]) -> list[tuple[str, Image.Image]]:
    """Return the images of each prompt as one, with a name of letters, digits and -."""
    strips: dict[str, Image.Image] = {}
    for sample in samples:
        name = re.sub(r"[^A-Za-z0-9]+", "-", sample.row.prompt_id)
        strip = image_strip(sample.images)
        if strip is not None:
            strips.setdefault(name, strip)
    return list(strips.items())


def _clean(text: str) -> str:
    return sanitize(text, max_characters=MAX_CHARACTERS)


def _shown(cell: str | float | None) -> str:
    match cell:
        case None:
            return ""
        case str():
            return cell
        case _:
            return format_number(cell)


def _base64(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
