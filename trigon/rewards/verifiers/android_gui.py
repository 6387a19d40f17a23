"""The next action on a screen: `<think> ... </think> <answer> {"action": "click", "point": [x, y]} </answer>`.

Knows actions, places and what is typed. A place is right if it lies in the ground truth's box, or near its point. They
are compared as shares of the screen, so that neither side depends on the size an image was brought to. Keeps the
sequential contract.

    ground truth                                                   from
    [x1, y1, x2, y2], or [x, y]                                    a box or a point alone: to be clicked
    the same, with gt_action and gt_input_text in the row          GUI-R1 (arXiv:2504.10458)
    {"action": "type", "text": "hello", "box": ..., "point": ...}  one column with all of it; also as JSON in a text
    any other text, such as "1"                                    a word that the answer must be
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.rewards.verifiers.r1v import format_reward, given_answer

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is no action; it is not read."""

_KINDS = {
    "tap": "click",
    "left_click": "click",
    "leftclick": "click",
    "doubleclick": "double_click",
    "rightclick": "right_click",
    "longpress": "long_press",
    "input": "type",
    "input_text": "type",
}
"""Other names of an action: the one it is compared by."""

_PLACE_KEYS = ("bbox", "box", "gt_bbox", "point", "coordinate", "coordinates", "position")
_TEXT_KEYS = ("text", "input_text", "gt_input_text", "value", "direction")
_NO_TEXT = ("", "no input text", "none", "null")  # how datasets say that nothing is typed


@dataclass(frozen=True, slots=True)
class Action:
    """What is done. kind: "click", "type", ... place: (x1, y1, x2, y2), a point twice the same, None for nowhere.

    text: what is typed or chosen; "" for nothing.
    """

    kind: str
    place: tuple[float, float, float, float] | None
    text: str


# Parentheses belong to the call, but for those in quotation marks. Possessive, so that no answer can be slow.
_CALL = re.compile(r"""(\w+)\s*\(((?:"[^"]*+"|'[^']*+'|[^()])*+)\)""")


def compute_score(
    reward_input: dict[str, Any],
    format_weight: float = 0.1,
    response_scale: float = 1000.0,
    truth_scale: float = 1.0,
    radius: float = 0.14,
) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, both parts, and action.

    action: 1.0 for the right kind of action. accuracy: 1.0 if its place and its text are right as well.

    Args: response_scale, truth_scale: what the screen's whole width, and its whole height, is in the coordinates of the
    response, and of the ground truth. radius: how far a place may lie from a ground truth that is a point, as a share
    of the screen; 0.14 as in Android in the Wild (arXiv:2307.10088).
    Raises: ValueError if the ground truth is a list, but no box and no point.
    """
    response = reward_input["response"]
    given = given_answer(response)
    action = read_action(given)
    truth = true_action(reward_input["ground_truth"], reward_input.get("row") or {})
    if isinstance(truth, str):
        is_kind = is_right = _plain(given) == _plain(truth) and bool(_plain(given))
    else:
        is_kind = action is not None and action.kind == truth.kind
        is_right = (
            action is not None
            and is_kind
            and is_at(action, truth, response_scale=response_scale, truth_scale=truth_scale, radius=radius)
            and (not truth.text or _plain(action.text) == _plain(truth.text))
        )
    readable = isinstance(truth, str) or action is not None
    form = format_reward(response) if readable else 0.0
    accuracy = float(is_right)
    return {
        "overall": (1 - format_weight) * accuracy + format_weight * form,
        "format": form,
        "accuracy": accuracy,
        "action": float(is_kind),
    }


def read_action(answer: str) -> Action | None:
    """Return the action that an answer writes, None if it writes none.

    Read are JSON, `click(12, 34)`, `type("hello")`, and a bare point, which is a click.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    value = _json_in(answer)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        kind = value.get("action", value.get("type"))
        return _action_of(kind, value) if isinstance(kind, str) else None
    if isinstance(value, list):
        place = _place(value)
        return None if place is None else Action("click", place, "")
    called = _CALL.fullmatch(answer.strip())
    if called is None:
        point = re.fullmatch(r"\(([^()]*)\)", answer.strip())
        place = None if point is None else _place(_numbers(point[1]))
        return None if place is None else Action("click", place, "")
    quoted = re.search(r"""(["'])(.*)\1""", called[2])
    return Action(
        _kind(called[1]), _place(_numbers(called[2])) if quoted is None else None, quoted[2] if quoted else ""
    )


def true_action(ground_truth: object, row: Mapping[str, Any]) -> Action | str:
    """Return the action that a ground truth, with its row, stands for; text if it is but a word."""
    value = _json_in(ground_truth) if isinstance(ground_truth, str) else ground_truth
    kind = row.get("gt_action", "click")
    if isinstance(value, Mapping):
        return _action_of(str(value.get("action", value.get("gt_action", kind))), value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        place = _place(value)
        if place is None:
            raise ValueError(f"the ground truth {ground_truth!r} is neither [x, y] nor [x1, y1, x2, y2]")
        nowhere = place[0] < 0  # GUI-R1 writes [-100, -100] where an action has no place
        return Action(_kind(str(kind)), None if nowhere else place, _text(row.get("gt_input_text")))
    return str(ground_truth)


def is_at(given: Action, truth: Action, *, response_scale: float, truth_scale: float, radius: float) -> bool:
    """Say whether an action is where it should be: its middle in the box, or within the radius of the point."""
    if truth.place is None:
        return True
    if given.place is None:
        return False
    left, top, right, bottom = (part / truth_scale for part in truth.place)
    x, y = _middle(given.place, response_scale)
    if (left, top) == (right, bottom):
        return math.hypot(x - left, y - top) <= radius
    return left <= x <= right and top <= y <= bottom


def _action_of(kind: str, value: Mapping[str, Any]) -> Action:
    place = next((found for key in _PLACE_KEYS if (found := _place(value.get(key))) is not None), None)
    text = next((text for key in _TEXT_KEYS if (text := _text(value.get(key)))), "")
    return Action(_kind(kind), None if place is not None and place[0] < 0 else place, text)


def _kind(name: str) -> str:
    name = "_".join(re.findall(r"[^\W_]+", name.lower()))
    return _KINDS.get(name, name)


def _place(value: object) -> tuple[float, float, float, float] | None:
    """Return [x, y] or [x1, y1, x2, y2], whichever corners, as (left, top, right, bottom); None for all else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) not in (2, 4):
        return None
    numbers = [float(part) for part in value if isinstance(part, int | float) and abs(part) < 1e9]  # not nan, not huge
    if len(numbers) != len(value):
        return None
    x1, y1, x2, y2 = numbers if len(numbers) == 4 else numbers * 2
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _middle(place: tuple[float, float, float, float], scale: float) -> tuple[float, float]:
    return (place[0] + place[2]) / 2 / scale, (place[1] + place[3]) / 2 / scale


def _numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d{1,9}(?:\.\d{1,9})?", text)]


def _text(value: object) -> str:
    return value if isinstance(value, str) and _plain(value) not in _NO_TEXT else ""


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _json_in(text: str) -> Any:
    """Return the JSON that a text is, or that stands in it from its first brace to its last; None if there is none."""
    start, end = text.find("{"), text.rfind("}")
    for candidate in (text, text[start : end + 1] if 0 <= start < end else ""):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):  # not JSON, or brackets without end
            continue
    return None
