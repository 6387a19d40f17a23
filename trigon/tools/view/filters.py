"""What to show of the rollouts of a run: filters and orders, as parsed from the page's address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from trigon.errors import DataError
from trigon.system.suggestions import did_you_mean

CHOICES: Mapping[str, tuple[str, ...]] = {
    "split": ("", "train", "filtered", "validation"),
    "solved": ("", "none", "some", "all"),
    "filtered": ("", "no", "low", "high", "unscored", "surplus"),
    "outcome": ("", "ok", "not_ok", "failed", "timeout"),
    "finish_reason": ("", "stop", "length"),
    "tokens": ("", "recorded"),
    "sort": ("newest", "oldest", "worst", "best", "spread", "longest", "mismatch"),
}
"""The values of each field of RolloutFilter that has a fixed set. Empty: all."""

_MAX_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions on rollouts, all of which must hold, and the order of the groups found.

    A group is found if one of its completions is. solved is of the whole group: how many of its
    completions are solved. Bounds are inclusive; None is no bound. min_tokens, max_tokens: of the
    completion. filtered: why no step learns from the group; no: one does, or it is a validation.
    outcome: of the reward function; not_ok: failed or timeout.
    tokens: recorded, groups with per-token values.
    prompt_id: without the number of an occurrence, train:17 for train:17#2 too.
    text: part of the prompt, its id, the ground truth or the completion, in any case.
    sort: by step (newest, oldest), by mean reward of the group (worst, best), by the difference
    between its rewards (spread), by its longest completion, or by its largest train-inference
    mismatch.
    """

    split: str = ""
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    solved: str = ""
    filtered: str = ""
    outcome: str = ""
    finish_reason: str = ""
    tokens: str = ""
    prompt_id: str = ""
    text: str = ""
    sort: str = "newest"


def parse_filter(values: Mapping[str, str]) -> RolloutFilter:
    """Return the filter in the parameters of an address. Empty values are no condition.

    Raises: DataError for an unknown name or a value that the name cannot have.
    """
    known = {field.name: field for field in fields(RolloutFilter)}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise DataError(f"there is no filter {name!r}{did_you_mean(name, known)}")
        if value == "":
            continue
        if name in CHOICES and value not in CHOICES[name]:
            choices = ", ".join(filter(None, CHOICES[name]))
            raise DataError(f"the filter {name} cannot be {value!r}; it is one of {choices}")
        if len(value) > _MAX_CHARACTERS:
            raise DataError(f"the filter {name} has {len(value):,} characters; it can have {_MAX_CHARACTERS:,}")
        parsed[name] = _number(name, value) if name.startswith(("min_", "max_")) else value
    return RolloutFilter(**parsed)


def _number(name: str, value: str) -> int | float:
    is_float = name.endswith("reward")
    try:
        number = float(value) if is_float else int(value)
    except ValueError as error:
        raise DataError(f"the filter {name} must be a {'' if is_float else 'whole '}number, not {value!r}") from error
    if not isfinite(number) or abs(number) > 2**53:
        raise DataError(f"the filter {name} must be a finite number, not {value!r}")
    return number
