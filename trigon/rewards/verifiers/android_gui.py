"""Actions on a screen: `<think> ... </think> <answer> {"action": "click", ...} </answer>`.

An action has a kind, an optional position, and an optional text. A position is right inside the
ground truth's box, or near its point. Positions are compared as fractions of the screen,
independent of the resolution of the image. Follows the sequential contract.

    ground truth                                             meaning
    [x1, y1, x2, y2], or [x, y]                              a click in this box or near this point
    the same, with gt_action and gt_input_text in the row    an action of GUI-R1 (arXiv:2504.10458)
    {"action": "type", "text": "hello", "box": [...], ...}   an action, as a mapping or as JSON text
    any other text, such as "1"                              a word that the answer must equal
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.verifiers.equivalence import ground_truth_text
from trigon.rewards.verifiers.r1v import extract_answer, format_reward

REWARD_TYPE = "sequential"

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is not an action; it is not parsed."""

_SYNONYMS = {
    "tap": "click",
    "left_click": "click",
    "leftclick": "click",
    "doubleclick": "double_click",
    "rightclick": "right_click",
    "longpress": "long_press",
    "input": "type",
    "input_text": "type",
}
"""Synonyms of action kinds -> the kind used in comparisons."""

_KIND_KEYS = ("action", "gt_action")
_POSITION_KEYS = ("bbox", "box", "gt_bbox", "point", "coordinate", "coordinates", "position")
_TEXT_KEYS = ("text", "input_text", "gt_input_text", "value", "direction")
_NO_TEXT = ("", "no input text", "none", "null")  # values of datasets for actions without text


@dataclass(frozen=True, slots=True)
class Action:
    """An action. kind: "click", "type", ... text: what is typed or chosen; "" for none.

    position: (x1, y1, x2, y2), with both corners equal for a point; None for an action without a
    position.
    """

    kind: str
    position: tuple[float, float, float, float] | None
    text: str


# Parentheses delimit the call, except in quotation marks. Possessive: matches in linear time.
_CALL = re.compile(r"""(\w+)\s*\(((?:"[^"]*+"|'[^']*+'|[^()])*+)\)""")


def compute_score(
    reward_input: dict[str, Any],
    format_weight: float = 0.1,
    response_scale: float = 1000.0,
    truth_scale: float = 1.0,
    radius: float = 0.14,
) -> dict[str, float]:
    """Return overall = (1 - format_weight) * accuracy + format_weight * format, with its parts.

    action: 1.0 if the kind of action is right. accuracy: 1.0 if its position and its text are right
    as well.

    Args: response_scale, truth_scale: the width and height of the screen in the coordinates of the
    response and of the ground truth. radius: maximum distance from a ground truth that is a point,
    as a fraction of the screen; 0.14 as in Android in the Wild (arXiv:2307.10088).
    Raises: ValueError if the ground truth is a list, but neither a box nor a point.
    """
    response = reward_input["response"]
    answer = extract_answer(response)
    action = read_action(answer)
    truth = true_action(reward_input["ground_truth"], reward_input.get("row") or {})
    if isinstance(truth, str):
        is_kind = is_right = _normalize(answer) == _normalize(truth) and bool(_normalize(answer))
    else:
        is_kind = action is not None and action.kind == truth.kind
        is_right = (
            action is not None
            and is_kind
            and is_at_position(action, truth, response_scale=response_scale, truth_scale=truth_scale, radius=radius)
            and (not truth.text or _normalize(action.text) == _normalize(truth.text))
        )
    readable = isinstance(truth, str) or action is not None
    format_score = format_reward(response) if readable else 0.0
    accuracy = float(is_right)
    return {
        "overall": (1 - format_weight) * accuracy + format_weight * format_score,
        "format": format_score,
        "accuracy": accuracy,
        "action": float(is_kind),
    }


