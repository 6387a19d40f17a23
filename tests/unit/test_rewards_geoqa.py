"""Geometry with units and typography, on answers graded by hand."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import geoqa

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "geoqa.py"


def answer(response, ground_truth):
    return {"response": response, "ground_truth": ground_truth, "response_length": 10}


VALUES = [
    # given, ground truth, the same
    ("145°", "145°", True),
    ("145", "145°", True),
    ("145°", "145", True),
    (r"145^\circ", "145°", True),
    (r"$145^{\circ}$", "145°", True),
    ("145 degrees", "145°", True),
    ("∠A = 145°", "145°", True),
    ("35°", "145°", False),
    ("6cm", "6", True),
    ("6 cm.", "6cm", True),
    ("60 m", "6 m", False),
    ("√3", r"\sqrt{3}", True),
    ("2√3 cm", r"2\sqrt{3}", True),
    ("√(2)/2", r"\frac{\sqrt{2}}{2}", True),
    (r"$6\sqrt{2}$", "6√2", True),
    ("6√3", "6√2", False),
    (r"25\pi\text{ cm}^2", "25π cm²", True),
    ("20 m^2", "20 m²", True),
    ("10²", "10^2", True),
    ("102", "10²", False),
    ("５", "5", True),
    ("0.5", r"\frac{1}{2}", True),
    ("nan", "7", False),
    ("cm", "7", False),
    ("°", "°", False),  # nothing is left to compare
    ("1" * 600, "1" * 600, False),
]


@pytest.mark.parametrize(("given", "ground_truth", "same"), VALUES)
def test_values_by_hand(given, ground_truth, same):
    assert geoqa.accuracy_reward(f"<think>a</think><answer>{given}</answer>", ground_truth) == float(same)


ANSWERS = [
    # response, ground truth, accuracy, format
    ("<think>a</think><answer>145°</answer>", "145", 1, 1),
    ("<think>a</think><answer>145°</answer>", "<answer> 145° </answer>", 1, 1),
    ("<think>a</think><answer>35°</answer>", 145, 0, 1),
    ("<think>a</think><answer>145°</answer><answer>35°</answer>", "35", 0, 1),  # the first answer counts
    ("145°", "145", 1, 0),
    ("<think>a</think><answer></answer>", "145", 0, 1),
    ("<think>a</think><answer></answer>", "", 0, 1),  # an empty answer is never right
    ("", "145", 0, 0),
]


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "form"), ANSWERS)
def test_geoqa_by_hand(response, ground_truth, accuracy, form):
    assert geoqa.compute_score(answer(response, ground_truth)) == {
        "overall": 0.5 * accuracy + 0.5 * form,
        "accuracy": float(accuracy),
        "format": float(form),
    }


def test_the_example_file_scores_as_the_shipped_verifier_does():
    spec = importlib.util.spec_from_file_location("example_geoqa", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    answers = [answer(response, truth) for response, truth, _, _ in ANSWERS]
    assert [example.compute_score(one, 0.3) for one in answers] == [geoqa.compute_score(one, 0.3) for one in answers]
