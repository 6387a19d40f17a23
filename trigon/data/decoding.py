"""Bounds the memory of decoded images and video frames: of one, and of all threads together.

A file of some KB may decode to GBs. What decoding an image takes is known from its header: the
decoder's own buffers, the stored pixels, and the copies until they are RGB.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

BYTES_PER_PIXEL = 12
"""Times data.max_image_pixels, the bytes that decoding one image may take."""

BUDGET_BYTES = 2**30
"""What all threads of a process may take together. An image that takes more is decoded alone."""

# Bytes per pixel while an image of each format is decoded and made RGB, its 4 bytes per pixel as
# RGB included: the maxima over modes as tests/unit/test_data_decoding.py measures them.
# JPEG: all coefficients of a progressive file, likewise of a camera's file of several pictures
# (MPO); WebP, AVIF and JPEG 2000: the decoders' own copies.
_FORMAT_BYTES = {"JPEG": 12, "MPO": 12, "WEBP": 20, "AVIF": 16, "JPEG2000": 26}
_OTHER_BYTES = 10

VIDEO_BYTES_PER_PIXEL = 56
"""Of a frame, while a video is decoded: the frames that its codec refers to, and a pair as RGB."""


def decoding_bytes(width: int, height: int, image_format: str | None) -> int:
    """Return the bytes that decoding an image takes.

    image_format: Pillow's name of it; None: the image is decoded already.
    """
    return width * height * _FORMAT_BYTES.get(image_format or "", _OTHER_BYTES)


class ByteBudget:
    """Bytes that threads share; a thread waits until enough of them are free, in order of arrival.

    A thread that has some gets more at once, so that no two wait for each other.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free = num_bytes
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._holders = threading.local()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes of the budget in the context; all of it for more than it has."""
        if getattr(self._holders, "holds", False):
            yield
            return
        taken = min(num_bytes, self._num_bytes)
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= taken)
                self._free -= taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        self._holders.holds = True
        try:
            yield
        finally:
            self._holders.holds = False
            with self._changed:
                self._free += taken
                self._changed.notify_all()


DECODING = ByteBudget(BUDGET_BYTES)
"""The budget of this process."""


def reserve_frames(width: int, height: int) -> AbstractContextManager[None]:
    """Return a context in which the frames of a video may be decoded, one after the other."""
    return DECODING.reserve(VIDEO_BYTES_PER_PIXEL * width * height)
