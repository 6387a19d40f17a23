"""The counting verifier, on completions scored by hand."""

import importlib.util
from decimal import Decimal
from pathlib import Path

import pytest

from trigon.rewards.verifiers import counting

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "counting.py"


def reward_input(response, ground_truth):
    return {"response": response, "ground_truth": ground_truth, "response_length": 10}


CASES = [
    # response, ground truth, accuracy, format
    ("<think>one, two, three</think><answer>3</answer>", "3", 1, 1),
    ("<think>one, two, three</think> <answer> 3 </answer>", "<answer> 3 </answer>", 1, 1),  # tags in the ground truth
    ("<think>a</think><answer>4</answer>", "3", 0, 1),
    ("<think>a</think><answer>There are 3 cubes.</answer>", 3, 1, 1),
    ("<think>a</think><answer>three</answer>", 3.0, 1, 1),
    ("<think>a</think><answer>none</answer>", "0", 1, 1),
    ("<think>a</think><answer>3 or 4</answer>", "3", 0, 1),  # two numbers
    ("<think>a</think><answer>1</answer><answer>3</answer>", "3", 0, 1),  # the first answer counts
    ("<think>3</think><answer></answer>", "3", 0, 1),
    ("<answer>3</answer>", "3", 1, 0),
    ("3", "3", 1, 0),
    ("", "3", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "format_score"), CASES)
def test_scores_by_hand(response, ground_truth, accuracy, format_score):
    assert counting.compute_score(reward_input(response, ground_truth)) == {
        "overall": 0.5 * accuracy + 0.5 * format_score,
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("3.", 3),
        ("(3)", 3),
        ("x=3", 3),
        ("3.0", 3),
        ("1,000", 1000),
        ("1,00", None),
        ("thirty-one", None),
        ("one hundred", None),
        ("a dozen and one", None),
        ("1.2.3", None),
        ("v2", None),
        ("-3", -3),
        ("−3", -3),
        ("３", 3),  # full width
        ("²", None),
        ("3 of the 3", 3),
        ("one of two", None),
        ("one of the 3", 3),  # digits first
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("", None),
        ("9" * 200, Decimal("9" * 200)),
        ("9" * 201, None),
    ],
)
def test_the_number_in_a_text(text, count):
    assert counting.read_count(text) == count


@pytest.mark.parametrize("ground_truth", ["several", "", "3 or 4"])
def test_a_ground_truth_without_a_count_is_an_error(ground_truth):
    with pytest.raises(ValueError, match="is not a count"):
        counting.compute_score(reward_input("<think>a</think><answer>3</answer>", ground_truth))


def test_the_example_file_equals_the_shipped_verifier():
    spec = importlib.util.spec_from_file_location("example_counting", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    reward_inputs = [reward_input(response, truth) for response, truth, _, _ in CASES]
    assert [example.compute_score(single, 0.3) for single in reward_inputs] == [
        counting.compute_score(single, 0.3) for single in reward_inputs
    ]
