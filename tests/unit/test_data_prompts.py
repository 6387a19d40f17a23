"""Rows become prompts: counts equal built lengths, and images replace their markers."""

import base64
import copy
import hashlib
import io
from dataclasses import replace
from urllib.parse import quote_from_bytes

import pytest
from PIL import Image

from support.builders import make_builder
from support.images import png
from support.models import processors_of
from support.videos import make_video
from trigon.data import templates
from trigon.data.bad_rows import UnusableRow
from trigon.data.videos import FrameSampling
from trigon.errors import ConfigError, DataError
from trigon.models.load import load_processors
from trigon.types import EncodedMedia

IMAGE_PAD = "<|image_pad|>"


def row(problem="<image>What is it?", images=None, **others):
    images = [png()] if images is None else images
    return {"problem": problem, "answer": "48", "images": images, **others}


@pytest.fixture(scope="module")
def text_processors(tiny_model):
    return processors_of(tiny_model("llama"))


def decoded(processors, prompt):
    return processors.tokenizer.decode(prompt.token_ids)


def rejection(builder, bad_row):
    """Return (reason, message), after checking that count, check and build raise the same error."""
    errors = []
    for method in (builder.build, builder.check):
        with pytest.raises(UnusableRow) as caught:
            method(bad_row, "train:7")
        errors.append((caught.value.reason, str(caught.value)))
    with pytest.raises(UnusableRow) as caught:
        builder.count(bad_row)
    assert caught.value.reason == errors[0][0]
    assert errors[0] == errors[1]
    assert "train:7" in errors[0][1]
    return errors[0]


# Fields of a prompt


def test_the_fields_of_a_prompt(processors):
    images = [{"bytes": png(56, 56), "path": "figure.png"}, png(84, 56)]
    prompt = make_builder(processors).build(row("<image>and<image>?", images, level=3, source="book"), "train:17")
    assert prompt.prompt_id == "train:17"
    assert prompt.text == "<image>and<image>?"
    assert prompt.ground_truth == "48"
    assert prompt.row == {"problem": "<image>and<image>?", "answer": "48", "level": 3, "source": "book"}
    assert prompt.image_refs == ("train:17/images/0 (figure.png)", "train:17/images/1")
    assert prompt.vision.grid_thw.tolist() == [[1, 4, 4], [1, 4, 6]]
    assert decoded(processors, prompt) == (
        "<|im_start|>system\nYou answer questions about pictures.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{4 * IMAGE_PAD}<|vision_end|>and"
        f"<|vision_start|>{6 * IMAGE_PAD}<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        ("What is 1 + 1?", []),
        ("<image>What is it?", [(56, 56)]),
        ("What is it?<image>", [(300, 20)]),
        ("<image><image> Which?\n<image>", [(1, 1), (640, 480), (70, 71)]),
    ],
)
def test_the_counted_length_equals_the_built_length(processors, problem, sizes):
    builder = make_builder(processors)
    one = row(problem, [png(*size) for size in sizes])
    prompt = builder.build(one, "train:0")
    assert builder.count(one) == builder.check(one, "train:0") == len(prompt.token_ids)
    assert prompt.token_ids.count(processors.hf_config.image_token_id) == (
        0 if prompt.vision is None else prompt.vision.grid_thw.prod(dim=1).sum() // 4
    )


def test_an_image_is_processed_once_and_only_by_build(processors):
    builder = make_builder(processors)
    one = row("<image><image>?", [png(), png(seed=1)])
    builder.count(one)
    builder.check(one, "train:0")
    assert builder.image_processor.calls == 0
    builder.build(one, "train:0")
    assert builder.image_processor.calls == 1


