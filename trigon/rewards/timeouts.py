"""Counts timeouts in a row, by which a reward function that hangs for everything is noticed."""

from __future__ import annotations

MIN_TO_STOP = 5
"""The run stops after this many timeouts in a row, unless all are of one group. With more than two
calls at a time it is twice their number, because a short outage can make all of them time out.
"""


class Timeouts:
    """The timeouts since the last other result."""

    def __init__(self) -> None:
        self._groups: list[object] = []

    def add(self, group: object, *, num_calls: int) -> int | None:
        """Count a timeout, and return how many there are if they are too many, else None.

        The completions of a group are alike: a function may hang for all of them and for no others.
        num_calls: calls of the function at a time. The count starts again after too many.
        """
        self._groups.append(group)
        number = len(self._groups)
        if number < max(MIN_TO_STOP, 2 * num_calls) or len(set(self._groups)) == 1:
            return None
        self.clear()
        return number

    def clear(self) -> None:
        """Start to count again."""
        self._groups.clear()
