"""A shipped reward refuses a ground truth that it cannot compare; it does not score it 0."""

import pytest

from support.rewards import requests, reward_pool
from trigon.errors import RewardError
from trigon.rewards.load import find_reward
from trigon.rewards.verifiers import android_gui, counting, dapo, geoqa, math, r1v, vqa

RESPONSE = r"<think>a</think><answer>7</answer> \boxed{7} Answer: 7"
VERL = {"ground_truth": "7", "style": "rule"}  # the column reward_model of veRL's data sets


def score(verifier, ground_truth):
    arguments = {"response": RESPONSE, "ground_truth": ground_truth, "response_length": 10, "row": {}}
    limits = {"max_response_length": 100, "overlong_buffer_length": 20} if verifier is dapo else {}
    return verifier.compute_score(arguments, **limits)


@pytest.mark.parametrize("ground_truth", [VERL, {}, [], ["7"], [7, 8], [["7"]], None])
@pytest.mark.parametrize("verifier", [math, r1v, geoqa, counting, dapo], ids=lambda module: module.__name__)
def test_a_ground_truth_that_is_not_text_or_a_number_is_refused(verifier, ground_truth):
    with pytest.raises(RewardError, match=r"the ground truth .*expected text or a number; set data\.answer_key"):
        score(verifier, ground_truth)


@pytest.mark.parametrize("ground_truth", [VERL, {}, [], [["7"]], [None], None])
def test_vqa_refuses_what_is_not_text_a_number_or_a_list_of_them(ground_truth):
    with pytest.raises(RewardError, match="expected text or a number"):
        score(vqa, ground_truth)
    assert score(vqa, ["7", 8])["accuracy"] == 1.0


@pytest.mark.parametrize(("ground_truth", "message"), [(VERL, "none of the keys"), ({}, "none of"), (None, "empty")])
def test_android_gui_refuses_what_is_not_an_action(ground_truth, message):
    with pytest.raises(RewardError, match=message):
        score(android_gui, ground_truth)


def test_the_run_stops_with_the_message(tmp_path):
    with (
        reward_pool(tmp_path, reward=find_reward("math", {}), max_failed_fraction=0.1) as pool,
        pytest.raises(RewardError, match=r"is a dict, expected text or a number; set data\.answer_key"),
    ):
        pool.score(requests(RESPONSE, ground_truth=VERL))
