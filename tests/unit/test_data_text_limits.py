"""Prompts and rows that are far too long are refused before they are tokenized or sent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trigon.data.bad_rows import UnusableRow
from trigon.data.prompts import PromptBuilder
from trigon.data.text_limits import (
    CHARACTERS_PER_TOKEN,
    FURTHER_CHARACTERS,
    MAX_ROW_CHARACTERS,
    check_prompt_text,
    check_row_size,
)
from trigon.errors import ConfigError

pytestmark = pytest.mark.faults


def builder_of(processors, *, max_prompt_length: int = 64, **options) -> PromptBuilder:
    return PromptBuilder(
        processors,
        prompt_key="prompt",
        answer_key="answer",
        image_key="images",
        image_dir=None,
        **{"format_prompt": None, "system_prompt": None, **options},
        max_prompt_length=max_prompt_length,
        max_image_pixels=10_000,
        limit_images=0,
    )


def test_the_limit_is_64_characters_for_each_token_and_65536_more():
    limit = CHARACTERS_PER_TOKEN * 64 + FURTHER_CHARACTERS
    check_prompt_text(["é" * (limit - 1), "x"], "train:7", max_prompt_length=64)
    with pytest.raises(UnusableRow) as error:
        check_prompt_text(["é" * limit, "x"], "train:7", max_prompt_length=64)
    assert error.value.reason == "overlong"
    assert error.value.num_tokens == 2 * limit + 1  # bytes: no text has more tokens
    assert str(error.value).startswith("train:7: 69,633 characters of text, which are not counted in tokens: more than")


@pytest.mark.faults
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x" * 10_000_000, "answer": "1"},
        {"prompt": [{"role": "user", "content": "x" * 50_000}] * 2, "answer": "1"},
        {"prompt": [{"role": "system", "content": "x" * 10_000_000}, {"role": "user", "content": "q"}], "answer": "1"},
    ],
    ids=["question", "several messages", "system message"],
)
def test_a_long_prompt_is_overlong_and_not_tokenized(processors, row, monkeypatch):
    builder = builder_of(processors)

    def tokenize(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    monkeypatch.setattr(builder._chat, "tokenize", tokenize)
    with pytest.raises(UnusableRow, match="characters of text") as error:
        builder.count(row)
    assert error.value.reason == "overlong"


@pytest.mark.faults
def test_what_the_templates_add_counts_too(processors):
    builder = builder_of(processors, format_prompt="{{ content }}" + "{{ content }}" * 30)
    assert builder.count({"prompt": "x", "answer": "1"}) <= 64
    with pytest.raises(UnusableRow, match="characters of text"):
        builder.count({"prompt": "x" * 5000, "answer": "1"})
    with pytest.raises(ConfigError, match=r"data\.system_prompt has 100,000 characters, and every prompt has it"):
        builder_of(processors, system_prompt="x" * 100_000)


@pytest.mark.faults
@pytest.mark.parametrize(
    "extra",
    [
        {"answer": "1" * MAX_ROW_CHARACTERS},
        {"answer": "1", "tests": [{"input": "x" * 1000}] * 17_000},
        {"answer": [0.5] * (MAX_ROW_CHARACTERS // 8 + 1)},
    ],
    ids=["ground truth", "nested column", "numbers"],
)
def test_a_row_with_more_text_than_a_reward_function_gets_is_skipped(processors, extra):
    row = {"prompt": "q", **extra}
    with pytest.raises(UnusableRow, match=r"its columns have 1[67],") as error:
        builder_of(processors).count(row)
    assert error.value.reason == "row_size"


def test_images_and_bytes_do_not_count_as_text():
    check_row_size({"prompt": "q", "answer": "1", "notes": b"x" * (MAX_ROW_CHARACTERS + 1)}, "train:0")


MEASURE = """
import resource, sys
from support.builders import make_builder
from trigon.models.load import load_processors

builder = make_builder(load_processors(sys.argv[1]), max_prompt_length=512)
builder.count({"problem": "q " * 100, "answer": "1"})
row = {"problem": "what is " * 1_250_000, "answer": "1"}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    builder.count(row)
except Exception as error:
    print(error.reason)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.extended
@pytest.mark.faults
def test_a_prompt_of_ten_million_characters_takes_little_memory(tiny_vlm):
    command = [sys.executable, "-c", MEASURE, str(tiny_vlm)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    reason, kilobytes = result.stdout.split()
    assert reason == "overlong"
    assert int(kilobytes) < 50_000  # tokenized, it takes some GB