def test_the_same_row_gives_the_same_prompt(processors):
    first, second = (make_builder(processors).build(row(), "train:0") for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.vision.hashes == second.vision.hashes


@pytest.mark.parametrize("images", [None, []])
def test_a_row_without_images_is_text(processors, images):
    prompt = make_builder(processors).build({"problem": "What is 1 + 1?", "answer": 2, "images": images}, "train:0")
    assert prompt.vision is None
    assert prompt.image_refs == ()
    assert prompt.ground_truth == 2


def test_a_row_needs_no_image_column(processors):
    assert make_builder(processors).build({"problem": "1 + 1?", "answer": "2"}, "train:0").vision is None


def test_one_image_needs_no_list(processors):
    builder = make_builder(processors, image_key="image")
    for source in (png(), {"bytes": png(), "path": None}, Image.open(io.BytesIO(png()))):
        prompt = builder.build({"problem": "<image>?", "answer": "1", "image": source}, "train:0")
        assert prompt.image_refs == ("train:0/image/0",)
        assert len(prompt.vision.hashes) == 1


def test_relative_paths_start_from_image_dir_or_the_default(processors, tmp_path):
    for name, seed in (("here", 1), ("there", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "figure.png").write_bytes(png(seed=seed))
    one = row(images=["figure.png"])
    here = make_builder(processors).with_default_image_dir(tmp_path / "here").build(one, "train:0")
    there = (
        make_builder(processors, image_dir=tmp_path / "there")
        .with_default_image_dir(tmp_path / "here")
        .build(one, "train:0")
    )
    assert here.image_refs == ("train:0/images/0 (figure.png)",)
    assert here.vision.hashes == make_builder(processors).build(row(images=[png(seed=1)]), "train:0").vision.hashes
    assert there.vision.hashes == make_builder(processors).build(row(images=[png(seed=2)]), "train:0").vision.hashes


def test_builders_with_other_image_dirs_share_the_processors(processors, tmp_path):
    builder = make_builder(processors)
    builder.with_default_image_dir(tmp_path).build(row(), "train:0")
    assert builder.image_processor.calls == 1


# Images as files


def encoded(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.open(io.BytesIO(png(200, 60))), "JPEG", exif=exif)


@pytest.mark.parametrize(
    ("problem", "images"),
    [
        ("What is 1 + 1?", []),
        ("<image>?", [png()]),
        ("<image>?", [rotated()]),
        ("<image>?", [encoded(Image.new("RGBA", (70, 71), (0, 0, 0, 9)), "PNG")]),
        ("<image>?", [Image.open(io.BytesIO(rotated()))]),
        ("<image><image> Which?\n<image>", [png(1, 1), {"bytes": rotated(), "path": "a.jpg"}, png(640, 480)]),
    ],
)
def test_token_ids_are_the_same_whether_images_are_processed_or_not(processors, problem, images):
    with_pixels = make_builder(processors).build(row(problem, images), "train:0")
    builder = make_builder(processors, process_images=False)
    prompt = builder.build(row(problem, images), "train:0")
    assert builder.image_processor.calls == 0
    for field in ("prompt_id", "token_ids", "text", "ground_truth", "row", "image_refs"):
        assert getattr(prompt, field) == getattr(with_pixels, field)
    assert (prompt.vision is None) == (with_pixels.vision is None)
    assert builder.check(row(problem, images), "train:0") == len(prompt.token_ids)


def test_unprocessed_images_are_encoded_files_with_hashes(processors):
    images = [rotated(), {"bytes": png(), "path": "figure.png"}]
    prompt = make_builder(processors, process_images=False).build(row("<image><image>?", images), "train:0")
    assert isinstance(prompt.vision, EncodedMedia)
    assert prompt.vision.encoded == (rotated(), png())
    assert prompt.vision.hashes == tuple(hashlib.sha256(file).hexdigest() for file in (rotated(), png()))
    assert prompt.image_refs == ("train:0/images/0", "train:0/images/1 (figure.png)")


def test_unprocessed_images_are_not_decoded_but_their_headers_are_read(processors):
    builder = make_builder(processors, process_images=False)
    truncated = png()[:-2000]
    assert builder.build(row(images=[truncated]), "train:7").vision.encoded == (truncated,)
    for source, reason in ((b"", "image_unreadable"), (png(1200, 900), "image_pixels"), ("a.png", "image_outside")):
        with pytest.raises(UnusableRow, match=r"^train:7/images/0") as caught:
            builder.build(row(images=[source]), "train:7")
        assert caught.value.reason == reason


# Messages


def test_the_system_prompt_comes_first(processors):
    prompt = make_builder(processors, system_prompt="Be brief.").build(row("1 + 1?", []), "train:0")
    assert decoded(processors, prompt).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?")
    assert prompt.text == "system: Be brief.\n\nuser: 1 + 1?"


def test_chat_messages_keep_their_roles_and_contents(processors):
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "<image>What is it?"},
        {"role": "assistant", "content": "A circle."},
        {"role": "user", "content": "How large?"},
    ]
    builder = make_builder(processors, system_prompt="Be brief.", format_prompt="{{ content }} Think.")
    prompt = builder.build(row(messages), "train:0")
    assert decoded(processors, prompt) == (
        "<|im_start|>system\nBe exact.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{4 * IMAGE_PAD}<|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\nA circle.<|im_end|>\n"
        "<|im_start|>user\nHow large? Think.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_parts_are_equivalent_to_markers(processors):
    # As Arrow returns them: every part has every key.
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    builder = make_builder(processors)
    by_parts = builder.build(row([{"role": "user", "content": parts}]), "train:0")
    assert by_parts.token_ids == builder.build(row("<image>What is it?"), "train:0").token_ids


@pytest.mark.parametrize(
    "problem",
    [
        None,
        "",
        " \n",
        17,
        [],
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        [{"role": "robot", "content": "Hello"}],
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}],
    ],
)
def test_an_empty_or_malformed_prompt_is_rejected(processors, problem):
    reason, message = rejection(make_builder(processors), row(problem, []))
    assert reason == "prompt"
    assert "'problem'" in message


