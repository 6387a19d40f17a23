"""Rows become prompts: counts equal built lengths, and images replace their markers."""

import base64
import copy
import io
import json
import re
import resource
from dataclasses import replace
from urllib.parse import quote_from_bytes

import numpy as np
import pytest
from PIL import Image

from support import chat_templates
from support.builders import make_builder, prompts_of, write_jsonl
from support.chat_templates import with_template
from support.images import counting, encoded, png
from support.models import processors_of
from support.videos import make_video
from trigon.assemble.data import open_builder
from trigon.config.schema import Config
from trigon.data.dataset import open_prompts
from trigon.data.prompts import CHARACTERS_PER_TOKEN, FURTHER_CHARACTERS, GREY
from trigon.data.rows import MAX_ROW_CHARACTERS, UnusableRow, check_row_size
from trigon.errors import ConfigError, DataError
from trigon.models.load import load_processors

IMAGE_PAD = "<|image_pad|>"
SYSTEM = "<|im_start|>system\nYou answer questions about pictures.<|im_end|>\n"


def row(problem="<image>What is it?", images=None, **others):
    images = [png()] if images is None else images
    return {"problem": problem, "answer": "48", "images": images, **others}


def video_row(problem="<video>What is it?", videos=None, **others):
    return {"problem": problem, "answer": "48", "videos": [make_video()] if videos is None else videos, **others}


@pytest.fixture(scope="module")
def text_processors(tiny_model):
    return processors_of(tiny_model("llama"))


def decoded(processors, prompt):
    return processors.tokenizer.decode(prompt.token_ids)


def text_of(processors, problem="How many?", **changes):
    builder = make_builder(processors, **({"max_prompt_length": 1024} | changes))
    return decoded(processors, builder.build({"problem": problem, "answer": "4"}, "train:0"))


def lengths(builder, one_row):
    """Return the tokens of a row as each of the three ways to read it has them."""
    return {
        builder.measure(one_row, "train:7")[0],
        len(builder.inspect(one_row, "train:7").token_ids),
        len(builder.build(one_row, "train:7").token_ids),
    }


def rejection(builder, bad_row):
    """Return (reason, message), after checking that each way to read the row raises the same."""
    errors = set()
    for method in (builder.build, builder.inspect, builder.measure):
        with pytest.raises(UnusableRow) as caught:
            method(bad_row, "train:7")
        errors.add((caught.value.reason, str(caught.value)))
    [(reason, message)] = errors
    assert "train:7" in message
    return reason, message


# Fields and lengths


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
        f"{SYSTEM}<|im_start|>user\n<|vision_start|>{4 * IMAGE_PAD}<|vision_end|>and"
        f"<|vision_start|>{6 * IMAGE_PAD}<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    )


# Images as files, and blank ones


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.open(io.BytesIO(png(200, 60))), "JPEG", exif=exif)


@pytest.mark.parametrize("process_images", [True, False])
def test_blank_prompts_differ_in_their_pixels_only(processors, tmp_path, own_datasets_cache, process_images):
    (tmp_path / "a.jpg").write_bytes(rotated())
    rows = [{"images": ["a.jpg"], "problem": "<image>How many?", "answer": "3"}, {"problem": "Why?", "answer": "4"}]
    path = write_jsonl(tmp_path / "val.jsonl", rows)
    prompts = prompts_of([path, path], make_builder(processors, process_images=process_images))
    blank = prompts.with_blank_media()
    assert len(blank) == len(prompts) == 4
    for index in range(4):
        shown, hidden = prompts[index], blank[index]
        for field in ("prompt_id", "token_ids", "text", "row", "image_refs", "image_sizes"):
            assert getattr(hidden, field) == getattr(shown, field)
    assert prompts[1].vision is blank[1].vision is None
    shown, hidden = prompts[0].vision, blank[0].vision
    assert shown.hashes != hidden.hashes
    if process_images:
        assert hidden.grid_thw.equal(shown.grid_thw)
        patches = hidden.pixel_values.unflatten(1, (3, -1))
        assert patches.amax((0, 2)).equal(patches.amin((0, 2))), "one colour"
    [file] = blank.image_files(prompts[0].prompt_id)
    image = Image.open(io.BytesIO(file))
    assert (image.size, image.getextrema()) == ((60, 200), ((GREY, GREY),) * 3)


