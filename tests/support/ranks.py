"""Processes that run functions as ranks.

They are started once; every call makes a new gloo process group.
"""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_TIMEOUT_SECONDS = 300


class RankProcesses:
    """Up to max_ranks processes.

    A function that runs on them has to be importable from a module.
    """

    def __init__(self, max_ranks: int, folder: Path) -> None:
        """Start the processes. folder: empty; for the rendezvous files of the process groups."""
        self._folder = folder
        self._calls = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for _ in range(max_ranks):
            connection, child_connection = context.Pipe()
            process = context.Process(target=_serve, args=(child_connection,), daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(connection)

    def run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """Return what function(*args) returns on each rank.

        Fails with the first traceback if it raises on any rank.
        """
        rendezvous = self._folder / str(next(self._calls))
        connections = self._connections[:ranks]
        for rank, connection in enumerate(connections):
            connection.send((function, args, rendezvous, rank, ranks))
        for rank, connection in enumerate(connections):
            assert connection.poll(_TIMEOUT_SECONDS), f"rank {rank} has not returned"
        outcomes = [connection.recv() for connection in connections]
        for rank, (_, error) in enumerate(outcomes):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in outcomes]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        function, args, rendezvous, rank, ranks = connection.recv()
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        try:
            outcome = function(*args), None
        except BaseException:  # noqa: BLE001  (run raises it in the parent process)
            outcome = None, traceback.format_exc()
        dist.destroy_process_group()
        connection.send(outcome)
