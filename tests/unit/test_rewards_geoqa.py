"""The geometry verifier, on completions scored by hand."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import geoqa

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "geoqa.py"


def reward_input(response, ground_truth):
    return {"response": response, "ground_truth": ground_truth, "response_length": 10}


VALUES = [
    # answer, ground truth, equal
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
    ("°", "°", False),  # empty without the unit
    ("1" * 600, "1" * 600, False),
]


@pytest.mark.parametrize(("answer", "ground_truth", "equal"), VALUES)
def test_values_by_hand(answer, ground_truth, equal):
    assert geoqa.accuracy_reward(f"<think>a</think><answer>{answer}</answer>", ground_truth) == float(equal)


CASES = [
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


@pytest.mark.parametrize(("response", "ground_truth", "accuracy", "format_score"), CASES)
def test_scores_by_hand(response, ground_truth, accuracy, format_score):
    assert geoqa.compute_score(reward_input(response, ground_truth)) == {
        "overall": 0.5 * accuracy + 0.5 * format_score,
        "accuracy": float(accuracy),
        "format": float(format_score),
    }


def test_the_example_file_equals_the_shipped_verifier():
    spec = importlib.util.spec_from_file_location("example_geoqa", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    reward_inputs = [reward_input(response, truth) for response, truth, _, _ in CASES]
    assert [example.compute_score(single, 0.3) for single in reward_inputs] == [
        geoqa.compute_score(single, 0.3) for single in reward_inputs
    ]
