"""The verifiers of answers in text, on completions scored by hand; example files equal them."""

import importlib.util
from decimal import Decimal
from importlib import import_module
from pathlib import Path

import pytest

from trigon.rewards.verifiers import counting, dapo, geoqa, math, r1v, vqa

EXAMPLES = Path(__file__).parents[2] / "examples" / "reward_function"


def reward_input(response, ground_truth, response_length=10):
    return {"response": response, "ground_truth": ground_truth, "response_length": response_length, "row": {}}


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
    (r"<think>a</think>\boxed{0.5}", r"\frac{1}{2}", 1, 1),
    ("<think>\na\n\nb\n</think>\n\\boxed{7}\n", 7, 1, 1),  # a ground truth that is a number
    ("3 + 4</think>\n\\boxed{7}", "7", 1, 1),  # after a prompt that ends in <think>
    ("\n3 + 4\n< / think >\\boxed{8}", "7", 0, 1),
    ("</think>\\boxed{7}", "7", 1, 1),
    (r"3 + 4 is \boxed{7}</think>", "7", 1, 0),
    (r"3 + 4</think>\boxed{7} <think>", "7", 1, 0),
    ("", "7", 0, 0),
    ("no box at all", "None", 0, 0),
]

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

COUNTING = [
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

GEOQA = [
    ("<think>a</think><answer>145°</answer>", "145", 1, 1),
    ("<think>a</think><answer>145°</answer>", "<answer> 145° </answer>", 1, 1),
    ("<think>a</think><answer>35°</answer>", 145, 0, 1),
    ("<think>a</think><answer>145°</answer><answer>35°</answer>", "35", 0, 1),  # the first answer counts
    ("145°", "145", 1, 0),
    ("<think>a</think><answer></answer>", "145", 0, 1),
    ("<think>a</think><answer></answer>", "", 0, 1),  # an empty answer is never right
    ("", "145", 0, 0),
]

VQA = [
    ("<think>a</think><answer>B</answer>", "B", 1, 1),
    ("<think>a</think><answer>C</answer>", "B", 0, 1),
    ("<think>a</think><answer>C</answer><answer>B</answer>", "B", 0, 1),  # the first answer counts
    ("B", "<answer>B</answer>", 1, 0),
    ("", "B", 0, 0),
]

CASES = {"math": MATH, "r1v": R1V, "counting": COUNTING, "geoqa": GEOQA, "vqa": VQA}
WEIGHTS = {"math": 0.1, "r1v": 0.5, "counting": 0.5, "geoqa": 0.5, "vqa": 0.1}
"""Of the format; accuracy has the rest."""


@pytest.mark.parametrize(
    ("name", "response", "ground_truth", "accuracy", "format_score"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_scores_by_hand(name, response, ground_truth, accuracy, format_score):
    verifier, weight = import_module(f"trigon.rewards.verifiers.{name}"), WEIGHTS[name]
    assert verifier.compute_score(reward_input(response, ground_truth)) == {
        "overall": pytest.approx((1 - weight) * accuracy + weight * format_score),
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


GEOQA_ANSWERS = [
    # answer, ground truth, equal
    ("145", "145°", True),
    (r"145^\circ", "145°", True),
    ("145 degrees", "145°", True),
    ("∠A = 145°", "145°", True),
    ("35°", "145°", False),
    ("6 cm.", "6cm", True),
    ("60 m", "6 m", False),
    ("√3", r"\sqrt{3}", True),
    ("√(2)/2", r"\frac{\sqrt{2}}{2}", True),
    ("6√3", "6√2", False),
    (r"25\pi\text{ cm}^2", "25π cm²", True),
    ("10²", "10^2", True),
    ("102", "10²", False),
    ("５", "5", True),
    ("0.5", r"\frac{1}{2}", True),
    ("cm", "7", False),
    ("°", "°", False),  # empty without the unit
    ("1" * 600, "1" * 600, False),
]

VQA_ANSWERS = [
    ("A red car.", "a red car", True),
    ("The Two red cars", "2 red cars", True),
    ("red car", "blue car", False),
    ("1,000.50", "1000.5", True),
    ("007", "7", True),
    ("−3", "-3", True),
    ("50%", "50", True),
    ("well-lit", "well lit", True),
    ("Ｙｅｓ", "yes", True),
    ("STRASSE", "straße", True),
    ("+", "-", False),
    ("the", "an", False),
    ("9" * 1001, "9" * 1001, False),
    ("", "x", False),
    # multiple choice
    ("b", "B", True),
    ("B. a dog", "B", True),
    ("The answer is (C).", "C", True),
    ("C", "B", False),
    ("A dog", "A", False),  # an article rather than a letter
    ("A or B", "A", False),
    ("(A) and (B)", "A", False),
    ("It is definitely not option B", "B", False),
    ("B. a dog and a cat", "B", True),
    ("", "A", False),
    # several right answers
    (".5", "0.5", True),
    ("sofa", ["couch", "sofa"], True),
    ("chair", ["couch", "sofa"], False),
    ("2", 2, True),
    ("yes", True, False),  # the text of True is "True"
]


@pytest.mark.parametrize(
    ("verifier", "answer", "ground_truth", "equal"),
    [(geoqa, *case) for case in GEOQA_ANSWERS] + [(vqa, *case) for case in VQA_ANSWERS],
)
def test_answers_by_hand(verifier, answer, ground_truth, equal):
    assert verifier.accuracy_reward(f"<think>a</think><answer>{answer}</answer>", ground_truth) == float(equal)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("3.", 3),
        ("x=3", 3),
        ("1,000", 1000),
        ("1,00", None),
        ("thirty-one", None),
        ("a dozen and one", None),
        ("1.2.3", None),
        ("−3", -3),
        ("３", 3),  # full width
        ("3 of the 3", 3),
        ("one of two", None),
        ("one of the 3", 3),  # digits first
        ("nan", None),
        ("1e3", None),
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


@pytest.mark.parametrize(
    ("response", "ground_truth", "accuracy"),
    [
        ("So.\nAnswer: 34", "34", 1.0),
        ("Answer: 33\nAnswer: 34", "34", 1.0),  # the last one counts
        ("Answer: 34\nAnswer: 33", "34", -1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("Answer: 34", 34, 1.0),
        ("34", "34", -1.0),
        ("Answer: 34" + " " * 300, "34", -1.0),  # only the last 300 characters are read
        ("", "", -1.0),
    ],
)
def test_dapo_accuracy_by_hand(response, ground_truth, accuracy):
    assert dapo.accuracy_reward(response, ground_truth) == accuracy


@pytest.mark.parametrize(
    ("length", "buffer", "penalty"),
    [(80, 20, 0.0), (81, 20, -0.05), (99, 20, -0.95), (100, 20, -1.0), (101, 20, -1.0), (100, 0, 0.0), (101, 0, -1.0)],
)
def test_dapo_penalty_grows_over_the_buffer(length, buffer, penalty):
    assert dapo.overlong_punishment(length, max_response_length=100, overlong_buffer_length=buffer) == penalty


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


@pytest.mark.parametrize("name", ["math", "r1v", "dapo", "counting", "geoqa", "vqa", "android_gui"])
def test_the_example_files_equal_the_shipped_verifiers(name):
    shipped, kwargs = import_module(f"trigon.rewards.verifiers.{name}"), {}
    cases = [(response, truth) for response, truth, _, _ in CASES.get(name, MATH)]
    if name == "dapo":
        kwargs = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 0.5}
        cases = [("Answer: 34", "34")]
    elif name == "android_gui":
        cases = [(response, [0.5, 0.5]) for response, _ in cases]
        cases.append(('<think>a</think><answer>{"action": "click", "point": [560, 580]}</answer>', [0.5, 0.5]))
    inputs = [reward_input(*case, response_length=length) for case in cases for length in (10, 90, 200)]
    example_scores = (
        example(name).compute_score(inputs, **kwargs)
        if name in ("math", "dapo")
        else [example(name).compute_score(single, **kwargs) for single in inputs]
    )
    assert example_scores == [pytest.approx(shipped.compute_score(single, **kwargs)) for single in inputs]


@pytest.mark.parametrize("text", [" \n" * 100_000, "</think>\\boxed{" * 20_000, "<think>" * 40_000, "<" * 200_000])
def test_adversarial_text_is_searched_in_linear_time(text):
    """A search in quadratic time would exceed the time limit of the test."""
    assert math.format_reward(math.tidy("<think>" + text)) == 0.0
    assert r1v.format_reward("<think>" + text + "</answer>") == 0.0
