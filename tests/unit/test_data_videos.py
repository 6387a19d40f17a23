"""Videos: which frames are sampled, their times, and which files are rejected."""

import io
import struct

import av
import numpy as np
import pytest

from support.videos import frame, make_video
from trigon.data.media_files import MediaSource
from trigon.data.rows import UnusableRow
from trigon.data.videos import FrameSampling, open_video, video_layout

SAMPLING = FrameSampling(fps=5.0, max_frames=768)


def read(video, sampling=SAMPLING, image_dir=None):
    """Return the layout and the frames of a video, after checking that they agree."""
    source = MediaSource(video, "train:7/videos/0", 100_000, image_dir)
    layout, frames = open_video(source, sampling)
    frames = list(frames)
    assert len(frames) == len(layout.seconds) == 2 * layout.num_patches
    assert {(each.shape, each.dtype.name) for each in frames} == {((layout.height, layout.width, 3), "uint8")}
    assert layout == video_layout(source, sampling)
    return layout, frames


def rejection(video, sampling=SAMPLING, image_dir=None):
    """Return (reason, message) of the error that is raised."""
    with pytest.raises(UnusableRow) as caught:
        read(video, sampling, image_dir)
    assert str(caught.value).startswith("train:7/videos/0: ")
    return caught.value.reason, str(caught.value)


def frame_numbers(frames):
    """Return the number of each frame, which the red of `videos.frame` encodes."""
    return [round((float(each[..., 0].mean()) - 40) / 15) for each in frames]


# Which frames


@pytest.mark.parametrize(
    ("frames", "sampling", "expected"),
    [
        (12, FrameSampling(10.0, 768), [*range(12)]),
        (12, FrameSampling(100.0, 768), [*range(12)]),  # no frame is repeated
        (12, FrameSampling(10.0, 2), [0, 11]),
        (12, FrameSampling(10.0, 7), [0, 2, 4, 7, 9, 11]),  # an even number
        (12, FrameSampling(0.1, 768), [0, 4, 7, 11]),  # at least four
        (12, FrameSampling(0.1, 2), [0, 11]),  # but at most max_frames
        (3, FrameSampling(10.0, 768), [0, 2]),
        (2, FrameSampling(10.0, 768), [0, 1]),
        (1, FrameSampling(10.0, 768), [0, 0]),  # a single frame is repeated
    ],
)
def test_which_frames_are_sampled(frames, sampling, expected):
    layout, sampled = read(make_video(frames=frames, fps=10), sampling)
    assert frame_numbers(sampled) == expected
    assert list(layout.seconds) == [number / 10 for number in expected]


def test_frames_are_sampled_by_time_if_their_intervals_vary():
    times = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 21]  # the last two are shown longer
    video = make_video(frames=12, fps=10, times=times, codec="libvpx-vp9", container="webm")
    layout, frames = read(video, FrameSampling(5.0, 6))
    assert frame_numbers(frames) == [0, 4, 8, 10, 10, 11]  # nearest to 0, 0.42, 0.84, 1.26, 1.68 and 2.1 seconds
    assert layout.seconds == pytest.approx((0.0, 0.4, 0.8, 1.5, 1.5, 2.1))


