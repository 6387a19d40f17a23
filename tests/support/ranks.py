"""Processes that run functions as ranks.

They are started once for all files of tests and import the libraries; every call runs in a fork of
each of them, with a new gloo process group. torch keeps names of process groups in caches that
outlive the groups (those of how tensors are redistributed, for one), so a process can have only one
default group in its life without mistaking a new group for an old one.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

_TIMEOUT_SECONDS = 300
_STACKS_SECONDS = 2  # in which a rank writes its stacks
_SLOW_IMPORTS = {"torch", "transformers", "peft", "trigon"}  # a fork that imports these is slow


class RankProcesses:
    """As many processes as the calls so far had ranks.

    A function that runs on them has to be importable from a module.
    """

    def __init__(self, folder: Path) -> None:
        """Start no process yet. folder: empty; for the rendezvous files of the process groups."""
        self._folder = folder
        self._calls = itertools.count()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """Return what function(*args) returns on each rank.

        Fails with the first traceback if it raises on any rank, and with the stacks of all ranks if
        one does not return in time.
        """
        while len(self._processes) < ranks:
            self._start()
        rendezvous = self._folder / str(next(self._calls))
        connections = self._connections[:ranks]
        for rank, connection in enumerate(connections):
            connection.send((function, args, rendezvous, rank, ranks))
        forks = [connection.recv() for connection in connections]
        end = time.monotonic() + _TIMEOUT_SECONDS
        silent = [rank for rank, each in enumerate(connections) if not each.poll(max(0.0, end - time.monotonic()))]
        stacks = self._stacks(forks) if silent else ""
        for rank in silent:
            os.kill(forks[rank], signal.SIGKILL)
        outcomes = [pickle.loads(connection.recv_bytes()) for connection in connections]
        assert not silent, f"ranks {silent} have not returned\n{stacks}"
        for rank, (_, error) in enumerate(outcomes):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in outcomes]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        connection, child_connection = context.Pipe()
        process = context.Process(target=_serve, args=(child_connection, self._stack_file(len(self._processes))))
        process.start()
        child_connection.close()
        self._processes.append(process)
        self._connections.append(connection)

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks of rank {rank}"

    def _stacks(self, forks: list[int]) -> str:
        """Return the stacks of all threads of the forks. One that has returned has none."""
        for fork in forks:
            with suppress(ProcessLookupError):
                os.kill(fork, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        return "\n".join(
            f"rank {rank}\n{self._stack_file(rank).read_text(encoding='utf-8')}" for rank in range(len(forks))
        )

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # the process reads its end, and ends
        for process in self._processes:
            process.join()


def _serve(connection: Connection, stack_file: Path) -> None:
    """Run each call in a fork until the connection is closed."""
    with stack_file.open("w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch

        torch.set_num_threads(1)
        while True:
            try:
                function, args, rendezvous, rank, ranks = connection.recv()
            except EOFError:
                return
            modules_read, modules_write = os.pipe()
            fork = os.fork()
            if fork == 0:
                status = 1
                try:
                    _run_in_fork(connection, function, args, rendezvous, rank, ranks, modules_write)
                    status = 0
                finally:
                    os._exit(status)
            os.close(modules_write)
            with os.fdopen(modules_read, encoding="utf-8") as lines:
                modules = lines.read().split()
            _, status = os.waitpid(fork, 0)
            if status != 0:
                ended = f"ended with status {os.waitstatus_to_exitcode(status)} and without a result"
                connection.send_bytes(pickle.dumps((None, ended)))
            for module in modules:  # the next fork finds them imported
                importlib.import_module(module)


def _run_in_fork(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rendezvous: Path,
    rank: int,
    ranks: int,
    modules_write: int,
) -> None:
    """Send the id of this process, then what the function returns or raises.

    Writes the names of the modules that it has loaded and that take long to import.
    """
    connection.send(os.getpid())
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        outcome = function(*args), None
    except BaseException:  # noqa: BLE001  (run raises it in the parent process)
        outcome = None, traceback.format_exc()
    dist.destroy_process_group()
    loaded = [name for name, module in sys.modules.items() if getattr(module, "__name__", "") == name]  # no aliases
    with os.fdopen(modules_write, "w", encoding="utf-8") as lines:
        lines.write(" ".join(name for name in loaded if name.partition(".")[0] in _SLOW_IMPORTS))
    connection.send_bytes(pickle.dumps(outcome))  # send() would share tensors, whose memory ends with this process
