"""Spreads groups over ranks, so that none waits long for another. Knows numbers only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition_balanced(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Return the indices of each part, ascending, so that the parts' sums lie close together.

    The largest differencing method of Karmarkar and Karp ("The Differencing Method of Set Partitioning", 1982), for
    any number of parts: of all partial solutions the two most uneven are combined, the heaviest part of one with the
    lightest of the other, until one is left. The same costs always give the same parts; the heaviest comes first.

    Example: costs (8, 7, 6, 5, 4) in 2 parts: [[1, 3, 4], [0, 2]], which is 16 against 14.
    """
    # A solution: (its spread, negated for the heap; a number that settles ties; its parts as (sum, indices), heaviest
    # first).
    solutions: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-cost, index, [(cost, [index]), *((0, []) for _ in range(num_parts - 1))]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(solutions)
    made = len(solutions)
    while len(solutions) > 1:
        _, _, one = heapq.heappop(solutions)
        _, _, other = heapq.heappop(solutions)
        parts = sorted(
            (
                (heavy + light, indices + others)
                for (heavy, indices), (light, others) in zip(one, reversed(other), strict=True)
            ),
            key=lambda part: (-part[0], part[1]),
        )
        heapq.heappush(solutions, (parts[-1][0] - parts[0][0], made, parts))
        made += 1
    if not solutions:
        return [[] for _ in range(num_parts)]
    return [sorted(indices) for _, indices in solutions[0][2]]
