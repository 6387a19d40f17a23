"""What a reward function is given, which contract it keeps, and which replies count."""

import datetime
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest, bind, contract_of, encode, parts_of


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


def test_an_answer_is_a_plain_dict_with_every_field_of_the_request():
    text, left_out = encode(request(row={"id": 7, "choices": ["a", "b"], "nested": {"x": None}}))
    assert json.loads(text) == {
        "response": "42",
        "response_length": 2,
        "ground_truth": "42",
        "prompt": "What is it?",
        "finish_reason": "stop",
        "row": {"id": 7, "choices": ["a", "b"], "nested": {"x": None}},
    }
    assert left_out == ()


def test_an_answer_is_one_line_whatever_it_holds():
    text, _ = encode(request(response="a\nb\u2028c \ud800 \U0001f600"))
    assert text.splitlines() == [text]
    assert json.loads(text)["response"] == "a\nb\u2028c \ud800 \U0001f600"


def test_numbers_arrays_and_dates_of_a_dataset_travel_as_numbers_lists_and_text():
    row = {"scalar": np.int64(3), "array": np.array([[1.5, 2.5]]), "day": datetime.date(2024, 2, 29), "pair": (1, 2)}
    text, left_out = encode(request(row=row, ground_truth=np.float32(0.5)))
    assert json.loads(text)["row"] == {"scalar": 3, "array": [[1.5, 2.5]], "day": "2024-02-29", "pair": [1, 2]}
    assert json.loads(text)["ground_truth"] == 0.5
    assert left_out == ()


def test_columns_that_json_cannot_carry_are_left_out_and_named():
    text, left_out = encode(request(row={"id": 7, "sound": b"\x00\x01", "deep": {"blob": [b"x"]}}))
    assert json.loads(text)["row"] == {"id": 7}
    assert left_out == ("sound", "deep")


def test_a_ground_truth_that_json_cannot_carry_is_refused():
    with pytest.raises(RewardError, match=r"the ground truth b'\\x00' \(a bytes\) cannot be handed"):
        encode(request(ground_truth=b"\x00"))


def by_name_of_batch(reward_inputs, strictness, weight=1.0): ...
def by_name_of_sequential(reward_input, weight=1.0): ...
def by_list(samples: list[dict], strictness): ...
def by_dict(sample: dict[str, object], strictness): ...
def by_quoted_dict(sample: "dict[str, object]"): ...
def by_one_argument(samples): ...
def by_one_left(samples, weight): ...
def by_legacy_names(predict_str, ground_truth, format_weight=0.1): ...


@pytest.mark.parametrize(
    ("function", "kwargs", "contract"),
    [
        (by_name_of_batch, {}, "batch"),
        (by_name_of_sequential, {}, "sequential"),
        (by_list, {}, "batch"),
        (by_dict, {}, "sequential"),
        (by_quoted_dict, {}, "sequential"),
        (by_one_argument, {}, "batch"),
        (by_one_left, {"weight": 1}, "batch"),
        (by_legacy_names, {}, "legacy"),
    ],
)
def test_a_signature_tells_the_contract(function, kwargs, contract):
    assert contract_of(function, None, kwargs, where="f") == contract


def test_reward_type_outranks_the_signature():
    assert contract_of(by_name_of_sequential, "batch", {}, where="f") == "batch"
    assert contract_of(by_one_argument, "sequential", {}, where="f") == "sequential"


def test_signatures_that_fit_no_contract_are_refused():
    def verl_style(data_source, solution_str, ground_truth, extra_info=None): ...
    def nothing(): ...

    with pytest.raises(
        RewardError, match=r"takes \(data_source, solution_str, ground_truth, extra_info\), which fits no"
    ):
        contract_of(verl_style, None, {}, where="f")
    with pytest.raises(RewardError, match=r"takes \(\), which fits no contract"):
        contract_of(nothing, None, {}, where="f")


def test_unknown_reward_types_and_async_functions_are_refused():
    async def judge(reward_inputs): ...

    with pytest.raises(RewardError, match="REWARD_TYPE is 'function'; it must be"):
        contract_of(by_one_argument, "function", {}, where="f")
    with pytest.raises(RewardError, match="is async"):
        contract_of(judge, "batch", {}, where="f")


def test_further_arguments_are_bound():
    assert bind(lambda answers, weight: weight, "batch", {"weight": 0.3}, where="f")([]) == 0.3
    assert bind(lambda answers, **more: more["weight"], "batch", {"weight": 0.3}, where="f")([]) == 0.3
    assert bind(lambda predict_str, ground_truth, weight: weight, "legacy", {"weight": 0.3}, where="f")("", "") == 0.3


def test_further_arguments_that_the_function_does_not_take_are_refused_with_the_nearest_one():
    with pytest.raises(RewardError, match=r"does not take 'format_wieght' .* \(did you mean 'format_weight'\?\)"):
        bind(by_legacy_names, "legacy", {"format_wieght": 0.3}, where="f")
    with pytest.raises(RewardError, match="does not take 'predict_str'"):  # that place is the answer's
        bind(by_legacy_names, "legacy", {"predict_str": "x"}, where="f")


def test_further_arguments_that_are_missing_are_named():
    with pytest.raises(RewardError, match=r"missing a required argument: 'strictness'; give its further arguments"):
        bind(by_name_of_batch, "batch", {}, where="f")


def test_numbers_of_all_makes_count():
    reply = {
        "overall": True,
        "half": Fraction(1, 2).__float__(),
        "numpy": np.float32(0.25),
        "flag": np.bool_(False),
        "n": 3,
    }
    assert parts_of(reply) == {"overall": 1.0, "half": 0.5, "numpy": 0.25, "flag": 0.0, "n": 3.0}
    assert all(type(value) is float for value in parts_of(reply).values())


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (None, "returned None where a dict"),
        ("1.0", "returned '1.0' where a dict"),
        (1.0, "returned 1.0 where a dict"),
        ({}, "without 'overall'"),
        ({"accuracy": 1.0}, "without 'overall'"),
        ({"overall": math.nan}, "nan under 'overall' where a finite number"),
        ({"overall": -math.inf}, "-inf under 'overall' where a finite number"),
        ({"overall": 10**400}, "where a finite number"),
        ({"overall": None}, "None under 'overall' where a number"),
        ({"overall": "1.0"}, "'1.0' under 'overall' where a number"),
        ({"overall": 1.0, "note": "good"}, "'good' under 'note' where a number"),
        ({"overall": 1.0, 7: 1.0}, "7 as the name"),
        ({"overall": 1.0, "x" * 201: 1.0}, "as the name"),
        ({"overall": 1.0} | {str(n): 1.0 for n in range(100)}, "returned 101 numbers"),
    ],
)
def test_anything_else_is_refused_in_one_line(reply, complaint):
    with pytest.raises(RewardError) as refusal:
        parts_of(reply)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200
