"""Functions of the user that the loop calls in its process, and what they may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from trigon.types import RolloutGroup

Asked = Literal["stop", "save"]
"""What a hook may return. stop: save this step, and end the run. save: save this step."""

OnStep = Callable[[int, Mapping[str, float]], object]
OnRollouts = Callable[[Sequence[RolloutGroup]], object]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the user. An error in one ends the run.

    on_rollouts: called with the groups of a step, scored, before the update.
    on_step: called with a step and its metrics, all numbers of its line in metrics.jsonl, when the
    step's checkpoint, if one is due, is saved; with step 0 after a validation before training.
    """

    on_step: OnStep | None = None
    on_rollouts: OnRollouts | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> Asked | None:
        """Call on_step, if there is one, and return what it asks for.

        Raises: ValueError if it returns another text; what is no text is ignored.
        """
        asked = None if self.on_step is None else self.on_step(step, metrics)
        if isinstance(asked, str) and asked not in ("stop", "save"):
            raise ValueError(f"on_step returned {asked!r}; it may return 'stop', 'save' or None")
        return cast(Asked, asked) if isinstance(asked, str) else None

    def rollouts(self, groups: Sequence[RolloutGroup]) -> None:
        """Call on_rollouts, if there is one."""
        if self.on_rollouts is not None:
            self.on_rollouts(groups)
