"""Short answers and choices, graded by hand."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import vqa

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "vqa.py"


def answer(response, ground_truth):
    return {"response": response, "ground_truth": ground_truth, "response_length": 10}


GIVEN = [
    # given, ground truth, the same
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
    # choices
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
    ("A dog", "A", False),  # an article, not a choice
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
    ("sofa", [], False),
    ("2", 2, True),
    ("2", 2.0, True),
    ("yes", True, False),  # a dataset of truth values says "True"
]


@pytest.mark.parametrize(("given", "ground_truth", "same"), GIVEN)
def test_answers_by_hand(given, ground_truth, same):
    assert vqa.accuracy_reward(f"<think>a</think><answer>{given}</answer>", ground_truth) == float(same)


ANSWERS = [
    # response, ground truth, accuracy, format
    ("<think>a</think><answer>B</answer>", "B", 1, 1),
    ("<think>a</think><answer>C</answer>", "B", 0, 1),
    ("<think>a</think><answer>C</answer><answer>B</answer>", "B", 0, 1),  # the first answer counts
    ("B", "<answer>B</answer>", 1, 0),
    ("", "B", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "form"), ANSWERS)
def test_vqa_by_hand(response, ground_truth, accuracy, form):
    assert vqa.compute_score(answer(response, ground_truth)) == {
        "overall": pytest.approx(0.9 * accuracy + 0.1 * form),
        "accuracy": float(accuracy),
        "format": float(form),
    }


def test_the_example_file_scores_as_the_shipped_verifier_does():
    spec = importlib.util.spec_from_file_location("example_vqa", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    answers = [answer(response, truth) for response, truth, _, _ in ANSWERS]
    assert [example.compute_score(one, 0.3) for one in answers] == [vqa.compute_score(one, 0.3) for one in answers]