def read_action(answer: str) -> Action | None:
    """Return the action in an answer, or None.

    Accepts JSON, `click(12, 34)`, `type("hello")`, and a point alone, which is a click.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    value = _parse_json(answer)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        kind = value.get("action", value.get("type"))
        return _parse_mapping(kind, value) if isinstance(kind, str) else None
    if isinstance(value, list):
        position = _parse_position(value)
        return None if position is None else Action("click", position, "")
    call = _CALL.fullmatch(answer.strip())
    if call is None:
        point = re.fullmatch(r"\(([^()]*)\)", answer.strip())
        position = None if point is None else _parse_position(_numbers(point[1]))
        return None if position is None else Action("click", position, "")
    quoted = re.search(r"""(["'])(.*)\1""", call[2])
    position = _parse_position(_numbers(call[2])) if quoted is None else None
    return Action(_normalize_kind(call[1]), position, quoted[2] if quoted else "")


def true_action(ground_truth: object, row: Mapping[str, Any]) -> Action | str:
    """Return the action that a ground truth and its row describe, or the text of a word.

    Raises: RewardError if a mapping has none of the keys of an action, or the ground truth is
    empty.
    """
    value = _parse_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    kind = row.get("gt_action", "click")
    if isinstance(value, Mapping):
        if not value.keys() & {*_KIND_KEYS, *_POSITION_KEYS, *_TEXT_KEYS}:
            raise RewardError(
                f"the ground truth {str(value)[:80]} has none of the keys of an action (action, bbox, point, text); "
                "docs/rewards.md describes the ground truths of android_gui"
            )
        return _parse_mapping(str(value.get("action", value.get("gt_action", kind))), value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        position = _parse_position(value)
        if position is None:
            raise ValueError(f"the ground truth {ground_truth!r} is neither [x, y] nor [x1, y1, x2, y2]")
        has_position = position[0] >= 0  # GUI-R1 uses [-100, -100] for actions without a position
        return Action(_normalize_kind(str(kind)), position if has_position else None, _text(row.get("gt_input_text")))
    return ground_truth_text(ground_truth)


def is_at_position(action: Action, truth: Action, *, response_scale: float, truth_scale: float, radius: float) -> bool:
    """Return whether the action's center is in the true box, or near the true point."""
    if truth.position is None:
        return True
    if action.position is None:
        return False
    left, top, right, bottom = (coordinate / truth_scale for coordinate in truth.position)
    x, y = _center(action.position, response_scale)
    if (left, top) == (right, bottom):
        return math.hypot(x - left, y - top) <= radius
    return left <= x <= right and top <= y <= bottom


def _parse_mapping(kind: str, value: Mapping[str, Any]) -> Action:
    positions = (_parse_position(value.get(key)) for key in _POSITION_KEYS)
    position = next((position for position in positions if position is not None), None)
    text = next((text for key in _TEXT_KEYS if (text := _text(value.get(key)))), "")
    return Action(_normalize_kind(kind), None if position is not None and position[0] < 0 else position, text)


def _normalize_kind(name: str) -> str:
    name = "_".join(re.findall(r"[^\W_]+", name.lower()))
    return _SYNONYMS.get(name, name)


def _parse_position(value: object) -> tuple[float, float, float, float] | None:
    """Return [x, y] or [x1, y1, x2, y2] as (left, top, right, bottom), or None for other values."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) not in (2, 4):
        return None
    # Neither NaN nor very large.
    numbers = [float(number) for number in value if isinstance(number, int | float) and abs(number) < 1e9]
    if len(numbers) != len(value):
        return None
    x1, y1, x2, y2 = numbers if len(numbers) == 4 else numbers * 2
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _center(position: tuple[float, float, float, float], scale: float) -> tuple[float, float]:
    return (position[0] + position[2]) / 2 / scale, (position[1] + position[3]) / 2 / scale


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d{1,9}(?:\.\d{1,9})?", text)]


def _text(value: object) -> str:
    return value if isinstance(value, str) and _normalize(value) not in _NO_TEXT else ""


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split())


def _parse_json(text: str) -> Any:
    """Return the JSON value of a text, or of its part from the first to the last brace, or None."""
    start, end = text.find("{"), text.rfind("}")
    for candidate in (text, text[start : end + 1] if 0 <= start < end else ""):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            continue
    return None
