"""Reward workers as their pool knows them: processes, and the completions whose scores they owe."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trigon.rewards.confinement.options import Confinement
from trigon.rewards.contract import RewardContract
from trigon.rewards.process import ChildProcess
from trigon.system.signals import termination_blocked

LOAD_SECONDS = 300.0
"""Time limit for loading a reward function's file, with all its imports."""


@dataclass(slots=True)
class PooledChunk:
    """Completions that a worker was sent in one message.

    pending: indices of those for which it owes results, in order. deadline: when it must have sent
    the next result. num_results: how many results it has sent. is_alone: whether the worker may
    have no other chunk in the meantime.
    """

    pending: deque[int]
    deadline: float
    is_alone: bool
    num_results: int = 0


class PooledWorker:
    """A reward worker and its current work.

    is_confined: whether it has said how it is confined. contract: None until it has loaded the
    function. is_async: whether the function is. load_deadline: when it must have loaded it. chunks:
    what it is working on, by a random id of each: one chunk, or several with an async function.
    """

    def __init__(self, number: int, process: ChildProcess, *, load_deadline: float) -> None:
        self.number = number
        self.process = process
        self.is_confined = False
        self.contract: RewardContract | None = None
        self.is_async = False
        self.load_deadline = load_deadline
        self.chunks: dict[str, PooledChunk] = {}

    @property
    def deadline(self) -> float | None:
        """When it must send its next message; None if it owes none."""
        if self.contract is None:
            return self.load_deadline
        return min((chunk.deadline for chunk in self.chunks.values()), default=None)

    def can_take_chunk(self, *, concurrency: int) -> bool:
        """Return whether it may be sent a chunk. concurrency: the maximum of an async function."""
        if self.contract is None or any(chunk.is_alone for chunk in self.chunks.values()):
            return False
        return len(self.chunks) < (concurrency if self.is_async else 1)


class PooledWorkers:
    """The running workers, in the order of their starts. Does not decide when one is started."""

    def __init__(self, setup: str, *, confinement: Confinement, passed_variables: Sequence[str]) -> None:
        """Start none yet. setup: the first line for each worker, see trigon.rewards.worker."""
        self._setup = setup
        self._confinement = confinement
        self._passed_variables = passed_variables
        self._workers: list[PooledWorker] = []
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()  # ends a select() of the pool's thread
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[PooledWorker]:
        return iter(list(self._workers))

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the workers now. May be read in any thread."""
        return tuple(worker.process.pid for worker in self)

    def start(self, number: int) -> None:
        """Start a worker, which loads the function."""
        with termination_blocked():  # until the worker has its handlers
            process = ChildProcess(
                f"reward {number}", confinement=self._confinement, passed_variables=self._passed_variables
            )
        worker = PooledWorker(number, process, load_deadline=time.monotonic() + LOAD_SECONDS)
        self._workers.append(worker)
        self._selector.register(process.channel, selectors.EVENT_READ, (worker, "result"))
        self._selector.register(process.output, selectors.EVENT_READ, (worker, "output"))
        self.send(worker, self._setup, timeout_seconds=LOAD_SECONDS)  # if it has exited, wait() detects that

    def send(self, worker: PooledWorker, line: str, *, timeout_seconds: float) -> bool:
        """Send a line. Returns: False if the worker has exited.

        If the worker does not read the line, it is to be replaced at its deadline.
        """
        try:
            worker.process.send(line, timeout_seconds=timeout_seconds)
        except ConnectionError:
            return False
        except TimeoutError:
            return True
        return True

    def wait(self, timeout_seconds: float | None) -> Iterator[PooledWorker]:
        """Wait for wake(), the timeout or messages. Yield workers with messages, and log output."""
        for key, _ in self._selector.select(timeout_seconds):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                continue
            worker, stream = key.data
            if worker not in self._workers:
                continue  # killed while an earlier event was handled
            if stream == "result":
                yield worker
            elif not worker.process.log_output():
                self._selector.unregister(worker.process.output)

    def wake(self) -> None:
        """End the current or next wait()."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so select() will return
            self._wake_sender.send(b"!")

    def kill(self, worker: PooledWorker) -> int:
        """Kill a worker and return its exit code, as ChildProcess.kill does."""
        self._unregister(worker)
        self._workers.remove(worker)
        return worker.process.kill()

    def close(self) -> None:
        """Kill all workers and the processes that they started. No more can be started."""
        for worker in self:
            self._unregister(worker)
            worker.process.kill()
        self._workers.clear()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _unregister(self, worker: PooledWorker) -> None:
        for stream in (worker.process.channel, worker.process.output):
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
