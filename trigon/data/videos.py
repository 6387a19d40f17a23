"""Videos as they come: the only file that opens or decodes one.

Knows PyAV (FFmpeg), containers, timestamps, and what hostile or careless data looks like. A video is measured from its
timetable and its first frame, which settles how many frames are taken and when; its frames are then handed out one by
one, so that nothing grows with its length. Refuses to know rows, prompts, tensors and the size a model wants.

Frames lie evenly from the first to the last, both included, as in Qwen's own recipe (`linspace` over the frames), and
by the clock where their intervals vary:

    12 frames, 10 a second, fps=5     0 . 2 . 4 . 7 . 9 . 11
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from trigon.data.bad_rows import UnusableRow
from trigon.data.images import MAX_ASPECT_RATIO
from trigon.data.media_files import in_one_line, open_bytes, read_bytes

Pixels = NDArray[np.uint8]
"""A frame: [height, width, 3], RGB."""

FRAMES_PER_PATCH = 2
"""Frames that a temporal patch of the Qwen families merges; their number is a multiple of it."""

MIN_FRAMES = 4
"""Frames taken of a short video, however slow the sampling; fewer if it has no more. Qwen's processors do likewise."""

# Named, so that FFmpeg never tries a playlist or a list of files, which would have it open whatever they name.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf"

# What PyAV raises on broken bytes: its own errors are OSErrors and ValueErrors as well.
_DECODING_ERRORS = (av.FFmpegError, OSError, ValueError, EOFError, IndexError, OverflowError, MemoryError, RuntimeError)

_NO_TIME = "it has no timestamps"


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """How frames are chosen. fps: from each second. max_frames: at most, at least two."""

    fps: float
    max_frames: int


DEFAULT_SAMPLING = FrameSampling(fps=2.0, max_frames=768)
"""Qwen's own."""


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """What will be seen of a video.

    width, height: of a frame, upright, in pixels. seconds: of each frame taken, from the first one, ascending; an even
    number of them. temporal_patch_seconds: how much of the video's duration falls to each pair of them.
    """

    width: int
    height: int
    seconds: tuple[float, ...]
    temporal_patch_seconds: float

    @property
    def num_patches(self) -> int:
        """How many temporal patches, pairs of frames, there are."""
        return len(self.seconds) // FRAMES_PER_PATCH


@dataclass(frozen=True, slots=True)
class _Timetable:
    """Presentation times of all frames, ascending, in units of time_base; at least one.

    is_told: whether each frame tells its own. Those of an AVI do not; they come in order.
    """

    times: tuple[int, ...]
    time_base: Fraction
    is_told: bool

    def chosen(self, sampling: FrameSampling) -> list[int]:
        """Return the numbers of the frames to take, ascending, an even count; a single frame is taken twice."""
        count = len(self.times)
        if count == 1:
            return [0, 0]
        wanted = max(int(count / self.fps * sampling.fps), MIN_FRAMES)
        wanted = min(wanted, sampling.max_frames, count) // FRAMES_PER_PATCH * FRAMES_PER_PATCH
        first, span = self.times[0], self.times[-1] - self.times[0]
        return [self._nearest(first + Fraction(span * k, wanted - 1)) for k in range(wanted)]

    @property
    def fps(self) -> float:
        """Frames a second, on average. Needs two frames."""
        return float((len(self.times) - 1) / ((self.times[-1] - self.times[0]) * self.time_base))

    def _nearest(self, time: Fraction) -> int:
        """Return the frame nearest to a time, the even one of two equally near, as NumPy rounds."""
        after = bisect_left(self.times, time)
        if after == 0:
            return 0
        early, late = time - self.times[after - 1], self.times[min(after, len(self.times) - 1)] - time
        if early == late:
            return after - after % 2
        return after - 1 if early < late else after


