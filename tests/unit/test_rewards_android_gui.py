"""The android_gui verifier, on completions scored by hand."""

import importlib.util
from pathlib import Path

import pytest

from trigon.rewards.verifiers import android_gui
from trigon.rewards.verifiers.android_gui import Action, read_action, true_action

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function" / "android_gui.py"
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


def test_coordinates_of_both_sides_may_be_pixels():
    pixels = {"response_scale": 1.0, "truth_scale": 1.0}
    click = reward_input('{"action": "click", "point": [640, 360]}', [600, 300, 700, 400])
    assert android_gui.compute_score(click, **pixels)["accuracy"] == 1.0
    assert android_gui.compute_score(click)["accuracy"] == 0.0


def test_the_radius_around_a_point_is_an_argument():
    near = reward_input('{"action": "click", "point": [560, 580]}', [0.5, 0.5])  # 0.1 away
    assert android_gui.compute_score(near, radius=0.11)["accuracy"] == 1.0
    assert android_gui.compute_score(near, radius=0.09)["accuracy"] == 0.0


def test_without_tags_only_the_action_is_right():
    without_tags = {"response": '{"action": "click", "point": [200, 300]}', "ground_truth": BOX, "response_length": 9}
    assert android_gui.compute_score(without_tags)["accuracy"] == 1.0
    assert android_gui.compute_score(without_tags)["format"] == 0.0


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click(12, 34)", Action("click", (12, 34, 12, 34), "")),
        ("Click(x=12.5, y=34)", Action("click", (12.5, 34, 12.5, 34), "")),
        ('type("call 12, 34")', Action("type", None, "call 12, 34")),
        ("(12, 34)", Action("click", (12, 34, 12, 34), "")),
        ("[12, 34]", Action("click", (12, 34, 12, 34), "")),
        ('[{"action": "Long-Press", "position": [1, 2]}]', Action("long_press", (1, 2, 1, 2), "")),
        ('I would {"action": "click", "point": [1, 2]}', Action("click", (1, 2, 1, 2), "")),
        ('{"action": "drücken"}', Action("drücken", None, "")),
        ('{"action": 3}', None),
        ('{"point": [1, 2]}', None),
        ("[1, 2, 3]", None),
        ("click(", None),
        ('type("a(b)")', Action("type", None, "a(b)")),
        ("type('f(x) = (')", Action("type", None, "f(x) = (")),
        ("click(1, 2)(3, 4)", None),
        ("type(" + "'" * 150, None),
        ("1", None),
        ("", None),
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


def test_the_example_file_equals_the_shipped_verifier():
    spec = importlib.util.spec_from_file_location("example_android_gui", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    reward_inputs = [reward_input(answer, truth, row) for answer, truth, row, _, _, _ in CASES]
    kwargs = {"format_weight": 0.3, "radius": 0.2}
    shipped = [android_gui.compute_score(single, **kwargs) for single in reward_inputs]
    assert [example.compute_score(single, **kwargs) for single in reward_inputs] == [
        pytest.approx(parts) for parts in shipped
    ]
