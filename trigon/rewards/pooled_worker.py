"""A reward worker as its pool knows it: the process, and the completions whose scores it owes."""

from __future__ import annotations

from collections import deque

from trigon.rewards.contract import RewardContract
from trigon.rewards.process import ChildProcess


class PooledWorker:
    """A reward worker and its current work.

    is_confined: whether it has said how it is confined. contract: None until it has loaded the
    function. pending: indices of the completions for which it owes results, in order. deadline:
    when it must have loaded the function or sent its next result. chunk_id: a random id of the
    current chunk. num_results: how many results it has sent for that chunk.
    """

    def __init__(self, number: int, process: ChildProcess) -> None:
        self.number = number
        self.process = process
        self.is_confined = False
        self.contract: RewardContract | None = None
        self.pending: deque[int] = deque()
        self.deadline = 0.0
        self.chunk_id = ""
        self.num_results = 0

    @property
    def is_busy(self) -> bool:
        return self.contract is None or bool(self.pending)