def video_layout(
    source: Any, *, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> VideoLayout:
    """Return what will be seen of a video, from its timetable and its first frame.

    Args:
        source: encoded bytes, a {"bytes", "path"} mapping (bytes win), or a path.
        where: what to call the video in an error: "train:17/videos/0".
        image_dir: the folder to which relative paths belong and which no path may leave; None: no path is allowed.
        max_pixels: of a frame; refused above it.
    Raises: UnusableRow.
    """
    with _opened(source, where, image_dir, max_pixels) as (container, timetable):
        first = next(_decoded(container, timetable, where, max_pixels))[0]
        return _layout(first, timetable, sampling)


def open_video(
    source: Any, *, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> tuple[VideoLayout, Iterator[Pixels]]:
    """Return what video_layout does, and the frames that it tells of, upright, which are decoded as they are asked for.

    Args and Raises: as video_layout; asking for frames raises UnusableRow where decoding fails.
    """
    layout = video_layout(source, where=where, image_dir=image_dir, max_pixels=max_pixels, sampling=sampling)
    return layout, _frames(source, where, image_dir, max_pixels, sampling)


def encoded_video(
    source: Any, *, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> bytes:
    """Return the file behind a video, byte for byte; its timetable and its first frame have been accepted.

    Args and Raises: as video_layout.
    """
    encoded = read_bytes(source, "video", where=where, image_dir=image_dir)
    video_layout(encoded, where=where, image_dir=None, max_pixels=max_pixels, sampling=sampling)
    return encoded


def _frames(
    source: Any, where: str, image_dir: Path | None, max_pixels: int, sampling: FrameSampling
) -> Iterator[Pixels]:
    with _opened(source, where, image_dir, max_pixels) as (container, timetable):
        frames = _decoded(container, timetable, where, max_pixels)
        frame, time = next(frames)
        layout = _layout(frame, timetable, sampling)
        for number in timetable.chosen(sampling):
            # Streams may hold frames that are never shown; the next one shown stands in.
            while time < timetable.times[number]:
                following = next(frames, None)
                if following is None:
                    at = float((timetable.times[number] - timetable.times[0]) * timetable.time_base)
                    message = f"{where}: it ends before {at:.1f} s, where it should have a frame; replace or drop it"
                    raise UnusableRow("video_unreadable", message)
                frame, time = following
            pixels = _upright_rgb(frame, where)
            if pixels.shape != (layout.height, layout.width, 3):
                raise UnusableRow(
                    "video_shape",
                    f"{where}: its frames change from {layout.width} x {layout.height} to "
                    f"{pixels.shape[1]} x {pixels.shape[0]}; encode it anew",
                )
            yield pixels


@contextmanager
def _opened(source: Any, where: str, image_dir: Path | None, max_pixels: int) -> Iterator[tuple[Any, _Timetable]]:
    """Yield an open container at its beginning, and when its frames are shown."""
    with open_bytes(source, "video", where=where, image_dir=image_dir) as stream:
        try:
            container = _container(stream, max_pixels)
            timetable = _timetable(container)
            container.close()
            stream.seek(0)
            container = _container(stream, max_pixels)
        except _DECODING_ERRORS as error:
            raise _unreadable(where, error) from error
        with container:
            yield container, timetable


def _container(stream: io.BytesIO | io.BufferedReader, max_pixels: int) -> Any:
    container = av.open(stream, options={"format_whitelist": _FORMATS})
    if not container.streams.video:
        container.close()
        raise ValueError("it has no video in it")
    codec = container.streams.video[0].codec_context
    codec.thread_count = 1  # several would each hold frames; rows have threads of their own
    codec.options = {"max_pixels": str(max_pixels)}  # held to while decoding, too
    return container


def _timetable(container: Any) -> _Timetable:
    """Read when frames are shown, decoding none. Raises: ValueError if there are none, or the file was cut off."""
    stream = container.streams.video[0]
    times = []
    is_told = container.format.name != "avi"  # whose times are those of decoding
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        is_told = is_told and packet.pts is not None
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
    return _Timetable(tuple(sorted(times)), stream.time_base, is_told)


def _layout(first: Any, timetable: _Timetable, sampling: FrameSampling) -> VideoLayout:
    """Return what will be seen of a video whose first frame this is."""
    sideways = first.rotation % 180 != 0
    chosen = timetable.chosen(sampling)
    times, base = timetable.times, timetable.time_base
    shown_fps = sampling.fps if len(times) == 1 else len(chosen) / len(times) * timetable.fps
    return VideoLayout(
        width=first.height if sideways else first.width,
        height=first.width if sideways else first.height,
        seconds=tuple(float((times[number] - times[0]) * base) for number in chosen),
        temporal_patch_seconds=FRAMES_PER_PATCH / shown_fps,
    )


def _decoded(container: Any, timetable: _Timetable, where: str, max_pixels: int) -> Iterator[tuple[Any, int]]:
    """Yield each frame, at least one, and when it is shown. Raises: UnusableRow."""
    codec = container.streams.video[0].codec_context
    _check_size(codec.width, codec.height, where, max_pixels)
    due_times = chain(timetable.times, repeat(timetable.times[-1]))
    frame = None
    try:
        for frame, due in zip(container.decode(video=0), due_times, strict=False):
            _check_size(frame.width, frame.height, where, max_pixels)
            yield frame, frame.pts if timetable.is_told and frame.pts is not None else due
    except _DECODING_ERRORS as error:
        raise _unreadable(where, error) from error
    if frame is None:
        raise UnusableRow("video_unreadable", f"{where}: none of its frames can be decoded; replace or drop it")


def _upright_rgb(frame: Any, where: str) -> Pixels:
    if frame.is_corrupt:
        raise UnusableRow("video_unreadable", f"{where}: a frame is damaged; replace or drop it")
    quarters = round(frame.rotation / 90)  # counter-clockwise, as rot90 turns
    try:
        return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), quarters))
    except _DECODING_ERRORS as error:
        raise _unreadable(where, error) from error


def _check_size(width: int, height: int, where: str, max_pixels: int) -> None:
    if width * height > max_pixels:
        pixels = f"frames of {width} x {height} = {width * height:,} pixels"
        raise UnusableRow("video_pixels", f"{where}: {pixels}, more than max_image_pixels={max_pixels:,}")
    if max(width, height) >= MAX_ASPECT_RATIO * min(width, height) and min(width, height) > 0:
        limit = f"{MAX_ASPECT_RATIO} or more times as long as wide"
        raise UnusableRow("video_shape", f"{where}: frames of {width} x {height}, {limit}; crop it or drop the row")


def _unreadable(where: str, error: BaseException) -> UnusableRow:
    return UnusableRow("video_unreadable", f"{where}: {in_one_line(error)}; replace or drop it")
