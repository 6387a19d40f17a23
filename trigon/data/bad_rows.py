"""The exception for a dataset row that cannot be used, with the reason why."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trigon.errors import BadRow

Reason = Literal[
    "encoding",
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
    "row_size",
    "vocabulary",
    "overlong",
]
"""Why a row is skipped.

encoding: a text is not UTF-8, or has half of a surrogate pair.
prompt: the text is missing, empty, or neither a text nor chat messages.
answer: the ground truth is missing.
markers: the numbers of markers and of images (or videos) differ.
media_tokens: the text contains a special token that stands for an image or a video.
image_missing: no such file. image_outside: a URL, or a path outside the image folder.
image_unreadable: not an image, truncated, or with an undefined colour range.
image_pixels: above max_image_pixels. image_shape: the aspect ratio is too large.
image_count: above limit_images.
video_*: the same for a video and its frames.
mixed_media: images and videos in one row.
row_size: more text in all columns than a reward function gets.
vocabulary: it has a token for which the model has no embedding.
overlong: above max_prompt_length, in tokens, or in characters by far.
"""

_MAX_MESSAGE = 1000
"""Characters of a message, which may quote the row; a longer one loses its middle."""


class UnusableRow(BadRow):
    """One row cannot be used, for the given reason.

    The message begins with the row or image it is about.

    folder: the folder that data.image_dir has to be for a file that is outside of it; None for
    other reasons, and where no folder would help. num_tokens, media_tokens: of an overlong prompt,
    and for its images or videos alone; 0 for others.
    """

    def __init__(
        self, reason: Reason, message: str, *, folder: Path | None = None, num_tokens: int = 0, media_tokens: int = 0
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - 200]} ... {message[-200:]}"
        super().__init__(message)
        self.reason: Reason = reason
        self.folder = folder
        self.num_tokens = num_tokens
        self.media_tokens = media_tokens
