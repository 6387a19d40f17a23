"""What environments and tools return, as observations; and the replies of their processes."""

import json
import math
import struct
from datetime import date

import numpy as np
import pytest
from PIL import Image

from trigon.environments.conversion import to_observation, to_png, to_step
from trigon.environments.pool import read_reply
from trigon.environments.protocol import MAX_IMAGES, Message, Observation, Outcome, png_size
from trigon.system.files import dump_columns
from trigon.system.frames import Frame, FrameReader, encode_frame

RED = Image.new("RGB", (3, 2), "red")
PNG = to_png(RED)


def observe(value, max_image_pixels=1000):
    return to_observation(value, role="user", max_image_pixels=max_image_pixels)


@pytest.mark.parametrize(
    ("value", "text", "num_images"),
    [
        ("a wall", "a wall", 0),
        ("an <image> of mine", "an < image> of mine", 0),
        ("half a character: \ud83d", "half a character: \ufffd\ufffd\ufffd", 0),
        (RED, "<image>", 1),
        ([RED, RED], "<image><image>", 2),
        ({"image": RED}, "<image>", 1),
        ({"text": "You see this.", "images": [RED]}, "<image>You see this.", 1),
        ({"text": "from <image> to <image>", "images": [RED, RED]}, "from <image> to <image>", 2),
    ],
)
def test_what_is_returned_becomes_a_message(value, text, num_images):
    assert observe(value) == Observation((Message("user", text, (PNG,) * num_images),))


def test_transparent_images_are_shown_on_white():
    [message] = observe(Image.new("RGBA", (3, 2), (255, 0, 0, 0))).messages
    assert message.images == (to_png(Image.new("RGB", (3, 2), "white")),)


def test_nothing_and_observations_stay_as_they_are():
    observation = Observation((Message("tool", "<image>", (PNG,)), Message("user", "go on")))
    assert observe(None) is None
    assert observe(observation) is observation


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (3, "returned 3 as observation; return a str"),
        (np.zeros((2, 2, 3), np.uint8), r"Image.fromarray\(array\) of Pillow"),
        ({}, "no keys"),
        ({"txt": "a"}, "'txt' as observation; its keys are 'text' and 'images'"),
        ({"text": 3}, "returned 3 as 'text'"),
        ({"images": ["a.png"]}, "'a.png' among the images"),
        ({"text": "<image><image>", "images": [RED]}, "2 <image> markers for 1 images"),
        (Image.new("RGB", (100, 11)), "100 x 11 pixels; data.max_image_pixels allows 1,000"),
        (Image.new("RGB", (200, 1)), "200 x 1 pixels; its longer side must be less than 200 times"),
        (Image.new("F", (2, 2)), "mode 'F'; convert it to 'RGB'"),
        ("x" * 200_001, "200,001 characters"),
        ([RED] * (MAX_IMAGES + 1), "33 images"),
        (Observation((Message("system", "a"),)), "role 'system'"),
        (Observation((Message("user", "<image>"),)), "1 <image> markers for 0 images"),
        (Observation((Message("user", "text", (PNG,)),)), "0 <image> markers for 1 images"),
        (Observation((Message("user", "<image>", (b"GIF89a",)),)), "not a PNG file"),
        (Observation((Message("user", "<image>", (PNG[:40],)),)), "cannot be decoded"),
        (Observation("text"), "not made of Messages"),
    ],
)
def test_what_is_no_observation_is_refused(value, error):
    with pytest.raises(ValueError, match=error):
        observe(value)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (("a", 1, True), ("a", 1.0, True)),
        (("a", False), ("a", None, False)),
        (("a", np.float32(0.5), np.bool_(True)), ("a", 0.5, True)),
    ],
)
def test_steps_have_two_or_three_parts(value, step):
    assert to_step(value) == step


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("a", r"return \(observation, reward, done\)"),
        (("a",), r"return \(observation, reward, done\)"),
        (("a", 0.0, False, False, {}), r"\(observation, reward, terminated or truncated\)"),
        (("a", 1.0, None), "returned None as done"),
        (("a", "good", True), "returned 'good' for the reward, expected a number"),
        (("a", math.nan, True), "expected a finite number"),
        (("a", 1e9, True), "from -1e\\+06 to 1e\\+06"),
    ],
)
def test_what_is_no_step_is_refused(value, error):
    with pytest.raises(ValueError, match=error):
        to_step(value)


def test_frames_arrive_complete_however_they_are_cut():
    data = encode_frame({"a": 1}, [b"x" * 10, b""]) + encode_frame({"b": "\n"})
    expected = [Frame({"a": 1}, (b"x" * 10, b"")), Frame({"b": "\n"}, ())]
    for size in (1, 7, len(data)):
        reader = FrameReader(max_bytes=1000)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == expected


@pytest.mark.faults
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        struct.pack("!II", 2, 2000),
        struct.pack("!II", 2000, 0),
        struct.pack("!III", 2, 1, 2000) + b"{}",
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 2, 0) + b"{x",
        struct.pack("!II", 900, 0) + b"[" * 900,
    ],
)
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON, or of frames
        FrameReader(max_bytes=1000).feed(data)


def test_columns_that_json_cannot_represent_are_left_out():
    row = {"a": np.int64(1), "b": np.array([1.5]), "image": RED, "c": {"d": None}, "e": date(2026, 1, 2), "f": (1, 2)}
    kept = {"a": 1, "b": [1.5], "c": {"d": None}, "e": "2026-01-02", "f": [1, 2]}
    text, omitted = dump_columns(row)
    assert (json.loads(text), omitted) == (kept, ("image",))
    assert dump_columns(kept) == (json.dumps(kept), ())
    assert encode_frame({"do": "reset"}, [b"a"], row=text) == encode_frame({"do": "reset", "row": kept}, [b"a"])
    assert dump_columns({"image": RED}) == ("{}", ("image",))


MESSAGE = {"role": "user", "text": "<image>", "num_images": 1}


def test_a_reply_becomes_an_outcome():
    frame = Frame({"messages": [MESSAGE], "reward": 0.5, "done": True}, (PNG,))
    expected = Outcome(3, Observation((Message("user", "<image>", (PNG,)),)), 0.5, True)
    assert read_reply(3, frame, max_image_pixels=6) == expected
    assert png_size(PNG) == (3, 2)


@pytest.mark.faults
@pytest.mark.parametrize(
    "change",
    [
        {"messages": 3},
        {"messages": [{**MESSAGE, "num_images": 2}]},
        {"messages": [{**MESSAGE, "text": "two <image><image>"}]},
        {"messages": [{**MESSAGE, "text": None}]},
        {"messages": [{**MESSAGE, "role": "assistant"}]},
        {"reward": "1"},
        {"reward": 1e300},
        {"done": 1},
    ],
)
def test_a_forged_reply_is_refused(change):
    with pytest.raises(ValueError):  # noqa: PT011 - one of many
        read_reply(3, Frame({"messages": [MESSAGE], "reward": None, "done": True} | change, (PNG,)), max_image_pixels=6)


def test_a_reply_with_an_image_larger_than_its_file_says_is_refused():
    bomb = PNG[:16] + struct.pack(">II", 60_000, 60_000) + PNG[24:]
    with pytest.raises(ValueError, match="60000 x 60000 pixels"):
        read_reply(3, Frame({"messages": [MESSAGE], "reward": None, "done": True}, (bomb,)), max_image_pixels=6)
