"""The android_gui verifier, on completions scored by hand."""

import pytest

from trigon.rewards.verifiers import android_gui
from trigon.rewards.verifiers.android_gui import Action, read_action, true_action

BOX = [0.1, 0.2, 0.3, 0.4]


def reward_input(answer, ground_truth, row=None):
    response = f"<think>a</think><answer>{answer}</answer>"
    return {"response": response, "ground_truth": ground_truth, "response_length": 10, "row": row or {}}


TYPED = {"gt_action": "type", "gt_input_text": "Hello there"}
PRESSED = {"gt_action": "press_back", "gt_input_text": "no input text"}
CASES = [
    # answer, ground truth, its row, accuracy, format, action
    ('{"action": "click", "point": [200, 300]}', BOX, {}, 1, 1, 1),
    ('{"action": "click", "point": [100, 400]}', BOX, {}, 1, 1, 1),  # the border is part of the box
    ('{"action": "click", "point": [99, 300]}', BOX, {}, 0, 1, 1),
    ('{"action": "click", "point": [300, 200]}', [0.3, 0.4, 0.1, 0.2], {}, 1, 1, 1),  # corners in the other order
    ('{"action": "click", "point": [0.2, 0.3]}', BOX, {}, 0, 1, 1),  # coordinates of the response are in thousandths
    ('{"action": "click", "bbox": [100, 200, 300, 400]}', BOX, {}, 1, 1, 1),  # the center of a box
    ('{"action": "type", "text": "a"}', BOX, {}, 0, 1, 0),
    ('{"action": "click"}', BOX, {}, 0, 1, 1),  # no position
    ('{"action": "tap", "coordinate": [200, 300]}', BOX, {"gt_action": "click"}, 1, 1, 1),
    ('{"action": "click", "point": [640, 500]}', [0.5, 0.5], {}, 1, 1, 1),  # within 0.14 of a point
    ('{"action": "click", "point": [641, 500]}', [0.5, 0.5], {}, 0, 1, 1),
    ('{"action": "type", "text": "hello  THERE"}', [-100, -100], TYPED, 1, 1, 1),
    ('{"action": "type", "text": "hello"}', [-100, -100], TYPED, 0, 1, 1),
    ('{"action": "press_back"}', [-100, -100], PRESSED, 1, 1, 1),
    ("press_back()", [-100, -100], PRESSED, 1, 1, 1),
    ('{"action": "click", "point": [200, 300]}', {"action": "click", "bbox": BOX}, {}, 1, 1, 1),
    ('{"action": "click", "point": [200, 300]}', '{"action": "click", "gt_bbox": [0.1, 0.2, 0.3, 0.4]}', {}, 1, 1, 1),
    ('{"action": "click", "point": [200, 300]}', "[0.1, 0.2, 0.3, 0.4]", {}, 1, 1, 1),
    ('{"action": "scroll", "direction": "up"}', {"action": "scroll", "direction": "down"}, {}, 0, 1, 1),
    ("1", "1", {}, 1, 1, 1),  # a ground truth of text
    ("2", "1", {}, 0, 1, 0),
    ("the left one", BOX, {}, 0, 0, 0),  # not an action, so the format is wrong
    ("", BOX, {}, 0, 0, 0),
    ("", "", {}, 0, 1, 0),  # an empty answer is never right
    ('{"action": "click", "point": [NaN, 300]}', BOX, {}, 0, 1, 1),
    ('{"action": "click", "point": [1e400, 300]}', BOX, {}, 0, 1, 1),
]


@pytest.mark.parametrize(("answer", "ground_truth", "row", "accuracy", "format_score", "action"), CASES)
def test_scores_by_hand(answer, ground_truth, row, accuracy, format_score, action):
    assert android_gui.compute_score(reward_input(answer, ground_truth, row)) == {
        "overall": pytest.approx(0.9 * accuracy + 0.1 * format_score),
        "accuracy": float(accuracy),
        "format": float(format_score),
        "action": float(action),
    }


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Click(x=12.5, y=34)", Action("click", (12.5, 34, 12.5, 34), "")),
        ('type("call 12, 34")', Action("type", None, "call 12, 34")),
        ("(12, 34)", Action("click", (12, 34, 12, 34), "")),
        ('[{"action": "Long-Press", "position": [1, 2]}]', Action("long_press", (1, 2, 1, 2), "")),
        ('I would {"action": "click", "point": [1, 2]}', Action("click", (1, 2, 1, 2), "")),
        ('{"action": "drücken"}', Action("drücken", None, "")),
        ('{"point": [1, 2]}', None),
        ('type("a(b)")', Action("type", None, "a(b)")),
        ("click(1, 2)(3, 4)", None),
        ("type(" + "'" * 150, None),
        ("[" * 1999, None),
        ("{" * 1999 + "}", None),
        ("9" * 2001, None),
    ],
)
def test_read_action_by_hand(text, action):
    assert read_action(text) == action


@pytest.mark.parametrize("ground_truth", [[], [1, 2, 3], "[1, 2, 3]", [None, 2], [float("nan"), 0.5]])
def test_a_list_that_is_not_a_position_is_an_error(ground_truth):
    with pytest.raises(ValueError, match="is neither"):
        true_action(ground_truth, {})


def test_the_radius_around_a_point_and_the_scales_are_arguments():
    def accuracy(answer, truth, **kwargs):
        return android_gui.compute_score(reward_input(answer, truth), **kwargs)["accuracy"]

    near = '{"action": "click", "point": [560, 580]}', [0.5, 0.5]  # 0.1 away
    assert (accuracy(*near, radius=0.11), accuracy(*near, radius=0.09)) == (1.0, 0.0)
    pixels = '{"action": "click", "point": [640, 360]}', [600, 300, 700, 400]
    assert (accuracy(*pixels, response_scale=1.0, truth_scale=1.0), accuracy(*pixels)) == (1.0, 0.0)
