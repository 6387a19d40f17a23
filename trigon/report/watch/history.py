"""What the watchers remember of a run: the first and the latest values of each number.

It is part of a checkpoint, so that a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

FIRST_STEPS = 3
"""How many values the level at the start is the median of: so few that a fast collapse is not yet
among them.
"""

LATEST_STEPS = 20
"""How many values at most the level until now is the median of."""

LEAST_LATEST_STEPS = 10
"""The same at least."""


@dataclass(slots=True)
class History:
    """The finite values of some metrics, oldest first.

    keys: the metrics that are remembered.
    """

    keys: Sequence[str]
    first: dict[str, list[float]] = field(default_factory=dict)
    latest: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Remember the values of a step; a metric that it does not have, or not finite, is left."""
        for key in self.keys:
            value = metrics.get(key)
            if value is None or not isfinite(value):
                continue
            first, latest = self.first.setdefault(key, []), self.latest.setdefault(key, [])
            if len(first) < FIRST_STEPS:
                first.append(value)
            latest.append(value)
            del latest[:-LATEST_STEPS]

    def level_at_start(self, key: str) -> float | None:
        """Return the median of the first values; None until there are FIRST_STEPS of them."""
        values = self.first.get(key, [])
        return median(values) if len(values) == FIRST_STEPS else None

    def level_until_now(self, key: str) -> float | None:
        """Return the median of the latest absolute values; None at the start."""
        values = self.latest.get(key, [])
        return median(map(abs, values)) if len(values) >= LEAST_LATEST_STEPS else None

    def state(self) -> dict[str, Any]:
        """Return what load_state takes, as JSON."""
        return {"first": self.first, "latest": self.latest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Remember what another history did."""
        self.first = {key: list(values) for key, values in state["first"].items()}
        self.latest = {key: list(values) for key, values in state["latest"].items()}
