"""Each completion has a score or an error, whatever a reward function returns or sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest, encode_request, read_scores
from trigon.rewards.load import find_reward
from trigon.rewards.pool import RewardPool

numbers = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.array),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.integers(min_value=10**300),
)
names = st.sampled_from(["overall", "format", "accuracy", ""]) | st.text(max_size=150) | st.integers()
returned = st.one_of(
    numbers,
    st.none(),
    st.text(max_size=5),
    st.dictionaries(names, numbers | st.none(), max_size=5),
    st.lists(numbers, max_size=3),
)
rows = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=5), st.dates()
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.faults
@given(returned)
def test_any_returned_value(value: Any):
    try:
        scores = read_scores(value)
    except RewardError as error:
        assert 0 < len(str(error)) < 1000
        assert "\n" not in str(error)
    else:
        assert "overall" in scores
        assert all(type(score) is float and isfinite(score) for score in scores.values())
        assert isfinite(sum(score * score for score in scores.values()))  # as standard deviations need it


@given(response=st.text(), ground_truth=rows, row=st.dictionaries(st.text(max_size=5), rows, max_size=4))
def test_any_request(response: str, ground_truth: Any, row: dict[str, Any]):
    request = RewardRequest(response, 3, ground_truth, "Which?", "stop", row)
    try:
        line, omitted = encode_request(request)
    except RewardError as error:
        assert "ground truth" in str(error)
    else:
        assert "\n" not in line
        decoded = json.loads(line)
        assert decoded["response"] == response
        assert set(decoded["row"]) == set(row) - set(omitted)


# The function writes the completion, a text of JSON values or of any characters, to its own channel
# to the parent, as it is or as a frame; CALL is the id of the call that the parent waits for. Every
# completion must still get a score or an error.
HOSTILE = """
import os, stat, struct, sys

REWARD_TYPE = "sequential"

def score(reward_input):
    frame = sys._getframe()
    while "message" not in frame.f_locals:
        frame = frame.f_back
    text = reward_input["response"].replace("DEEP", "[" * 100_000).replace("CALL", frame.f_locals["message"]["call"])
    data = text.encode("utf-8", "replace")
    if text.startswith("{"):
        data = struct.pack("!II", len(data), 0) + data
    for number in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)
        except OSError:
            continue
    return 1.0
"""

numbers_of_json = numbers.filter(lambda n: isinstance(n, int | float))
results = st.fixed_dictionaries(
    {},
    optional={
        "scores": st.dictionaries(st.sampled_from(["overall", "x"]), numbers_of_json, max_size=2) | numbers_of_json,
        "error": st.text(max_size=5) | st.none(),
        "traceback": st.text(max_size=5) | st.integers(),
    },
)
messages = st.fixed_dictionaries(
    {"call": st.just("CALL") | st.text(max_size=4) | st.integers()},
    optional={
        "results": st.lists(results | st.integers(), max_size=2) | st.integers() | st.none(),
        "error": st.text(max_size=5) | st.none(),
        "seconds": numbers_of_json | st.text(max_size=3),
        "timed_out": st.booleans() | st.integers(),
        "wrong_length": st.booleans() | st.none(),
        "loaded": st.sampled_from([{}, {"unit": "?"}, 1]),
        "load_error": st.text(max_size=5),
    },
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    file = tmp_path_factory.mktemp("fuzz") / "hostile.py"
    file.write_text(HOSTILE)
    pool = RewardPool(find_reward(f"{file}:score", {}), num_workers=1, timeout_seconds=5.0, max_failed_fraction=1.0)
    yield pool
    pool.close()


@pytest.mark.extended
@pytest.mark.faults
@settings(max_examples=max(6, settings.default.max_examples // 20))
@given(st.lists(messages.map(json.dumps) | st.text(max_size=50) | st.just("DEEP"), min_size=1, max_size=4))
def test_any_message_on_the_channel(pool: RewardPool, texts: list[str]):
    scores = pool.score([RewardRequest(text, 1, "1", "Which?", "stop", {}) for text in texts])
    assert len(scores) == len(texts)
    for score in scores:
        assert score.outcome in ("ok", "failed", "timeout")
        assert isfinite(score.overall)
