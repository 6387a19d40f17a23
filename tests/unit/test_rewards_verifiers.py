"""The shipped verifiers, on answers graded by hand; the example files must agree with them."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import dapo, math, r1v

EXAMPLES = Path(__file__).parents[2] / "examples" / "reward_function"


def answer(response, ground_truth, response_length=10):
    return {"response": response, "ground_truth": ground_truth, "response_length": response_length}


MATH = [
    # response, ground truth, accuracy, format
    (r"<think>3 + 4</think>\boxed{7}", "7", 1, 1),
    (r"<think>3 + 4</think> So it is \boxed{7}, I think.", "7", 1, 1),
    (r"<think>3 + 4</think>\boxed{8}", "7", 0, 1),
    (r"It is \boxed{7}", "7", 1, 0),
    (r"so <think>3 + 4</think>\boxed{7}", "7", 1, 0),  # something stands before
    (r"<think>3 + 4 is \boxed{7}</think>", "7", 1, 0),  # the box belongs after the thought
    (r"<think>3 + 4</think>7", "7", 0, 0),
    (r"<think>3 + 4</think>\boxed{7", "7", 0, 0),  # never closed
    ("< think >3 + 4< / think >\n\\boxed{7}", "7", 1, 1),  # spaces in the tags are forgiven
    (r"<think>a</think>\boxed{1} or \boxed{2}", "2", 1, 1),  # the last box counts
    (r"<think>a</think>\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1, 1),
    (r"<think>a</think>\boxed{0.5}", r"\frac{1}{2}", 1, 1),
    (r"<think>a</think>\boxed{2\sqrt{3}}", r"2 \sqrt { 3 }", 1, 1),
    (r"<think>a</think>\boxed{x+1}", "1+x", 1, 1),
    (r"<think>a</think>\boxed{60^\circ}", "60", 1, 1),
    ("<think>\na\n\nb\n</think>\n\\boxed{7}\n", 7, 1, 1),  # a ground truth that is a number
    ("", "7", 0, 0),
    ("no box at all", "None", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "form"), MATH)
def test_math_by_hand(response, ground_truth, accuracy, form):
    assert math.compute_score(answer(response, ground_truth)) == {
        "overall": pytest.approx(0.9 * accuracy + 0.1 * form),
        "accuracy": float(accuracy),
        "format": float(form),
    }


def test_the_weight_of_the_format_can_be_chosen():
    right_but_unformatted = answer(r"\boxed{7}", "7")
    assert math.compute_score(right_but_unformatted, format_weight=0.25)["overall"] == 0.75


def test_tidy_takes_white_space_around_angle_brackets_and_slashes_only():
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
    ("<think></answer>", "7", 0, 0),
    ("", "7", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "form"), R1V)
def test_r1v_by_hand(response, ground_truth, accuracy, form):
    assert r1v.compute_score(answer(response, ground_truth)) == {
        "overall": 0.5 * accuracy + 0.5 * form,
        "accuracy": float(accuracy),
        "format": float(form),
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
    ("length", "punishment"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_dapo_punishes_the_last_fifth_of_the_length(length, punishment):
    assert dapo.overlong_punishment(length, max_response_length=100, overlong_buffer_length=20) == punishment


def test_dapo_without_a_buffer_punishes_only_beyond_the_limit():
    assert dapo.overlong_punishment(100, max_response_length=100, overlong_buffer_length=0) == 0.0
    assert dapo.overlong_punishment(101, max_response_length=100, overlong_buffer_length=0) == -1.0


def test_dapo_adds_accuracy_and_the_weighted_punishment():
    limits = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}
    assert dapo.compute_score(answer("Answer: 34", "34", response_length=90), **limits) == {
        "overall": 0.75,
        "accuracy": 1.0,
        "overlong": -0.5,
        "accuracy_normalized": 1.0,
    }
    assert dapo.compute_score(answer("Answer: 33", "34", response_length=10), **limits) == {
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


def test_the_example_files_score_as_the_shipped_verifiers_do():
    limits = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}
    answers = [answer(response, truth) for response, truth, _, _ in MATH + R1V]
    answers += [answer("Answer: 34", "34", response_length=length) for length in (10, 90, 200)]
    assert example("math").compute_score(answers, 0.3) == [math.compute_score(one, 0.3) for one in answers]
    assert [example("r1v").compute_score(one) for one in answers] == [r1v.compute_score(one) for one in answers]
    assert example("dapo").compute_score(answers, **limits) == [dapo.compute_score(one, **limits) for one in answers]


@pytest.mark.parametrize("text", [" \n" * 100_000, "</think>\\boxed{" * 20_000, "<think>" * 40_000, "<" * 200_000])
def test_hostile_text_is_searched_in_linear_time(text):
    """A search that takes quadratic time would run into the time limit of the test."""
    assert math.format_reward(math.tidy("<think>" + text)) == 0.0
    assert r1v.format_reward("<think>" + text + "</answer>") == 0.0
