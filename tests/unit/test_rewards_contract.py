"""Contracts of reward functions: encoded requests, detection by signature, and return values."""

import datetime
import json
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch

from trigon.algorithms.advantages import RewardBatch, estimate_advantages
from trigon.config.names import AdvantageEstimator
from trigon.errors import RewardError
from trigon.rewards.contract import (
    MAX_PART,
    MAX_REWARD,
    RewardRequest,
    detect_contract,
    encode_request,
    read_scores,
)


def request(**changes):
    fields = {
        "response": "42",
        "response_length": 2,
        "ground_truth": "42",
        "prompt": "What is it?",
        "finish_reason": "stop",
        "row": {},
    }
    return RewardRequest(**(fields | changes))


def test_an_encoded_request_is_one_line_with_every_field_that_json_can_represent():
    row = {
        "scalar": np.int64(3), "array": np.array([[1.5, 2.5]]), "day": datetime.date(2024, 2, 29), "pair": (1, 2),
        "nested": {"x": None}, "sound": b"\x00\x01", "deep": {"blob": [b"x"]},
    }  # fmt: skip
    text, omitted = encode_request(
        request(response="a\nb\u2028c \ud800 \U0001f600", ground_truth=np.float32(0.5), row=row)
    )
    assert text.splitlines() == [text]
    assert json.loads(text) == {
        "response": "a\nb\u2028c \ud800 \U0001f600",
        "response_length": 2,
        "ground_truth": 0.5,
        "prompt": "What is it?",
        "finish_reason": "stop",
        "row": {"scalar": 3, "array": [[1.5, 2.5]], "day": "2024-02-29", "pair": [1, 2], "nested": {"x": None}},
        "turns": [],
        "image_sizes": [],
    }
    assert omitted == ("sound", "deep")


def named_reward_inputs(reward_inputs, strictness, weight=1.0): ...
def named_reward_input(reward_input, weight=1.0): ...
def annotated_list(samples: list[dict], strictness): ...
def annotated_dict(sample: dict[str, object], strictness): ...
def annotated_quoted_dict(sample: "dict[str, object]"): ...
def single_argument(samples): ...
def single_required_argument(samples, weight): ...
def legacy_names(predict_str, ground_truth, format_weight=0.1): ...
def plain_names(response, ground_truth): ...


@pytest.mark.parametrize(
    ("function", "kwargs", "contract"),
    [
        (named_reward_inputs, {}, "batch"),
        (named_reward_input, {}, "sequential"),
        (annotated_list, {}, "batch"),
        (annotated_dict, {}, "sequential"),
        (annotated_quoted_dict, {}, "sequential"),
        (single_argument, {}, "batch"),
        (single_required_argument, {"weight": 1}, "batch"),
        (legacy_names, {}, "legacy"),
        (plain_names, {}, "legacy"),
    ],
)
def test_the_contract_is_detected_from_the_signature(function, kwargs, contract):
    assert detect_contract(function, None, kwargs, where="f") == contract
    assert detect_contract(function, "sequential", kwargs, where="f") == "sequential"  # REWARD_TYPE takes precedence


def annotated_otherwise(sample: object): ...
def annotated_iterable(samples: Iterable[dict]): ...


def test_a_function_given_in_python_scores_one_completion_unless_its_argument_says_a_list():
    detected = {
        function: detect_contract(function, None, {}, where="f", single="sequential")
        for function in (single_argument, annotated_otherwise, annotated_iterable, annotated_list, named_reward_inputs)
    }
    assert list(detected.values()) == ["sequential", "sequential", "batch", "batch", "batch"]


def verl_style(data_source, solution_str, ground_truth, extra_info=None): ...
def trl_style(completions, **kwargs): ...
def trl_style_with_columns(prompts, completions, answer): ...
def no_arguments(): ...


@pytest.mark.parametrize(
    ("function", "reward_type", "message"),
    [
        (verl_style, None, r"\(data_source, solution_str, .* verl's contract.*from-verl-and-trl"),
        (trl_style, None, r"\(completions, \*\*kwargs\), which is TRL's contract.*from-verl-and-trl"),
        (trl_style_with_columns, None, "TRL's contract"),
        (no_arguments, None, r"takes \(\), which fits no contract"),
        (single_argument, "function", "REWARD_TYPE is 'function'; it must be"),
    ],
)
def test_what_fits_no_contract_is_an_error(function, reward_type, message):
    with pytest.raises(RewardError, match=message):
        detect_contract(function, reward_type, {}, where="f")


def test_all_kinds_of_numbers_are_accepted():
    returned = {
        "overall": True,
        "half": Fraction(1, 2).__float__(),
        "numpy": np.float32(0.25),
        "flag": np.bool_(False),
        "n": 3,
    }
    assert read_scores(returned) == {"overall": 1.0, "half": 0.5, "numpy": 0.25, "flag": 0.0, "n": 3.0}
    assert all(type(value) is float for value in read_scores(returned).values())
    for number in (1, True, np.float32(1.0), np.array(1.0)):
        assert read_scores(number) == {"overall": 1.0}


@pytest.mark.faults
@pytest.mark.parametrize("estimator", get_args(AdvantageEstimator))
def test_the_largest_rewards_and_parts_have_finite_advantages_with_every_estimator(estimator):
    rewards = torch.tensor([[MAX_REWARD, -MAX_REWARD], [MAX_REWARD, 0.0]])
    parts = {
        "large": torch.tensor([[MAX_PART, -MAX_PART], [0.0, 1.0]]),
        "small": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
    }
    batch = RewardBatch(
        rewards, torch.ones(2, 2, dtype=torch.bool), torch.full((2, 2), 3), None, parts, torch.tensor([-MAX_REWARD, 0])
    )
    assert all(tokens.isfinite().all() for group in estimate_advantages(batch, estimator) for tokens in group)
    returned = {"overall": -MAX_REWARD, "part": MAX_PART}
    assert read_scores(returned) == returned


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None, expected a number, or a dict"),
        ([1.0], "returned [1.0], expected a number, or a dict"),
        ({"accuracy": 1.0}, "without 'overall'"),
        ({"overall": math.nan}, "nan for 'overall', expected a finite number"),
        ({"overall": -math.inf}, "-inf for 'overall', expected a finite number"),
        ({"overall": 1.7e308}, "1.7e+308 for 'overall', expected a number from -1e+06 to 1e+06"),
        ({"overall": 1.0, "bytes": 2e15}, "2e+15 for 'bytes', expected a number from -1e+15 to 1e+15"),
        ({"overall": "1.0"}, "'1.0' for 'overall', expected a number"),
        ({"overall": 1.0, "note": "good"}, "'good' for 'note', expected a number"),
        ({"overall": 1.0, 7: 1.0}, "7 as the name"),
        ({"overall": 1.0, "x" * 201: 1.0}, "as the name"),
        ({"overall": 1.0} | {str(n): 1.0 for n in range(100)}, "returned 101 scores"),
    ],
)
def test_other_return_values_are_an_error_of_one_line(returned, message):
    with pytest.raises(RewardError) as caught:
        read_scores(returned)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