def test_a_row_without_a_ground_truth_is_rejected(processors):
    assert rejection(make_builder(processors), row() | {"answer": None})[0] == "answer"


def test_an_error_of_the_chat_template_rejects_the_row(processors, tiny_vlm):
    strict = load_processors(str(tiny_vlm), chat_template="{{ raise_exception('no such chat') }}")
    reason, message = rejection(make_builder(strict), row("Hello", []))
    assert reason == "prompt"
    assert "no such chat" in message


def test_a_given_chat_template_is_used(tiny_vlm):
    own = load_processors(str(tiny_vlm), chat_template="{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}")
    assert decoded(own, make_builder(own).build(row("1 + 1?", []), "train:0")) == "Q: 1 + 1?\nA:"


def test_a_chat_template_that_drops_images_is_named(tiny_vlm):
    own = load_processors(str(tiny_vlm), chat_template="{% for m in messages %}{{ m.role }}{% endfor %}")
    reason, message = rejection(make_builder(own), row())
    assert reason == "markers"
    assert "placeholders that the chat template writes: 0, images: 1" in message


# Markers


@pytest.mark.parametrize(
    ("problem", "num_images", "expected"),
    [
        ("<image>What?", 0, "<image> markers in the text: 1, images: 0"),
        ("<image><image>?", 1, "<image> markers in the text: 2, images: 1"),
        ("<image>What?", 2, "<image> markers in the text: 1, images: 2"),
        ("What?", 1, "<image> markers in the text: 0, images: 1; put <image> into the text"),
    ],
)
def test_markers_must_match_images(processors, problem, num_images, expected):
    reason, message = rejection(make_builder(processors), row(problem, [png()] * num_images))
    assert reason == "markers"
    assert expected in message


