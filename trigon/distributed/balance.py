"""Balanced partitioning of groups and prompts over ranks, by cost. Depends on numbers only."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Collection, Sequence
from typing import NamedTuple

TOLERANCE = 0.02
"""By how much partition_near may exceed the largest sum of partition_balanced."""


def partition_balanced(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition the indices of costs into num_parts lists with nearly equal sums.

    The largest differencing method of Karmarkar and Karp ("The Differencing Method of Set
    Partitioning", 1982), generalized to any number of parts: repeatedly take the two partial
    solutions with the largest difference between their heaviest and lightest part, and merge the
    heaviest part of one with the lightest of the other.

    Returns: one ascending list of indices for each part, the part with the largest sum first;
    deterministic.
    Example: costs (8, 7, 6, 5, 4) in 2 parts give [[1, 3, 4], [0, 2]], with sums 16 and 14.
    """
    # A partial solution: (minus its difference, because heapq is a min-heap; a serial number that
    # breaks ties; its parts as (sum, indices), heaviest first).
    solutions: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-cost, index, [(cost, [index]), *((0, []) for _ in range(num_parts - 1))]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(solutions)
    serial_number = len(solutions)
    while len(solutions) > 1:
        _, _, first = heapq.heappop(solutions)
        _, _, second = heapq.heappop(solutions)
        parts = sorted(
            (
                (heavy + light, heavy_indices + light_indices)
                for (heavy, heavy_indices), (light, light_indices) in zip(first, reversed(second), strict=True)
            ),
            key=lambda part: (-part[0], part[1]),
        )
        heapq.heappush(solutions, (parts[-1][0] - parts[0][0], serial_number, parts))
        serial_number += 1
    if not solutions:
        return [[] for _ in range(num_parts)]
    return [sorted(indices) for _, indices in solutions[0][2]]


def deal(costs: Sequence[int], homes: Sequence[int | None], num_parts: int) -> list[list[int]]:
    """Partition the indices of costs: some have a part, and the others balance the parts.

    In ascending order, each index without a home goes to the part with the smallest sum, the
    first of equal ones. So equal costs without homes are dealt in turn.

    Args:
        homes: the part of each index; None: any part.
    Returns: one ascending list of indices for each part; deterministic.
    Example: costs (1, 1, 1, 1, 1) with homes (1, 1, None, None, None) in 2 parts give
    [[2, 3, 4], [0, 1]].
    """
    sums = [0] * num_parts
    chosen = list(homes)
    for cost, home in zip(costs, homes, strict=True):
        if home is not None:
            sums[home] += cost
    for index, cost in enumerate(costs):
        if chosen[index] is None:
            part = sums.index(min(sums))
            chosen[index] = part
            sums[part] += cost
    return [[index for index, part in enumerate(chosen) if part == number] for number in range(num_parts)]


def partition_near(costs: Sequence[int], homes: Sequence[Collection[int]], num_parts: int) -> list[list[int]]:
    """Partition the indices of costs like partition_balanced, and keep most of them in their homes.

    The largest sum exceeds the largest sum of partition_balanced by at most TOLERANCE of it. An
    index starts in the least filled part of its homes; indices without homes then fill the parts
    up. Then indices are moved out of parts whose sum is too large, or exchanged with others,
    starting with the ones that reduce the excess most for each index that leaves its homes. If a
    sum is still too large, the result is the partition of partition_balanced, with the parts in the
    order that keeps most indices in their homes.

    Args:
        homes: the parts where each index should stay if possible; empty: any part.
    Returns: one ascending list of indices for each part; deterministic.
    Example: costs (5, 5, 2, 2) with homes ({0}, {0}, {1}, {1}) in 2 parts give [[1, 2], [0, 3]]:
    two indices leave their homes, which had the sums 10 and 4.
    """
    balanced = partition_balanced(costs, num_parts)
    if not any(homes):
        return balanced
    limit = int((1 + TOLERANCE) * max(sum(costs[index] for index in part) for part in balanced))
    search = _Search(costs, homes, num_parts, limit)
    while search.exceeds_limit():
        if not search.improve():
            return _reordered(balanced, homes)
    return search.parts


