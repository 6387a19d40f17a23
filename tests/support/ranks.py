"""Real processes that stand for ranks: started once, and joined anew by gloo for each call that is run on them."""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_PATIENCE_SECONDS = 300


class RankProcesses:
    """Up to `most` processes. A function that runs on them must stand in a module, for they import it."""

    def __init__(self, most: int, folder: Path) -> None:
        """folder: an empty one, where the processes find each other."""
        self._folder = folder
        self._calls = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """Return what function(*args) returned on each rank; fail with the first traceback if it raised on any."""
        meeting = self._folder / str(next(self._calls))
        connections = self._connections[:ranks]
        for rank, connection in enumerate(connections):
            connection.send((function, args, meeting, rank, ranks))
        for rank, connection in enumerate(connections):
            assert connection.poll(_PATIENCE_SECONDS), f"rank {rank} does not answer"
        replies = [connection.recv() for connection in connections]
        for rank, (_, problem) in enumerate(replies):
            assert problem is None, f"rank {rank}: {problem}"
        return [result for result, _ in replies]

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
        function, args, meeting, rank, ranks = connection.recv()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        try:
            reply = function(*args), None
        except BaseException:  # noqa: BLE001  (whoever called run raises it)
            reply = None, traceback.format_exc()
        dist.destroy_process_group()
        connection.send(reply)
