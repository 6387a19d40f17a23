"""Little videos, made with PyAV: a moving gradient, so that no two frames and no two places in one are alike."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np


def frame(number: int, width: int, height: int) -> np.ndarray:
    """Return frame `number`, [height, width, 3] uint8: smooth, since codecs blur what is not."""
    row, column = np.mgrid[0:height, 0:width]
    red = 40 + 15 * (number % 12) + 0 * row
    return np.stack([red, 30 + 180 * row // height, 30 + 180 * column // width], axis=-1).astype(np.uint8)


def make_video(
    *,
    frames: int = 12,
    fps: int = 10,
    width: int = 96,
    height: int = 64,
    codec: str = "libx264",
    container: str = "mp4",
    times: Sequence[int] | None = None,
    first: int = 0,
) -> bytes:
    """Return an encoded video. times: when each frame is shown, in 1/fps seconds; evenly unless given."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as output:
        video = output.add_stream(codec, rate=fps)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.codec_context.time_base = Fraction(1, fps)
        video.codec_context.thread_count = 1  # with several, equal frames are not always encoded to equal bytes
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(frame(first + number, width, height), format="rgb24")
            picture.pts = number if times is None else times[number]
            picture.time_base = Fraction(1, fps)
            output.mux(video.encode(picture))
        output.mux(video.encode())
    return stream.getvalue()