def test_blank_videos_have_the_same_frames_in_number_and_size(processors):
    builder = make_builder(processors)
    shown, hidden = builder.build(video_row(), "train:0"), builder.with_blank_media().build(video_row(), "train:0")
    assert hidden.token_ids == shown.token_ids
    assert hidden.vision.grid_thw.equal(shown.vision.grid_thw)
    assert np.ptp(hidden.vision.pixel_values.unflatten(1, (3, -1)).numpy(), axis=(0, 2)).max() == 0
    with pytest.raises(DataError, match="n_gpus_per_node=1"):
        make_builder(processors, process_images=False).with_blank_media().build(video_row(), "train:0")
    with pytest.raises(DataError, match="REWARD_IMAGES"):
        builder.with_blank_media().encoded_media(video_row(), "train:0", with_videos=True)


# Messages


def test_chat_messages_keep_their_roles_and_contents(processors):
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One?"}]},
        {"role": "assistant", "content": "A circle."},
        {"role": "user", "content": "And <image> or <image>?"},
    ]
    builder = make_builder(processors, system_prompt="Be brief.", format_prompt="{{ content }} Think.")
    files = [png(), png(84, 56), png(112, 56)]
    first, second, third = (f"<|vision_start|>{size * IMAGE_PAD}<|vision_end|>" for size in (4, 6, 8))
    expected = (
        f"<|im_start|>user\n{first}One?<|im_end|>\n<|im_start|>assistant\nA circle.<|im_end|>\n"
        f"<|im_start|>user\nAnd {second} or {third}? Think.<|im_end|>\n<|im_start|>assistant\n"
    )
    text = decoded(processors, builder.build(row(messages, files), "train:0"))
    assert text == f"<|im_start|>system\nBe exact.<|im_end|>\n{expected}"
    prompt = builder.build(row(messages[1:], files), "train:0")
    assert decoded(processors, prompt) == f"<|im_start|>system\nBe brief.<|im_end|>\n{expected}"
    assert prompt.text.startswith("system: Be brief.\n\nuser: <image>One?\n\nassistant: A circle.")


@pytest.mark.parametrize(
    "problem",
    [
        None, "", " \n", 17, [], ["text"], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "audio"}]}], [{"role": "robot", "content": "Hello"}],
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}],
    ],
)  # fmt: skip
def test_an_empty_or_malformed_prompt_is_rejected(processors, problem):
    reason, message = rejection(make_builder(processors), row(problem, []))
    assert reason == "prompt"
    assert "'problem'" in message


# What a row may be rejected for

VIDEO = make_video(frames=2)
TOKEN_ROWS = [
    pytest.param(row(f"<image>{token}What?"), "media_tokens", [token], id=token)
    for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
]


