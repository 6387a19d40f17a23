"""The math, r1v and dapo verifiers, on completions scored by hand; example files equal them."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import dapo, math, r1v

EXAMPLES = Path(__file__).parents[2] / "examples" / "reward_function"


def reward_input(response, ground_truth, response_length=10):
    return {"response": response, "ground_truth": ground_truth, "response_length": response_length}


MATH = [
    # response, ground truth, accuracy, format
    (r"<think>3 + 4</think>\boxed{7}", "7", 1, 1),
    (r"<think>3 + 4</think> So it is \boxed{7}, I think.", "7", 1, 1),
    (r"<think>3 + 4</think>\boxed{8}", "7", 0, 1),
    (r"It is \boxed{7}", "7", 1, 0),
    (r"so <think>3 + 4</think>\boxed{7}", "7", 1, 0),  # text before <think>
    (r"<think>3 + 4 is \boxed{7}</think>", "7", 1, 0),  # the box must follow </think>
    (r"<think>3 + 4</think>7", "7", 0, 0),
    (r"<think>3 + 4</think>\boxed{7", "7", 0, 0),  # not closed
    ("< think >3 + 4< / think >\n\\boxed{7}", "7", 1, 1),  # spaces in tags are allowed
    (r"<think>a</think>\boxed{1} or \boxed{2}", "2", 1, 1),  # the last box counts
    (r"<think>a</think>\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1, 1),
    (r"<think>a</think>\boxed{0.5}", r"\frac{1}{2}", 1, 1),
    (r"<think>a</think>\boxed{2\sqrt{3}}", r"2 \sqrt { 3 }", 1, 1),
    (r"<think>a</think>\boxed{x+1}", "1+x", 1, 1),
    (r"<think>a</think>\boxed{60^\circ}", "60", 1, 1),
    ("<think>\na\n\nb\n</think>\n\\boxed{7}\n", 7, 1, 1),  # a ground truth that is a number
    ("3 + 4</think>\n\\boxed{7}", "7", 1, 1),  # after a prompt that ends in <think>
    ("\n3 + 4\n< / think >\\boxed{8}", "7", 0, 1),
    ("</think>\\boxed{7}", "7", 1, 1),
    (r"3 + 4 is \boxed{7}</think>", "7", 1, 0),
    (r"3 + 4</think>\boxed{7} <think>", "7", 1, 0),
    ("", "7", 0, 0),
    ("no box at all", "None", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "format_score"), MATH)
def test_math_by_hand(response, ground_truth, accuracy, format_score):
    assert math.compute_score(reward_input(response, ground_truth)) == {
        "overall": pytest.approx(0.9 * accuracy + 0.1 * format_score),
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


def test_the_weight_of_the_format_is_an_argument():
    without_think = reward_input(r"\boxed{7}", "7")
    assert math.compute_score(without_think, format_weight=0.25)["overall"] == 0.75


def test_tidy_only_removes_white_space_around_angle_brackets_and_slashes():
    assert math.tidy(" a  b < think >\t1 / 2 </ think > c ") == " a  b<think>1/2</think>c "


R1V = [
    ("<think>3 + 4</think><answer>7</answer>", "7", 1, 1),
    ("<think>3 + 4</think>\n <answer> 7 </answer>", "7", 1, 1),
    ("<think>3 + 4</think>\n<answer>\n7\n</answer>", "7", 1, 1),
    ("<think>3 + 4</think><answer>8</answer>", "7", 0, 1),
    ("<think>3 + 4</think> so <answer>7</answer>", "7", 1, 0),
    ("<think>3 + 4</think><answer>7</answer>.", "7", 1, 0),
    ("<answer>7</answer>", "7", 1, 0),
    ("7", "7", 1, 0),  # without tags, the whole response is the answer
    ("3 + 4</think>\n<answer>7</answer>", "7", 1, 1),  # after a prompt that ends in <think>
    ("3 + 4</think> so <answer>7</answer>", "7", 1, 0),
    ("3 + 4 <answer>7</answer>", "7", 1, 0),
    ("<think></answer>", "7", 0, 0),
    ("", "7", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "format_score"), R1V)
def test_r1v_by_hand(response, ground_truth, accuracy, format_score):
    assert r1v.compute_score(reward_input(response, ground_truth)) == {
        "overall": 0.5 * accuracy + 0.5 * format_score,
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


@pytest.mark.parametrize(
    ("response", "ground_truth", "accuracy"),
    [
        ("So.\nAnswer: 34", "34", 1.0),
        ("So.\nanswer : $34$", "34", 1.0),
        ("Answer: 33\nAnswer: 34", "34", 1.0),  # the last one counts
        ("Answer: 34\nAnswer: 33", "34", -1.0),
        ("Answer: x = 34", "34", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1.0),
        (r"Answer: 34\text{ cm}", "34", 1.0),
        (r"Answer: 60^\circ", "60", 1.0),
        ("Answer: 34", 34, 1.0),
        ("34", "34", -1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),  # only the last 300 characters are read
        ("", "", -1.0),
    ],
)
def test_dapo_accuracy_by_hand(response, ground_truth, accuracy):
    assert dapo.accuracy_reward(response, ground_truth) == accuracy


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_dapo_penalty_grows_over_the_buffer(length, penalty):
    assert dapo.overlong_punishment(length, max_response_length=100, overlong_buffer_length=20) == penalty


def test_dapo_penalty_without_a_buffer_applies_beyond_the_limit():
    assert dapo.overlong_punishment(100, max_response_length=100, overlong_buffer_length=0) == 0.0
    assert dapo.overlong_punishment(101, max_response_length=100, overlong_buffer_length=0) == -1.0


def test_dapo_adds_accuracy_and_the_weighted_penalty():
    limits = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}
    assert dapo.compute_score(reward_input("Answer: 34", "34", response_length=90), **limits) == {
        "overall": 0.75,
        "accuracy": 1.0,
        "overlong": -0.5,
        "accuracy_normalized": 1.0,
    }
    assert dapo.compute_score(reward_input("Answer: 33", "34", response_length=10), **limits) == {
        "overall": -1.0,
        "accuracy": -1.0,
        "overlong": 0.0,
        "accuracy_normalized": 0.0,
    }


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_files_equal_the_shipped_verifiers():
    limits = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}
    reward_inputs = [reward_input(response, truth) for response, truth, _, _ in MATH + R1V]
    reward_inputs += [reward_input("Answer: 34", "34", response_length=length) for length in (10, 90, 200)]
    assert example("math").compute_score(reward_inputs, 0.3) == [
        math.compute_score(single, 0.3) for single in reward_inputs
    ]
    assert [example("r1v").compute_score(single) for single in reward_inputs] == [
        r1v.compute_score(single) for single in reward_inputs
    ]
    assert example("dapo").compute_score(reward_inputs, **limits) == [
        dapo.compute_score(single, **limits) for single in reward_inputs
    ]


@pytest.mark.parametrize("text", [" \n" * 100_000, "</think>\\boxed{" * 20_000, "<think>" * 40_000, "<" * 200_000])
def test_adversarial_text_is_searched_in_linear_time(text):
    """A search in quadratic time would exceed the time limit of the test."""
    assert math.format_reward(math.tidy("<think>" + text)) == 0.0
    assert r1v.format_reward("<think>" + text + "</answer>") == 0.0