def test_a_video_marker_without_a_video_is_rejected(processors):
    reason, message = rejection(make_builder(processors), row("<video>What?", []))
    assert reason == "markers"
    assert "<video> markers in the text: 1, videos: 0; there is no column 'videos'" in message


def test_a_mistyped_image_column_is_named(processors):
    _, message = rejection(make_builder(processors, image_key="imgs"), row())
    assert "there is no column 'imgs', only answer, images, problem: set data.image_key" in message


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_special_tokens_in_the_text_are_rejected(processors, token):
    reason, message = rejection(make_builder(processors), row(f"<image>{token}What?"))
    assert reason == "media_tokens"
    assert token in message


# Limits


def test_a_prompt_is_never_truncated(processors):
    length = make_builder(processors).count(row())
    assert len(make_builder(processors, max_prompt_length=length).build(row(), "train:0").token_ids) == length
    reason, message = rejection(make_builder(processors, max_prompt_length=length - 1), row())
    assert reason == "overlong"
    assert f"{length} tokens (4 of them for images), more than max_prompt_length={length - 1}" in message


def test_too_many_images_are_rejected(processors):
    two = row("<image><image>?", [png(), png()])
    assert make_builder(processors, limit_images=2).count(two) == make_builder(processors, limit_images=0).count(two)
    reason, message = rejection(make_builder(processors, limit_images=1), two)
    assert reason == "image_count"
    assert "2 images, more than limit_images=1" in message


def test_a_bad_image_is_named(processors):
    reason, message = rejection(
        make_builder(processors), row("<image><image>?", [png(), {"bytes": b"", "path": "b.png"}])
    )
    assert reason == "image_unreadable"
    assert message.startswith("train:7/images/1 (b.png): ")


def test_a_truncated_image_is_detected_by_decoding_only(processors):
    builder = make_builder(processors)
    truncated = row(images=[png()[:-2000]])
    assert builder.count(truncated) == builder.count(row())
    for method in (builder.check, builder.build):
        with pytest.raises(UnusableRow) as caught:
            method(truncated, "train:7")
        assert caught.value.reason == "image_unreadable"


# The shapes in which datasets hold images


