"""Opens and decodes videos with PyAV (FFmpeg); no other module does.

Which frames are sampled follows from the presentation times of all frames, which are read without
decoding, and from the first frame. Frames are then decoded one by one, so that memory does not grow
with the length of a video. Resizing for a model is in vision.py.

Sampled frames are evenly spaced in time from the first to the last, both included. With constant
intervals this is `linspace` over the frames, as in Qwen's processors:

    12 frames, 10 a second, fps=5     0 . 2 . 4 . 7 . 9 . 11
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, repeat
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from trigon.data.images import MAX_ASPECT_RATIO, reserve_frames
from trigon.data.media_files import MediaSource, in_one_line, open_bytes, read_bytes
from trigon.data.rows import UnusableRow

Pixels = NDArray[np.uint8]
"""A frame: [height, width, 3], RGB."""

FRAMES_PER_PATCH = 2
"""Frames per temporal patch of the Qwen families; the number of sampled frames is a multiple of it.
"""

MIN_FRAMES = 4
"""Least number of frames sampled from a video, if it has as many; as in Qwen's processors."""

# Listed, so that FFmpeg never opens a playlist or a list of files, which can name any file or URL.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf"

# The errors of PyAV for damaged bytes; its own error classes also derive from OSError and
# ValueError.
_DECODING_ERRORS = (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError, MemoryError, RuntimeError)

_NO_TIME = "it has no timestamps"


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """How frames are sampled. fps: frames per second. max_frames: limit per video, at least 2."""

    fps: float
    max_frames: int


DEFAULT_SAMPLING = FrameSampling(fps=2.0, max_frames=768)
"""The defaults of Qwen's processors."""


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """Size and times of the frames sampled from a video.

    width, height: size of an upright frame, in pixels. seconds: time of each sampled frame since
    the first, ascending; an even number of frames. temporal_patch_seconds: duration of a temporal
    patch, a pair of frames.
    """

    width: int
    height: int
    seconds: tuple[float, ...]
    temporal_patch_seconds: float

    @property
    def num_patches(self) -> int:
        """The number of temporal patches, which are pairs of frames."""
        return len(self.seconds) // FRAMES_PER_PATCH


@dataclass(frozen=True, slots=True)
class _FrameTimes:
    """Presentation times of all frames, ascending, in units of time_base; at least one.

    has_timestamps: whether decoded frames carry their presentation times. Frames of an AVI
    do not, and are matched with the times in order.
    """

    times: tuple[int, ...]
    time_base: Fraction
    has_timestamps: bool

    def sample(self, sampling: FrameSampling) -> list[int]:
        """Return the indices of the sampled frames, ascending, an even number of them.

        A single frame is repeated.
        """
        num_frames = len(self.times)
        if num_frames == 1:
            return [0, 0]
        num_sampled = max(int(num_frames / self.fps * sampling.fps), MIN_FRAMES)
        num_sampled = min(num_sampled, sampling.max_frames, num_frames) // FRAMES_PER_PATCH * FRAMES_PER_PATCH
        first, span = self.times[0], self.times[-1] - self.times[0]
        return [self._nearest(first + Fraction(span * k, num_sampled - 1)) for k in range(num_sampled)]

    @property
    def fps(self) -> float:
        """Frames per second, on average; for at least two frames."""
        return float((len(self.times) - 1) / ((self.times[-1] - self.times[0]) * self.time_base))

    def _nearest(self, time: Fraction) -> int:
        """Return the index of the frame nearest to a time; at a tie, the even one as in NumPy."""
        after = bisect_left(self.times, time)
        if after == 0:
            return 0
        to_previous, to_next = time - self.times[after - 1], self.times[min(after, len(self.times) - 1)] - time
        if to_previous == to_next:
            return after - after % 2
        return after - 1 if to_previous < to_next else after


def video_layout(source: MediaSource, sampling: FrameSampling) -> VideoLayout:
    """Return size and times of a video's sampled frames; only the first frame is decoded.

    sampling: which frames are sampled. Raises: UnusableRow.
    """
    with _opened(source) as (container, frame_times):
        codec = container.streams.video[0].codec_context
        with reserve_frames(codec.width, codec.height):
            first = next(_decode(container, frame_times, source))[0]
            return _layout(first, frame_times, sampling)


def open_video(source: MediaSource, sampling: FrameSampling) -> tuple[VideoLayout, Iterator[Pixels]]:
    """Return what video_layout does, and an iterator that decodes the sampled frames, upright.

    Raises: as video_layout; the iterator raises UnusableRow if decoding fails.
    """
    return video_layout(source, sampling), _frames(source, sampling)


def encoded_video(source: MediaSource, sampling: FrameSampling) -> bytes:
    """Return the encoded file of a video, byte for byte, after checking times and first frame.

    Raises: as video_layout.
    """
    encoded = read_bytes(source, "video")
    video_layout(replace(source, content=encoded), sampling)
    return encoded