@pytest.mark.parametrize(
    ("bad_row", "reason", "facts"),
    [
        (row() | {"answer": None}, "answer", ["'answer'"]),
        (row("<image><image>?"), "markers", ["text: 2, images: 1"]),
        (row("What?"), "markers", ["text: 0, images: 1", "put <image> into the text"]),
        (row("<video>What?", []), "markers", ["<video>", "text: 1, videos: 0", "no column 'videos'"]),
        (video_row("<video>?", [VIDEO] * 2), "markers", ["videos: 2"]),
        (
            row([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>What?"}]}]),
            "markers",
            ["a part or in the text"],
        ),
        (video_row("<image><video>?", images=[png()]), "mixed_media", ["'images'", "'videos'"]),
        (row("<image><image>?", [png(), {"bytes": b"", "path": "b.png"}]), "image_unreadable", ["images/1 (b.png)"]),
        (video_row(videos=[{"bytes": b"nothing", "path": "a/b.mp4"}]), "video_unreadable", ["videos/0 (b.mp4)"]),
        *TOKEN_ROWS,
    ],
)
def test_a_bad_row_is_named_with_its_reason(processors, bad_row, reason, facts):
    found, message = rejection(make_builder(processors), bad_row)
    assert found == reason
    assert all(fact in message for fact in facts), message


def test_a_prompt_is_never_truncated_and_images_are_limited(processors):
    length = make_builder(processors).measure(row(), "train:7")[0]
    assert lengths(make_builder(processors, max_prompt_length=length), row()) == {length}
    reason, message = rejection(make_builder(processors, max_prompt_length=length - 1), row())
    assert reason == "overlong"
    assert f"{length} tokens (4 of them for images), more than max_prompt_length={length - 1}" in message
    several = row("<image><image> Which?\n<image>", [png(1, 1), png(640, 480), png(70, 71)])
    assert len(lengths(make_builder(processors, limit_images=3), several)) == 1
    reason, message = rejection(make_builder(processors, limit_images=2), several)
    assert reason == "image_count"
    assert "3 images, more than limit_images=2" in message


# The shapes in which datasets hold images

BASE64 = base64.b64encode(png()).decode()
SHAPES = {
    "bytes": png(),
    "PIL": Image.open(io.BytesIO(png())),
    "image": {"image": "a.png"},
    "url": {"url": "a.png"},
    "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
    "text of bytes": {"bytes": BASE64},
    "data URL in lines": f"DATA:image/png;name=a.png;base64,{base64.encodebytes(png()).decode()}",
    "data URL of percents": "data:image/png," + quote_from_bytes(png()),
    "base64": BASE64,
    "file URL": "file://FOLDER/a%2epng",
    "path": "a.png",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_is_read_in_every_shape_that_datasets_use(processors, tmp_path, monkeypatch, shape):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(png())
    image = SHAPES[shape]
    if isinstance(image, str):
        image = image.replace("FOLDER", str(tmp_path))
    builder = make_builder(processors, image_dir="~")
    expected = builder.build(row(), "train:0")
    for images in ([image], image):
        assert builder.build(row(images=images), "train:0").vision.hashes == expected.vision.hashes
    # The same in the content part of a message, as for the API of OpenAI, without the column.
    for part in ({"type": "image", "image": image}, {"type": "image_url", "image_url": image}, {"image": image}):
        message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
        built = builder.build({"problem": [message], "answer": "1"}, "train:0")
        assert (built.vision.hashes, built.token_ids) == (expected.vision.hashes, expected.token_ids)


REFUSED = {
    "HEIC": (b"\x00\x00\x00\x18ftypheic" + bytes(500), "image_unreadable", ["HEIC", "JPEG"]),
    "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "image_unreadable", ["SVG"]),
    "HTML": (b"<!DOCTYPE html><html>", "image_unreadable", ["web page"]),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "image_unreadable", ["git lfs pull"]),
    "video": (b"\x00\x00\x00\x18ftypmp42" + bytes(500), "image_unreadable", ["video", "data.video_key"]),
    "web": ({"url": "https://example.com/" + "a" * 20_000}, "image_outside", ["is a URL", "download"]),
    "cut base64": ("data:image/png;base64," + BASE64[:-3], "image_unreadable", ["base64", "cut"]),
    "base64 of no image": ("data:image/png;base64," + "QUFB" * 5000, "image_unreadable", ["train:7/images/0"]),
    "long text": ("x/y" * 7_000, "image_missing", ["21,000 characters", "neither a path nor"]),
    "long path": ("/nowhere/" + "a" * 4_000, "image_outside", ["data.image_dir"]),
    "other keys": ({"caption": "a", "picture": "b"}, "image_missing", ["'caption', 'picture'"]),
    "number": (17, "image_missing", ["int"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_named_in_a_short_sentence(processors, tmp_path, name):
    image, expected, facts = REFUSED[name]
    reason, message = rejection(make_builder(processors, image_dir=str(tmp_path)), row(images=[image]))
    assert reason == expected
    assert message.startswith("train:7")
    assert all(fact in message for fact in facts), message
    assert len(message) <= 1_050


# Errors of the dataset


def test_a_missing_column_is_named_with_its_nearest(processors):
    _, message = rejection(make_builder(processors, image_key="imgs"), row())
    assert all(fact in message for fact in ("'imgs'", "answer, images, problem", "data.image_key"))
    for options, facts in (
        ({"prompt_key": "problems"}, ["'problems'", "answer, images, problem", "data.prompt_key=problem"]),
        ({"answer_key": "ground_truth"}, ["'ground_truth'", "answer, images, problem", "data.answer_key"]),
    ):
        with pytest.raises(DataError) as caught:
            make_builder(processors, **options).build(row(), "train:0")
        assert all(fact in str(caught.value) for fact in facts)


def test_media_that_the_model_does_not_take_are_an_error_of_the_dataset(processors, text_processors):
    for own, one_row in (
        (text_processors, row()),
        (text_processors, video_row()),
        (replace(processors, video_processor=None), video_row()),
    ):
        builder = make_builder(own)
        for method in (builder.build, builder.inspect, builder.measure):
            with pytest.raises(DataError, match=f"a {own.family.model_type} model takes none") as caught:
                method(one_row, "train:0")
            assert not isinstance(caught.value, UnusableRow)
    assert "user\n<video>?" in text_of(text_processors, "<video>?", system_prompt="Be brief.")


# format_prompt and chat templates


def test_format_prompt_is_a_template_or_a_file(processors, tmp_path):
    template = "{{ content | trim }} Think first.\n"
    (tmp_path / "math.jinja").write_text(template)
    for given in (template, str(tmp_path / "math.jinja")):
        prompt = make_builder(processors, format_prompt=given).build(row(" <image>What? "), "train:0")
        assert prompt.text == "<image>What? Think first."
        assert prompt.row["problem"] == " <image>What? "
    with pytest.raises(ConfigError, match=r"meth\.jinja: .*No such file"):
        make_builder(processors, format_prompt=str(tmp_path / "meth.jinja"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ contnt }}", "uses contnt.*{{ content }}"),
        ("{% set x = 1 %}Solve it.", "uses no variable"),
        ("{{ content }} {{ image }}", "uses content, image"),
        ("{{ content", "line 1"),
        ("{{ content.nothing.more }}", "nothing"),
        ("{{ content.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_broken_template_is_a_config_error(processors, template, expected):
    with pytest.raises(ConfigError, match=f"data.format_prompt.*{expected}"):
        make_builder(processors, format_prompt=template)


def test_a_template_that_fails_on_some_rows_skips_them(processors, tiny_vlm):
    builder = make_builder(processors, format_prompt="{{ content }}{{ 1 / (content | length - 2) }}")
    assert rejection(builder, row("Hi", [])) == ("prompt", "train:7: format_prompt fails: division by zero")
    assert builder.build(row("Hello", []), "train:0").text == "Hello0.3333333333333333"
    strict = load_processors(str(tiny_vlm), chat_template="{{ raise_exception('no such chat') }}")
    reason, message = rejection(make_builder(strict), row("Hello", []))
    assert reason == "prompt"
    assert "no such chat" in message


@pytest.mark.faults
def test_a_template_that_reaches_its_limits_on_many_rows_ends_the_scan(processors):
    endless = "{% macro f() %}{{ f() }}{% endmacro %}"
    own = replace(processors, tokenizer=copy.deepcopy(processors.tokenizer))
    own.tokenizer.chat_template = endless + "{% if messages[0].content == 'Hi' %}{{ f() }}{% endif %}{{ messages }}"
    for builder in (
        make_builder(processors, format_prompt=endless + "{% if content == 'Hi' %}{{ f() }}{% endif %}{{ content }}"),
        make_builder(own),
    ):
        errors = []
        for number in range(10):
            with pytest.raises(DataError, match=f"train:{number}.*without end") as caught:
                builder.inspect(row("Hi", []), f"train:{number}")
            errors.append(type(caught.value))
        assert errors[0] is UnusableRow
        assert errors[-1] is DataError


def test_a_given_chat_template_is_used(tiny_vlm):
    own = load_processors(str(tiny_vlm), chat_template="{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}")
    assert text_of(own, "1 + 1?") == "Q: 1 + 1?\nA:"
    own = load_processors(str(tiny_vlm), chat_template="{% for m in messages %}{{ m.role }}{% endfor %}")
    reason, message = rejection(make_builder(own), row())
    assert reason == "markers"
    assert "placeholders that the chat template writes: 0, images: 1" in message


def test_a_token_without_an_embedding_is_named(tiny_vlm):
    processors = load_processors(str(tiny_vlm))
    processors.tokenizer.add_tokens(["<grounding>"])
    builder = make_builder(processors)
    reason, message = rejection(builder, row("<image>Where <grounding>?"))
    assert reason == "vocabulary"
    assert "'<grounding>'" in message
    assert f"{processors.hf_config.get_text_config().vocab_size:,} embeddings" in message
    builder.build(row("<image>Where?"), "train:7")


# Tools and environments

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Return a part of the <image>.",
            "parameters": {"type": "object", "properties": {"left": {"type": "integer", "description": "é"}}},
        },
    }
    for name in ("crop", "zoom")
]
TOOLS = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in SCHEMAS)


def test_a_template_writes_the_tools(tiny_model):
    qwen3 = with_template(processors_of(tiny_model("qwen3")), chat_templates.QWEN3)
    builder = make_builder(qwen3, tools=SCHEMAS, max_prompt_length=1024)
    assert text_of(qwen3, tools=SCHEMAS, system_prompt="Be brief.") == (
        f"<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{TOOLS}\n</tools><|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(lengths(builder, {"problem": "How many?", "answer": "4"})) == 1
    # A template without a system message of its own.
    own = with_template(qwen3, chat_templates.THINKING)
    assert text_of(own, tools=SCHEMAS).startswith("<|im_start|>system\n# Tools")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_that_a_template_does_not_write_are_added_to_the_system_message(processors, system):
    text = text_of(processors, tools=SCHEMAS, system_prompt=system)
    shown = system or "You answer questions about pictures."
    assert text.startswith(f"<|im_start|>system\n{shown}\n\n# Tools\n\n")
    assert f"<tools>\n{TOOLS}\n</tools>" in text
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>") == 3
    with pytest.raises(UnusableRow, match="more than max_prompt_length=64"):
        text_of(processors, tools=SCHEMAS, max_prompt_length=64)


def test_a_template_that_takes_parts_only_gets_parts(tiny_model):
    processors = with_template(processors_of(tiny_model("llava")), chat_templates.LLAVA)
    assert text_of(processors, system_prompt="Be brief.") == "Be brief. USER: How many? ASSISTANT:"
    with_tools = text_of(processors, system_prompt="Be brief.", tools=SCHEMAS)
    assert with_tools.startswith("Be brief. \n\n# Tools\n")
    assert with_tools.endswith("</tool_call> USER: How many? ASSISTANT:")
    assert text_of(processors, tools=SCHEMAS).startswith("# Tools\n")


def test_an_environment_opens_the_conversation(processors):
    def opened(**rollout):
        config = Config(data={"prompt_key": "problem"}, worker={"rollout": rollout})
        return decoded(processors, open_builder(config, processors).build({"problem": "Play.", "answer": "4"}, "a:0"))

    question = opened(environment="maze.py:Maze")
    assert question.endswith("Play.<|im_end|>\n")
    assert opened() == opened(tools=("crop",)) == f"{question}<|im_start|>assistant\n"


# Videos


def test_a_video_replaces_its_marker(processors):
    own = counting(processors)
    builder = make_builder(own)
    one_row = video_row("Look: <video> Well?", {"bytes": make_video(), "path": "clips/film.mp4"})
    prompt = builder.build(one_row, "train:3")
    tokens = builder.video_processor.tokens_of(prompt.vision)
    assert f"Look: <|vision_start|>{'<|video_pad|>' * tokens[0]}<|vision_end|> Well?" in decoded(processors, prompt)
    assert (prompt.text, prompt.image_refs) == ("Look: <video> Well?", ("train:3/videos/0 (film.mp4)",))
    assert "videos" not in prompt.row
    assert (own.video_processor.calls, own.image_processor.calls) == (prompt.vision.grid_thw[0, 0], 0)
    assert lengths(builder, one_row) == {len(prompt.token_ids)}


@pytest.mark.parametrize("clip", [{"frames": 1}, {"frames": 3}, {"frames": 10, "fps": 25}], ids=["1", "3", "0.4 s"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_the_shortest_videos_are_used(tiny_model, model_type, clip):
    builder = make_builder(processors_of(tiny_model(model_type)))
    one_row = video_row(videos=[make_video(**clip)])
    prompt = builder.build(one_row, "train:7")
    [[time, rows, columns]] = prompt.vision.grid_thw.tolist()
    assert time == (2 if clip.get("fps") else 1)  # two frames each; at least four frames if there are so many
    assert len(prompt.vision.pixel_values) == time * rows * columns
    assert lengths(builder, one_row) == {len(prompt.token_ids)}


def test_an_overlong_video_is_rejected_before_it_is_decoded(processors):
    own = counting(processors)
    reason, message = rejection(make_builder(own, max_prompt_length=40), video_row(videos=[make_video(frames=60)]))
    assert reason == "overlong"
    assert "of them for videos" in message
    assert own.video_processor.calls == 0


# What is far too long is refused before it is tokenized or sent


@pytest.mark.faults
def test_the_limit_is_64_characters_for_each_token_and_65536_more(processors):
    builder = make_builder(processors, max_prompt_length=64)
    limit = CHARACTERS_PER_TOKEN * 64 + FURTHER_CHARACTERS
    with pytest.raises(UnusableRow, match="tokens, more than") as error:
        builder.measure(row("é" * (limit - 200), []), "train:7")
    with pytest.raises(UnusableRow) as error:
        builder.measure(row("é" * limit + "x", []), "train:7")
    assert error.value.reason == "overlong"
    assert error.value.num_tokens == 2 * limit + 1  # bytes: no text has more tokens
    assert "69,633 characters" in str(error.value)
    # What the templates add counts too.
    builder = make_builder(processors, max_prompt_length=64, format_prompt="{{ content }}" * 31)
    assert rejection(builder, row("x" * 5000, []))[0] == "overlong"
    with pytest.raises(ConfigError, match=r"data\.system_prompt has 100,000 characters"):
        make_builder(processors, max_prompt_length=64, system_prompt="x" * 100_000)


@pytest.mark.faults
@pytest.mark.parametrize(
    "problem",
    [
        "x" * 10_000_000,
        [{"role": "user", "content": "x" * 50_000}] * 2,
        [{"role": "system", "content": "x" * 10_000_000}, {"role": "user", "content": "q"}],
    ],
    ids=["question", "several messages", "system message"],
)
def test_a_long_prompt_is_overlong_and_not_tokenized(processors, problem, monkeypatch):
    builder = make_builder(processors, max_prompt_length=64)

    def tokenize(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    monkeypatch.setattr(builder._chat, "tokenize", tokenize)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rejection(builder, row(problem, []))[0] == "overlong"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB; tokenized, some GB


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize(
    "extra",
    [
        {"answer": "1" * MAX_ROW_CHARACTERS},
        {"tests": [{"input": "x" * 1000}] * 17_000},
        {"answer": [0.5] * (MAX_ROW_CHARACTERS // 8 + 1)},
    ],
    ids=["ground truth", "nested column", "numbers"],
)
def test_a_row_with_more_text_than_a_reward_function_gets_is_skipped(processors, extra):
    reason, message = rejection(make_builder(processors), row("q", []) | extra)
    assert reason == "row_size"
    assert re.search(r"1[67],\d{3},\d{3} characters", message)
    check_row_size({"prompt": "q", "notes": b"x" * (MAX_ROW_CHARACTERS + 1)}, "train:0")  # bytes are not passed on


def test_only_the_first_rows_are_read_with_a_limit(processors, tmp_path, own_datasets_cache):
    path = write_jsonl(tmp_path / "val.jsonl", ({"problem": "Why?", "answer": str(n)} for n in range(9)))
    for limit, number in ((4, 4), (100, 9)):
        prompts = open_prompts(path, make_builder(processors), num_workers=1, max_rows=limit)
        assert len(prompts) == prompts.num_rows == number
        assert prompts[3].ground_truth == "3"