BASE64 = base64.b64encode(png()).decode()
SHAPES = {
    "image": {"image": "a.png"},
    "image of bytes": {"image": {"bytes": png(), "path": None}},
    "url": {"url": "a.png"},
    "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
    "text of bytes": {"bytes": BASE64},
    "data URL": f"data:image/png;base64,{BASE64}",
    "data URL in lines": f"DATA:image/png;name=a.png;base64,{base64.encodebytes(png()).decode()}",
    "data URL of percents": "data:image/png," + quote_from_bytes(png()),
    "base64": BASE64,
    "file URL": "file://FOLDER/a%2epng",
    "path": "a.png",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_is_read_in_every_shape_that_datasets_use(processors, tmp_path, shape):
    (tmp_path / "a.png").write_bytes(png())
    image = SHAPES[shape]
    if isinstance(image, str):
        image = image.replace("FOLDER", str(tmp_path))
    builder = make_builder(processors, image_dir=tmp_path)
    expected = builder.build(row(), "train:0").vision.hashes
    for images in ([image], image):
        assert builder.build(row(images=images), "train:0").vision.hashes == expected
    # The same in the content part of a message, as for the API of OpenAI, without the column.
    for part in ({"type": "image", "image": image}, {"type": "image_url", "image_url": image}, {"image": image}):
        message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
        built = builder.build({"problem": [message], "answer": "1"}, "train:0")
        assert built.vision.hashes == expected
        assert built.token_ids == builder.build(row(), "train:0").token_ids


REFUSED = {
    "HEIC": (b"\x00\x00\x00\x18ftypheic" + bytes(500), "image_unreadable", ["HEIC", "JPEG"]),
    "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "image_unreadable", ["SVG"]),
    "PDF": (b"%PDF-1.7" + bytes(100), "image_unreadable", ["PDF"]),
    "HTML": (b"<!DOCTYPE html><html>", "image_unreadable", ["web page"]),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "image_unreadable", ["git lfs pull"]),
    "video": (b"\x00\x00\x00\x18ftypmp42" + bytes(500), "image_unreadable", ["video", "data.video_key"]),
    "web": ({"url": "https://example.com/" + "a" * 20_000}, "image_outside", ["is a URL", "download"]),
    "cut base64": ("data:image/png;base64," + BASE64[:-3], "image_unreadable", ["base64", "cut"]),
    "cut bare base64": (BASE64[:-3], "image_unreadable", ["base64", "cut"]),
    "base64 of no image": ("data:image/png;base64," + "QUFB" * 5000, "image_unreadable", ["train:7/images/0"]),
    "long text": ("x/y" * 7_000, "image_missing", ["21,000 characters", "neither a path nor"]),
    "long path": ("/nowhere/" + "a" * 4_000, "image_outside", ["data.image_dir"]),
    "other keys": ({"caption": "a", "picture": "b"}, "image_missing", ["'caption', 'picture'"]),
    "number": (17, "image_missing", ["int"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_named_in_a_short_sentence(processors, tmp_path, name):
    image, expected, facts = REFUSED[name]
    reason, message = rejection(make_builder(processors, image_dir=tmp_path), row(images=[image]))
    assert reason == expected
    assert message.startswith("train:7")
    assert all(fact in message for fact in facts), message
    assert len(message) <= 1_050


def test_an_image_that_is_marked_twice_is_named(processors):
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>What is it?"}]}
    reason, text = rejection(make_builder(processors), row([message], [png()]))
    assert reason == "markers"
    assert "mark each image once" in text


def test_images_of_earlier_turns_stand_where_they_were_beside_a_system_prompt(processors):
    history = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One?"}]},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "And <image> or <image>?"},
    ]
    prompt = make_builder(processors, system_prompt="Be brief.").build(
        row(history, [png(), png(84, 56), png(112, 56)]), "train:0"
    )
    sizes = [int(t * h * w) // 4 for t, h, w in prompt.vision.grid_thw]
    first, second, third = (f"<|vision_start|>{size * IMAGE_PAD}<|vision_end|>" for size in sizes)
    assert decoded(processors, prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{first}One?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        f"<|im_start|>user\nAnd {second} or {third}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sizes == [4, 6, 8]


# Errors of the dataset


def test_a_missing_column_is_named_with_its_nearest(processors):
    with pytest.raises(
        DataError, match=r"no column 'problems', only answer, images, problem; did you mean data.prompt_key=problem\?"
    ):
        make_builder(processors, prompt_key="problems").build(row(), "train:0")
    with pytest.raises(
        DataError, match=r"x\.jsonl has no column 'ground_truth', only answer, images, problem; set data.answer_key"
    ):
        make_builder(processors, answer_key="ground_truth").check_columns(["problem", "images", "answer"], "x.jsonl")


def test_images_for_a_text_model_are_an_error_of_the_dataset(text_processors):
    for call in (lambda b: b.build(row(), "train:0"), lambda b: b.check(row(), "train:0"), lambda b: b.count(row())):
        with pytest.raises(DataError, match="a llama model takes none") as caught:
            call(make_builder(text_processors))
        assert not isinstance(caught.value, UnusableRow)


def test_a_text_model_takes_text(text_processors):
    builder = make_builder(text_processors, system_prompt="Be brief.")
    prompt = builder.build(row("1 + 1?", []), "train:0")
    assert prompt.vision is None
    assert "user\n1 + 1?" in decoded(text_processors, prompt)


# format_prompt


def test_format_prompt_is_a_template_or_a_file(processors, tmp_path):
    template = "{{ content | trim }} Think first.\n"
    (tmp_path / "math.jinja").write_text(template)
    for given in (template, str(tmp_path / "math.jinja")):
        prompt = make_builder(processors, format_prompt=given).build(row(" <image>What? "), "train:0")
        assert prompt.text == "<image>What? Think first."
        assert prompt.row["problem"] == " <image>What? "


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ contnt }}", "uses contnt; it must use the one variable {{ content }}"),
        ("{% set x = 1 %}Solve it.", "uses no variable"),
        ("{{ content }} {{ image }}", "uses content, image"),
        ("{{ content", "not a usable Jinja template: .* in line 1"),
        ("{{ content.nothing.more }}", "not a usable Jinja template"),
        ("{{ content.__class__.__mro__ }}", "not a usable Jinja template: .*unsafe"),
    ],
)
def test_a_broken_template_is_a_config_error(processors, template, expected):
    with pytest.raises(ConfigError, match=expected):
        make_builder(processors, format_prompt=template)


