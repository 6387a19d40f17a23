"""Any row, image, message or template gives a prompt, or is refused with a reason."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from support.builders import make_builder
from support.images import png
from trigon.data.images import encoded_image, image_size, open_image
from trigon.data.media_files import MediaSource
from trigon.data.prompts import PromptBuilder, load_format_prompt
from trigon.data.rows import UnusableRow
from trigon.data.templates import TemplateFailure, render
from trigon.errors import ConfigError, DataError
from trigon.models.load import load_processors

MAX_PIXELS = 4_000_000
WORDS = [
    "<image>",
    "<video>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "{{ content }}",
    "\0",
    "é",
]

texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=20), max_size=6).map("".join)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=40))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", ""]) | scalars, "content": texts | values}
    ),
    max_size=4,
)


def encode(size: tuple[int, int], mode: str, file_format: str) -> bytes:
    stream = io.BytesIO()
    image = Image.frombytes("RGB", size, random.Random(size[0]).randbytes(3 * size[0] * size[1]))
    image.convert(mode).save(stream, file_format)
    return stream.getvalue()


FILES = [
    encode((40, 30), mode, file_format)
    for mode, file_format in [
        ("RGB", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("RGBA", "WEBP"), ("RGB", "JPEG"), ("CMYK", "JPEG"),
        ("L", "GIF"), ("RGB", "BMP"), ("RGB", "TIFF"), ("L", "TIFF"),
    ]
]  # fmt: skip


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """An image file with some bytes replaced, removed or repeated, or cut."""
    content = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0:
                content[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                content[place : place + 4] = draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
                )
            case 2:
                del content[place : place + draw(st.integers(1, 20))]
            case 3:
                content[place:place] = content[place : place + 30]
    return bytes(content[: draw(st.integers(0, len(content)) | st.just(len(content)))])


images = st.one_of(
    damaged_files(),
    st.just(png()),
    values,
    st.fixed_dictionaries({"bytes": damaged_files() | scalars, "path": scalars}),
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "problem": texts | messages | values,
        "answer": values,
        "images": st.lists(images, max_size=3) | images,
        "videos": values,
    },
)


@pytest.fixture(scope="module")
def builders(tiny_vlm: Path) -> list[PromptBuilder]:
    processors = load_processors(str(tiny_vlm))
    changes: list[dict[str, Any]] = [{}, {"allow_special_tokens": True}, {"process_images": False, "limit_images": 1}]
    return [make_builder(processors, max_image_pixels=MAX_PIXELS, **each) for each in changes]


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(row=rows, number=st.integers(0, 2))
def test_any_row(builders: list[PromptBuilder], row: dict[str, Any], number: int):
    builder = builders[number]
    try:
        prompt = builder.build(row, "train:0")
    except (UnusableRow, DataError) as error:
        assert 0 < len(str(error)) < 5000
        return
    except KeyError:
        # The columns of a dataset are checked once for all rows (check_columns).
        assert not {"problem", "answer"} <= set(row)
        return
    assert 0 < len(prompt.token_ids) <= builder.data.max_prompt_length
    assert builder.measure(row, "train:0")[0] == len(prompt.token_ids)
    if prompt.vision is None:
        assert not any(builder._placeholders.count(prompt.token_ids, kind) for kind in ("image", "video"))


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # as a run does: ignore_pillow_warnings
@given(damaged_files())
def test_any_image_file(content: bytes):
    source = MediaSource(content, "train:0/images/0", MAX_PIXELS)
    start = time.process_time()
    try:
        image = open_image(source)
    except UnusableRow as error:
        assert str(error).startswith("train:0/images/0")
        assert "\n" not in str(error)
    else:
        assert image.mode == "RGB"
        assert image.size == image_size(source)
        assert encoded_image(source) == content
    assert time.process_time() - start < 5


PARTS = [
    "{{ content }}", "{% for i in range(1000000) %}", "{% for x in content %}", "{% endfor %}", "{{ x * 99999 }}",
    "{% set x = content * 1000 %}", "{% macro m() %}", "{{ m() }}", "{% endmacro %}", "{{ content.__class__.__mro__ }}",
    "{{ content|join('x' * 100) }}", "{{ lipsum(100) }}", "{{ cycler }}", "{% if content %}", "{% endif %}",
    "{{ content|center(100000000) }}", "{{ '%1000000000d' % 1 }}", "{{ range(999999999)|list }}", "{{ 9 ** 9 }}", "{{",
    "}}", "{% raw %}",
]  # fmt: skip


@pytest.mark.faults
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=10), min_size=1, max_size=6).map("".join))
def test_any_format_prompt(source: str):
    assume("{{" in source or "{%" in source)  # otherwise it is the name of a file
    start = time.process_time()
    try:
        template = load_format_prompt(source)
    except ConfigError as error:
        assert 0 < len(str(error)) < 5000
    else:
        try:
            assert isinstance(render(template, "plain", {"content": "What? " * 20}), str)
        except TemplateFailure as error:
            assert str(error)
    assert time.process_time() - start < 30
