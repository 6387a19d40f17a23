"""The VQA verifier, on completions scored by hand."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import vqa

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "vqa.py"


def reward_input(response, ground_truth):
    return {"response": response, "ground_truth": ground_truth, "response_length": 10}


COMPARISONS = [
    # answer, ground truth, equal
    ("A red car.", "a red car", True),
    ("The Two red cars", "2 red cars", True),
    ("red car", "blue car", False),
    ("red", "red car", False),
    ("1,000.50", "1000.5", True),
    ("007", "7", True),
    ("-3", "3", False),
    ("−3", "-3", True),
    ("-0", "0", True),
    ("50%", "50", True),
    ("well-lit", "well lit", True),
    ("Ｙｅｓ", "yes", True),
    ("STRASSE", "straße", True),
    ("答案", "答案", True),
    ("+", "+", True),
    ("+", "-", False),
    ("the", "the", True),
    ("the", "an", False),
    ("9" * 500, "9" * 500, True),
    ("9" * 1001, "9" * 1001, False),
    ("", "x", False),
    ("nan", "7", False),
    # multiple choice
    ("B", "B", True),
    ("b", "B", True),
    ("(B)", "B", True),
    ("B.", "(b)", True),
    ("B. a dog", "B", True),
    ("(B) a dog", "B", True),
    ("B: a dog", "B.", True),
    ("The answer is (C).", "C", True),
    ("option d", "D", True),
    ("C", "B", False),
    ("A dog", "A", False),  # an article rather than a letter
    ("A or B", "A", False),
    ("A. or B.", "A", False),
    ("(A) and (B)", "A", False),
    ("It is definitely not option B", "B", False),
    ("The answer isn't B", "B", False),
    ("B. a dog and a cat", "B", True),
    ("(B) not a dog", "B", True),
    ("AB", "A", False),
    ("", "A", False),
    # several right answers
    (".5", "0.5", True),
    ("0.50", ".5", True),
    ("sofa", ["couch", "sofa"], True),
    ("chair", ["couch", "sofa"], False),
    ("2", 2, True),
    ("2", 2.0, True),
    ("yes", True, False),  # the text of True is "True"
]


@pytest.mark.parametrize(("answer", "ground_truth", "equal"), COMPARISONS)
def test_answers_by_hand(answer, ground_truth, equal):
    assert vqa.accuracy_reward(f"<think>a</think><answer>{answer}</answer>", ground_truth) == float(equal)


CASES = [
    # response, ground truth, accuracy, format
    ("<think>a</think><answer>B</answer>", "B", 1, 1),
    ("<think>a</think><answer>C</answer>", "B", 0, 1),
    ("<think>a</think><answer>C</answer><answer>B</answer>", "B", 0, 1),  # the first answer counts
    ("B", "<answer>B</answer>", 1, 0),
    ("", "B", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "format_score"), CASES)
def test_scores_by_hand(response, ground_truth, accuracy, format_score):
    assert vqa.compute_score(reward_input(response, ground_truth)) == {
        "overall": pytest.approx(0.9 * accuracy + 0.1 * format_score),
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


def test_the_example_file_equals_the_shipped_verifier():
    spec = importlib.util.spec_from_file_location("example_vqa", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    reward_inputs = [reward_input(response, truth) for response, truth, _, _ in CASES]
    assert [example.compute_score(single, 0.3) for single in reward_inputs] == [
        vqa.compute_score(single, 0.3) for single in reward_inputs
    ]