def test_a_missing_template_file_is_named_with_its_nearest(processors, tmp_path):
    (tmp_path / "math.jinja").write_text("{{ content }}")
    with pytest.raises(ConfigError, match=r"there is no file .*meth.jinja'; did you mean .*math.jinja\?"):
        make_builder(processors, format_prompt=str(tmp_path / "meth.jinja"))
    with pytest.raises(ConfigError, match="there is no file"):
        make_builder(processors, format_prompt="no/such/folder/x.jinja")


# Videos


def video_row(problem="<video>What is it?", videos=None, **others):
    return {"problem": problem, "answer": "48", "videos": [make_video()] if videos is None else videos, **others}


def test_a_video_replaces_its_marker(processors):
    builder = make_builder(processors)
    prompt = builder.build(
        video_row("Look: <video> Well?", {"bytes": make_video(), "path": "clips/film.mp4"}), "train:3"
    )
    tokens = builder.video_processor.tokens_of(prompt.vision)
    assert f"Look: <|vision_start|>{'<|video_pad|>' * tokens[0]}<|vision_end|> Well?" in decoded(processors, prompt)
    assert prompt.text == "Look: <video> Well?"
    assert prompt.image_refs == ("train:3/videos/0 (film.mp4)",)
    assert "videos" not in prompt.row
    assert builder.video_processor.calls == 1
    assert builder.image_processor.calls == 0


def test_timestamps_are_written_for_families_with_timestamps(tiny_model):
    own = processors_of(tiny_model("qwen3_vl"))
    builder = make_builder(own, video_sampling=FrameSampling(fps=5.0, max_frames=6))
    prompt = builder.build(video_row("<video>?"), "train:0")  # frames 0, 2, 4, 7, 9 and 11 of 10 a second
    patch = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    expected = f"<0.1 seconds>{patch}<0.6 seconds>{patch}<1.0 seconds>{patch}"
    assert f"<|vision_start|>{expected}<|vision_end|>?" in decoded(own, prompt)


def test_a_video_is_counted_without_its_processor(processors):
    builder = make_builder(processors)
    assert (
        builder.count(video_row())
        == builder.check(video_row(), "train:0")
        == len(builder.build(video_row(), "train:1").token_ids)
    )
    assert builder.video_processor.calls == 1


@pytest.mark.parametrize("clip", [{"frames": 1}, {"frames": 3}, {"frames": 10, "fps": 25}], ids=["1", "3", "0.4 s"])
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_shortest_videos_are_used(tiny_model, model_type, clip):
    builder = make_builder(processors_of(tiny_model(model_type)))
    one_row = video_row(videos=[make_video(**clip)])
    prompt = builder.build(one_row, "train:7")
    [[time, rows, columns]] = prompt.vision.grid_thw.tolist()
    assert time == (2 if clip.get("fps") else 1)  # two frames each; at least four frames if there are so many
    assert len(prompt.vision.pixel_values) == time * rows * columns
    assert builder.count(one_row) == builder.check(one_row, "train:7") == len(prompt.token_ids)