@pytest.mark.parametrize(
    ("codec", "container"),
    [("libx264", "mp4"), ("libx264", "matroska"), ("libx264", "avi"), ("libx264", "mpegts"), ("libx265", "mp4"),
     ("libvpx", "webm"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("mpeg4", "mp4")],
)  # fmt: skip
def test_common_formats_give_the_same_frames(codec, container):
    layout, frames = read(make_video(codec=codec, container=container))
    assert frame_numbers(frames) == [0, 2, 4, 7, 9, 11]
    assert layout.seconds == pytest.approx((0.0, 0.2, 0.4, 0.7, 0.9, 1.1))
    assert (layout.width, layout.height) == (96, 64)
    assert layout.temporal_patch_seconds == pytest.approx(0.4)  # 1.2 seconds, three pairs
    for number, each in zip((0, 2, 4, 7, 9, 11), frames, strict=True):
        assert np.abs(each.astype(int) - frame(number, 96, 64)).mean() < 6


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_frames_are_upright(quarters):
    plain = make_video(frames=4, fps=4)
    layout, frames = read(rotated(plain, quarters))
    _, upright = read(plain)
    assert (layout.width, layout.height) == ((96, 64) if quarters == 2 else (64, 96))
    for each, expected in zip(frames, upright, strict=True):
        assert np.array_equal(each, np.rot90(expected, -quarters))


def rotated(video, quarters):
    """Return an MP4 whose header asks players to rotate it clockwise, as phones write it."""
    at = video.index(b"tkhd") + 4 + 4 + 20 + 16  # version and flags; times, track and duration; layer and volume
    one = 1 << 16
    matrix = {
        1: (0, one, 0, -one, 0, 0),
        2: (-one, 0, 0, 0, -one, 0),
        3: (0, -one, 0, one, 0, 0),
    }[quarters]
    return video[:at] + struct.pack(">6i", *matrix) + video[at + 24 :]


# Rejected files


def test_a_file_with_a_complete_index_and_truncated_frames_is_rejected(tmp_path):
    """The index, which comes first in this file, has all frames."""
    video = faststart(make_video(frames=30, width=128, height=96), tmp_path / "fast.mp4")
    reason, message = rejection(video[: len(video) - 400])
    assert reason == "video_unreadable"
    assert "cut off" in message


def faststart(video, path):
    """Return an MP4 with its index before its frames."""
    with av.open(io.BytesIO(video)) as source, av.open(path, "w", options={"movflags": "faststart"}) as output:
        copy = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copy
                output.mux(packet)
    return path.read_bytes()


def test_damaged_frames_are_rejected():
    video = bytearray(make_video(frames=30, width=128, height=96, codec="mpeg4"))
    start = video.index(b"mdat") + 4
    noise = np.random.RandomState(0).bytes(3000)
    video[start + 600 : start + 3600] = noise
    assert rejection(bytes(video), FrameSampling(30.0, 768))[0] == "video_unreadable"


def sound():
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as output:
        track = output.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        output.mux(track.encode(silence))
        output.mux(track.encode())
    return stream.getvalue()


LONG = make_video(frames=30, width=128, height=96)
PLAYLIST = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", "FOLDER/secret.mp4", "#EXT-X-ENDLIST", ""]


@pytest.mark.parametrize(
    ("source", "reason", "facts"),
    [
        (b"not a video at all" * 20, "video_unreadable", []),
        (b"", "video_unreadable", ["zero bytes"]),
        (sound(), "video_unreadable", ["no video stream"]),
        *((LONG[: int(len(LONG) * share)], "video_unreadable", []) for share in (0.1, 0.5, 0.9)),
        (None, "video_missing", []),
        (17, "video_missing", ["int"]),
        ("clip.mp4", "video_missing", ["FOLDER/videos/clip.mp4"]),
        (
            make_video(frames=2, width=640, height=480),
            "video_pixels",
            ["640 x 480", "max_image_pixels=100,000"],
        ),
        (make_video(frames=2, width=3210, height=16), "video_shape", ["3210 x 16"]),
        *((path, "video_outside", []) for path in ("../secret.mp4", "/etc/passwd", "https://a.org/a.mp4", "file:///a")),
        # FFmpeg would read the listed files, which may be outside of the folder.
        ("list.ffconcat", "video_unreadable", []),
        ("list.m3u8", "video_unreadable", []),
    ],
)
def test_what_cannot_be_used_is_named_with_its_reason(tmp_path, source, reason, facts):
    folder = tmp_path / "videos"
    folder.mkdir()
    for path in (tmp_path / "secret.mp4", folder / "secret.mp4"):
        path.write_bytes(make_video(frames=2))
    (folder / "list.ffconcat").write_text("ffconcat version 1.0\nfile 'secret.mp4'\n")
    (folder / "list.m3u8").write_text("\n".join(PLAYLIST).replace("FOLDER", str(folder)))
    with av.open(str(folder / "list.ffconcat")) as opened:
        assert opened.streams.video
    found, message = rejection(source, image_dir=folder)
    assert found == reason
    assert all(fact.replace("FOLDER", str(tmp_path)) in message for fact in facts), message