class _Search:
    """A partition that starts with all indices in their homes, and is improved by small changes.

    parts: the indices of each part, ascending.
    """

    def __init__(self, costs: Sequence[int], homes: Sequence[Collection[int]], num_parts: int, limit: int) -> None:
        self.parts: list[list[int]] = [[] for _ in range(num_parts)]
        self._costs = costs
        self._homes = homes
        self._limit = limit
        self._sums = [0] * num_parts
        largest_first = sorted(range(len(costs)), key=lambda index: -costs[index])
        for index in sorted(largest_first, key=lambda index: not homes[index]):  # stable: those with homes first
            self._put(index, min(homes[index] or range(num_parts), key=lambda part: (self._sums[part], part)))

    def exceeds_limit(self) -> bool:
        """Return whether any sum is above the limit."""
        return max(self._sums) > self._limit

    def improve(self) -> bool:
        """Make the change that reduces the excess over the limit most for its price, if one does.

        An index of the part with the largest sum is moved to another part, or exchanged with an
        index of the part with the smallest sum.
        """
        heaviest, lightest = self._sums.index(max(self._sums)), self._sums.index(min(self._sums))
        places: list[tuple[int, int | None]] = [(part, None) for part in range(len(self.parts)) if part != heaviest]
        places += [(lightest, other) for other in self.parts[lightest]]
        changes = [_Change(index, heaviest, *place) for index in self.parts[heaviest] for place in places]
        best = max(changes, key=self._worth)  # the first of equal ones
        if self._worth(best) == 0:
            return False
        self._move(best.item, best.source, best.target)
        if best.exchanged is not None:
            self._move(best.exchanged, best.target, best.source)
        return True

    def _worth(self, change: _Change) -> float:
        """Return by how much a change reduces the excess, for each index that leaves its homes."""
        moved, num_leaving = self._costs[change.item], self._is_away(change.item, change.target)
        if change.exchanged is not None:
            moved -= self._costs[change.exchanged]
            num_leaving += self._is_away(change.exchanged, change.source)
        source, target = self._sums[change.source], self._sums[change.target]
        gain = self._excess(source, target) - self._excess(source - moved, target + moved)
        return 0.0 if gain <= 0 else gain / num_leaving if num_leaving else math.inf

    def _excess(self, *sums: int) -> int:
        return sum(max(0, each - self._limit) for each in sums)

    def _is_away(self, index: int, part: int) -> int:
        return int(bool(self._homes[index]) and part not in self._homes[index])

    def _move(self, index: int, source: int, target: int) -> None:
        self.parts[source].remove(index)
        self._sums[source] -= self._costs[index]
        self._put(index, target)

    def _put(self, index: int, part: int) -> None:
        insort(self.parts[part], index)
        self._sums[part] += self._costs[index]


class _Change(NamedTuple):
    """Moves an index from its part to another one, and `exchanged`, if not None, the other way."""

    item: int
    source: int
    target: int
    exchanged: int | None


def _reordered(parts: Sequence[list[int]], homes: Sequence[Collection[int]]) -> list[list[int]]:
    """Return the parts in another order, in which many indices are in one of their homes.

    Greedy: the pair of a part and a place with the most indices at home comes first.
    """
    at_home = {
        (place, number): sum(place in homes[index] for index in part)
        for place in range(len(parts))
        for number, part in enumerate(parts)
    }
    order: dict[int, int] = {}
    for place, number in sorted(at_home, key=lambda pair: (-at_home[pair], pair)):
        if place not in order and number not in order.values():
            order[place] = number
    return [parts[order[place]] for place in range(len(parts))]
