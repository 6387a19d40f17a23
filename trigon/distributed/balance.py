"""Balanced partitioning of groups over ranks, by cost. Depends on numbers only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
