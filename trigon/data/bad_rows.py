"""Why a row of a dataset cannot be used: one exception that carries its reason. Knows no rows, no images."""

from __future__ import annotations

from typing import Literal

from trigon.errors import BadRow

Reason = Literal[
    "prompt",
    "answer",
    "markers",
    "media_tokens",
    "image_missing",
    "image_outside",
    "image_unreadable",
    "image_pixels",
    "image_shape",
    "image_count",
    "video_missing",
    "video_outside",
    "video_unreadable",
    "video_pixels",
    "video_shape",
    "mixed_media",
    "overlong",
]
"""Under which heading a row is set aside.

prompt: the text is missing, empty or not understood. answer: it has none. markers: as many as images, or as videos,
they are not. media_tokens: the text itself spells a token that stands for an image. image_missing: no such file.
image_outside: a path out of the image folder, or a URL. image_unreadable: no image, cut off, or its colours undefined.
image_pixels: above max_image_pixels. image_shape: too long and thin. image_count: above limit_images. video_*: the same
of a video and its frames. mixed_media: images and videos in one row. overlong: above max_prompt_length."""


class UnusableRow(BadRow):
    """One row cannot be used, for the given reason; the message begins with the row or the image it is about."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