@pytest.mark.parametrize(
    ("width", "height", "seen"),
    [
        (1, 1, (56, 56)),
        (1, 199, (28, 812)),
        (690, 15420, (28, 588)),
        (15420, 690, (588, 28)),
        (1, 200, None),
        (16, 3641, None),
    ],
)
def test_images_of_extreme_shapes_are_used_or_refused_with_few_pixels(tiny_vlm, width, height, seen):
    processors = load_processors(str(tiny_vlm), min_pixels=56 * 56, max_pixels=128 * 128)
    builder = make_builder(processors, max_image_pixels=64_000_000)
    stream = io.BytesIO()
    Image.new("L", (width, height)).save(stream, "PNG")
    one_row = row(images=[stream.getvalue()])
    if seen is None:
        reason, message = rejection(builder, one_row)
        assert reason == "image_shape"
        assert f"{width} x {height}" in message
        return
    prompt = builder.build(one_row, "train:7")
    assert prompt.image_sizes == (seen,)
    assert prompt.token_ids.count(processors.tokenizer.convert_tokens_to_ids(IMAGE_PAD)) == seen[0] * seen[1] // 28**2
    assert builder.count(one_row) == builder.check(one_row, "train:7") == len(prompt.token_ids)
    sent = make_builder(processors, max_image_pixels=64_000_000, process_images=False).build(one_row, "train:7")
    assert (sent.token_ids, sent.image_sizes) == (prompt.token_ids, prompt.image_sizes)


def test_a_row_with_images_and_videos_is_rejected(processors):
    reason, message = rejection(make_builder(processors), video_row("<image><video>?", images=[png()]))
    assert reason == "mixed_media"
    assert "1 images in 'images' and 1 videos in 'videos'; a row may have either" in message


@pytest.mark.parametrize(("problem", "count"), [("What?", 1), ("<video>?", 2), ("<video><video>?", 1)])
def test_video_markers_must_match_videos(processors, problem, count):
    reason, message = rejection(make_builder(processors), video_row(problem, [make_video(frames=2)] * count))
    assert reason == "markers"
    assert f"videos: {count}" in message


def test_a_bad_video_is_named(processors):
    reason, message = rejection(make_builder(processors), video_row(videos=[{"bytes": b"nothing", "path": "a/b.mp4"}]))
    assert reason == "video_unreadable"
    assert message.startswith("train:7/videos/0 (b.mp4): ")


def test_an_overlong_video_is_rejected_before_it_is_decoded(processors):
    builder = make_builder(processors, max_prompt_length=40)
    reason, message = rejection(builder, video_row(videos=[make_video(frames=60)]))
    assert reason == "overlong"
    assert "of them for videos" in message
    assert builder.video_processor.calls == 0


def test_videos_for_a_text_model_are_an_error_of_the_dataset(text_processors):
    with pytest.raises(DataError, match="a llama model takes none") as caught:
        make_builder(text_processors).check(video_row(), "train:0")
    assert not isinstance(caught.value, UnusableRow)


def test_videos_for_a_family_without_them_are_an_error_of_the_dataset(processors):
    without = replace(processors, video_processor=None)
    with pytest.raises(DataError, match="a qwen2_5_vl model takes none"):
        make_builder(without).check(video_row(), "train:0")
    assert make_builder(without).build(row(), "train:0").vision is not None


def test_a_video_marker_is_text_for_a_text_model(text_processors):
    assert "<video>?" in decoded(text_processors, make_builder(text_processors).build(row("<video>?", []), "train:0"))