def _frames(source: MediaSource, sampling: FrameSampling) -> Iterator[Pixels]:
    where = source.where
    with _opened(source) as (container, frame_times):
        frames = _decode(container, frame_times, source)
        frame, time = next(frames)
        layout = _layout(frame, frame_times, sampling)
        for index in frame_times.sample(sampling):
            # Some frames of a stream are never shown; the next one that is shown replaces them.
            while time < frame_times.times[index]:
                following = next(frames, None)
                if following is None:
                    at = float((frame_times.times[index] - frame_times.times[0]) * frame_times.time_base)
                    message = f"{where}: it ends before {at:.1f} s, where a frame is expected; replace or drop it"
                    raise UnusableRow("video_unreadable", message)
                frame, time = following
            pixels = _upright_rgb(frame, where)
            if pixels.shape != (layout.height, layout.width, 3):
                raise UnusableRow(
                    "video_shape",
                    f"{where}: its frames change from {layout.width} x {layout.height} to "
                    f"{pixels.shape[1]} x {pixels.shape[0]}; encode it again",
                )
            yield pixels


@contextmanager
def _opened(source: MediaSource) -> Iterator[tuple[Any, _FrameTimes]]:
    """Yield an open container at its beginning, and the times of its frames."""
    with open_bytes(source, "video") as stream:
        try:
            container = _container(stream, source.max_pixels)
            frame_times = _read_frame_times(container)
            container.close()
            stream.seek(0)
            container = _container(stream, source.max_pixels)
        except _DECODING_ERRORS as error:
            raise _unreadable(source.where, error) from error
        with container:
            yield container, frame_times


def _container(stream: io.BytesIO | io.BufferedReader, max_pixels: int) -> Any:
    container = av.open(stream, options={"format_whitelist": _FORMATS})
    if not container.streams.video:
        container.close()
        raise ValueError("it has no video stream")
    codec = container.streams.video[0].codec_context
    codec.thread_count = 1  # more would each hold frames; rows are processed in parallel already
    codec.options = {"max_pixels": str(max_pixels)}  # enforced during decoding too
    return container


def _read_frame_times(container: Any) -> _FrameTimes:
    """Read the times of all frames without decoding.

    Raises: ValueError if the file has no frames or is truncated.
    """
    stream = container.streams.video[0]
    times = []
    has_timestamps = container.format.name != "avi"  # which stores times of decoding
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        has_timestamps = has_timestamps and packet.pts is not None
        time = packet.dts if packet.pts is None else packet.pts
        if time is None:
            raise ValueError(_NO_TIME)
        times.append(time)
    if not times:
        raise ValueError("it has no frames")
    if container.format.name.startswith("mov") and len(times) < stream.frames:
        raise ValueError(f"it is cut off after {len(times)} of {stream.frames} frames")
    if len(times) > 1 and min(times) == max(times):
        raise ValueError(_NO_TIME)
    return _FrameTimes(tuple(sorted(times)), stream.time_base, has_timestamps)


def _layout(first: Any, frame_times: _FrameTimes, sampling: FrameSampling) -> VideoLayout:
    """Return the layout of a video from its first frame and its times."""
    is_sideways = first.rotation % 180 != 0
    sampled = frame_times.sample(sampling)
    times, time_base = frame_times.times, frame_times.time_base
    sampled_fps = sampling.fps if len(times) == 1 else len(sampled) / len(times) * frame_times.fps
    return VideoLayout(
        width=first.height if is_sideways else first.width,
        height=first.width if is_sideways else first.height,
        seconds=tuple(float((times[index] - times[0]) * time_base) for index in sampled),
        temporal_patch_seconds=FRAMES_PER_PATCH / sampled_fps,
    )


def _decode(container: Any, frame_times: _FrameTimes, source: MediaSource) -> Iterator[tuple[Any, int]]:
    """Yield each frame, at least one, and its presentation time. Raises: UnusableRow."""
    codec = container.streams.video[0].codec_context
    _check_size(codec.width, codec.height, source)
    expected_times = chain(frame_times.times, repeat(frame_times.times[-1]))
    frame = None
    try:
        for frame, expected in zip(container.decode(video=0), expected_times, strict=False):
            _check_size(frame.width, frame.height, source)
            yield frame, frame.pts if frame_times.has_timestamps and frame.pts is not None else expected
    except _DECODING_ERRORS as error:
        raise _unreadable(source.where, error) from error
    if frame is None:
        raise UnusableRow("video_unreadable", f"{source.where}: none of its frames can be decoded; replace or drop it")


def _upright_rgb(frame: Any, where: str) -> Pixels:
    if frame.is_corrupt:
        raise UnusableRow("video_unreadable", f"{where}: a frame is damaged; replace or drop it")
    quarters = round(frame.rotation / 90)  # counter-clockwise, as in rot90
    try:
        return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), quarters))
    except _DECODING_ERRORS as error:
        raise _unreadable(where, error) from error


def _check_size(width: int, height: int, source: MediaSource) -> None:
    where, max_pixels = source.where, source.max_pixels
    if width * height > max_pixels:
        pixels = f"frames of {width} x {height} = {width * height:,} pixels"
        raise UnusableRow("video_pixels", f"{where}: {pixels}, more than max_image_pixels={max_pixels:,}")
    if max(width, height) >= MAX_ASPECT_RATIO * min(width, height) and min(width, height) > 0:
        limit = f"{MAX_ASPECT_RATIO} or more times as long as wide"
        raise UnusableRow("video_shape", f"{where}: frames of {width} x {height}, {limit}; crop it or drop the row")


def _unreadable(where: str, error: BaseException) -> UnusableRow:
    return UnusableRow("video_unreadable", f"{where}: {in_one_line(error)}; replace or drop it")
