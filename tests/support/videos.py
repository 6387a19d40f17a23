"""Short videos, encoded with PyAV: a gradient whose frames and pixels all differ."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np


def frame(number: int, width: int, height: int) -> np.ndarray:
    """Return frame `number`, [height, width, 3] uint8; smooth, since codecs blur edges."""
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
    """Return an encoded video.

    times: of each frame, in 1/fps seconds; None: evenly spaced. The bytes can differ between calls,
    since FFmpeg's conversion of RGB frames is not deterministic.
    """
    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as output:
        video = output.add_stream(codec, rate=fps)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.codec_context.time_base = Fraction(1, fps)
        video.codec_context.thread_count = 1  # with several, equal frames are not always encoded to equal bytes
        for number in range(frames):
            encoded_frame = av.VideoFrame.from_ndarray(frame(first + number, width, height), format="rgb24")
            encoded_frame.pts = number if times is None else times[number]
            encoded_frame.time_base = Fraction(1, fps)
            output.mux(video.encode(encoded_frame))
        output.mux(video.encode())
    return stream.getvalue()