# Errors and limits of templates

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GIGANTIC = "{% for i in range(99999) %}{{ content * 1000 }}{% endfor %}"
DOUBLING = "{% set ns = namespace(x=content) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ content }}{{ 1 / 0 }}", "not a usable Jinja template: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{{ content }}", "its macros call each other without end"),
        (ENDLESS + "{{ content }}", "it takes more than 0.2 seconds; does it loop without end"),
        (GIGANTIC, "it writes more than 10,000,000 characters"),
        (DOUBLING, "10,000,000"),
        (DOUBLING.replace("~", "+"), "10,000,000"),
        ("{{ content }}{{ 10 ** 10 ** 10 }}", r"line 1 uses the operator \*\*"),
        ("{{ content | center(10000000000) }}", "the number 10000000000; 10,000,000 is the largest"),
        ("{{ content }}{{ range(99999999) }}", "the number 99999999"),
    ],
)
@pytest.mark.faults
def test_templates_are_bounded(processors, monkeypatch, template, expected):
    if "seconds" in expected:  # the other limits must be reached first, however slow the machine is
        monkeypatch.setattr(templates, "MAX_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=expected):
        make_builder(processors, format_prompt=template)
    if "line 1" not in expected and "the number" not in expected:
        chat = template.replace("content", "messages[0].content")
        own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
        own.tokenizer.chat_template = chat
        if any(limit in expected for limit in ("more than", "10,000", "without end")):
            with pytest.raises(ConfigError, match=f"the chat template .* cannot be used: .*{expected[-10:]}"):
                make_builder(own)
        else:
            reason, message = rejection(make_builder(own), row("Hello", []))
            assert reason == "prompt"
            assert f"the chat template raises an error: {expected.rpartition(': ')[2]}" in message


@pytest.mark.faults
def test_a_template_that_reaches_its_limits_on_many_rows_ends_the_scan(processors):
    endless = "{% macro f() %}{{ f() }}{% endmacro %}"
    own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
    own.tokenizer.chat_template = endless + "{% if messages[0].content == 'Hi' %}{{ f() }}{% endif %}{{ messages }}"
    for builder in (
        make_builder(processors, format_prompt=endless + "{% if content == 'Hi' %}{{ f() }}{% endif %}{{ content }}"),
        make_builder(own),
    ):
        assert "without end" in rejection(builder, row("Hi", []))[1]
        errors = []
        for number in range(10):
            with pytest.raises(DataError, match=f"train:{number}.*without end") as caught:
                builder.check(row("Hi", []), f"train:{number}")
            errors.append(type(caught.value))
        assert errors[0] is UnusableRow
        assert errors[-1] is DataError


def test_a_format_prompt_that_fails_on_some_rows_skips_them(processors):
    builder = make_builder(processors, format_prompt="{{ content }}{{ 1 / (content | length - 2) }}")
    assert rejection(builder, row("Hi", [])) == ("prompt", "train:7: format_prompt fails: division by zero")
    assert builder.build(row("Hello", []), "train:0").text == "Hello0.3333333333333333"


def test_a_chat_template_with_a_power_is_a_config_error(processors):
    own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
    own.tokenizer.chat_template = "{{ messages }}{{ 9 ** 9 ** 9 }}"
    with pytest.raises(ConfigError, match=r"data\.override_chat_template.* uses the operator"):
        make_builder(own)


def test_a_token_without_an_embedding_is_named(tiny_vlm):
    processors = load_processors(str(tiny_vlm))
    processors.tokenizer.add_tokens(["<grounding>"])
    builder = make_builder(processors)
    reason, message = rejection(builder, row("<image>Where <grounding>?"))
    assert reason == "vocabulary"
    num_embeddings = processors.hf_config.get_text_config().vocab_size
    for said in ("'<grounding>'", f"{num_embeddings:,} embeddings"):
        assert said in message
    builder.build(row("<image>Where?"), "train:7")
    with pytest.raises(UnusableRow, match="<grounding>"):  # also from a template, in every row
        make_builder(processors, format_prompt="{{ content }}<grounding>").build(row(), "train:7")
    processors.hf_config.get_text_config().vocab_size += 1  # resized
    make_builder(processors).build(row("<image>Where <grounding>?"), "train:7")
