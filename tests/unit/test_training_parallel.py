"""The number of passes that ranks agree on, by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from trigon.training.parallel import ProcessGroup, SingleProcess, passes_in_step


class ThreadRanks:
    """One of several ranks, each of which is a thread. Satisfies ProcessGroup."""

    state_group: Any | None = None

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[int, list[float]]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._board = board

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in self._columns(numbers)]

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        return [max(column) for column in self._columns(numbers)]

    def before_forward(self, policy: nn.Module, *, sync_gradients: bool) -> None:
        raise NotImplementedError

    def reshard(self, policy: nn.Module) -> None:
        raise NotImplementedError

    def _columns(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        self._board[self.rank] = list(numbers)
        self._barrier.wait()
        columns = list(zip(*self._board.values(), strict=True))  # strict: the same number of values on every rank
        self._barrier.wait()
        return columns


def passes_on(*shows_image: Sequence[bool]) -> list[tuple[bool, ...]]:
    """Return the passes on each rank.

    shows_image: for each rank, which of its micro-batches have images.
    """
    size = len(shows_image)
    barrier, board = threading.Barrier(size, timeout=10), {}
    ranks: list[ProcessGroup] = [ThreadRanks(rank, size, barrier, board) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(passes_in_step, shows_image, ranks))


@pytest.mark.parametrize(
    ("shows_image", "expected"),
    [
        (([True, False, False], [False]), (True, False, False)),
        (([False, True], [True, False], [False, False]), (True, True)),
        (([], [False, True]), (False, True)),
        (([], [], [True], []), (True,)),
        (([False], [False, False]), (False, False)),
        (([], []), ()),
    ],
    ids=["different numbers", "images on any rank", "one rank without", "one rank with", "text only", "no passes"],
)
def test_all_ranks_make_the_most_passes_of_any_and_run_the_vision_tower_together(shows_image, expected):
    assert passes_on(*shows_image) == [expected] * len(shows_image)


def test_a_single_process_makes_its_own_passes_and_reductions_return_its_numbers():
    for shows_image in ([True, False, True], [False], []):
        assert passes_in_step(shows_image, SingleProcess()) == tuple(shows_image)
    assert SingleProcess().all_reduce_sum([1.5, -2.0]) == SingleProcess().all_reduce_max([1.5, -2.0]) == [1.5, -2.0]
    assert (SingleProcess().rank, SingleProcess().size, SingleProcess().state_group) == (0, 1, None)
