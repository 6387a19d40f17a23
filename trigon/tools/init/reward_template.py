r"""The reward function of run.yaml, and its test: `python reward.py`, or `pytest reward.py`.

A completion is what the model wrote for a prompt. The function is called with one at a time.
"""

import re
from typing import Any

REWARD_TYPE = "sequential"  # "batch": called with a list of completions, returns a list


def score(reward_input: dict[str, Any]) -> dict[str, float]:
    r"""Return 1.0 for the right answer in \boxed{}, 0.1 for a wrong one, 0.0 without \boxed{}.

    reward_input has "response" (the completion), "ground_truth" (data.answer_key), "prompt",
    "response_length" (tokens), "finish_reason", and "row" (the other columns). "overall" is what is
    learned; every other name becomes a metric.
    """
    answers = re.findall(r"\\boxed\{([^{}]*)\}", reward_input["response"])
    has_format = float(bool(answers))
    is_right = float(bool(answers) and answers[-1].strip() == str(reward_input["ground_truth"]).strip())
    return {"overall": 0.9 * is_right + 0.1 * has_format, "accuracy": is_right, "format": has_format}


CASES = [
    # (completion, ground truth, overall)
    (r"Three cells are shaded: \boxed{3}", "3", 1.0),
    (r"First \boxed{2}, no: \boxed{3}", "3", 1.0),  # the last one counts
    (r"\boxed{4}", "3", 0.1),
    ("The area is 3.", "3", 0.0),
    ("", "3", 0.0),
]


def test_score() -> None:
    """Compare the scores of CASES with what they should be."""
    for response, ground_truth, expected in CASES:
        overall = score({"response": response, "ground_truth": ground_truth})["overall"]
        assert abs(overall - expected) < 1e-9, f"{response!r} scores {overall}, not {expected}"


if __name__ == "__main__":
    test_score()
    print(f"{len(CASES)} completions are scored as they should be")
