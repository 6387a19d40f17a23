"""Scores answers in killable processes, so that a grader that hangs, crashes or lies costs an answer and never the run.

Knows who is asked what, for how long, and who is to blame. Refuses to know what a score means.

Answers go out in chunks. The sequential and legacy contracts reply answer by answer, so the one that was being graded
when its worker hung or died is known, and the rest of its chunk goes to another worker. The batch contract replies for
the whole chunk: when that fails, its answers are asked again one by one, so that only the guilty one is blamed.

Workers are spoken to by a thread that lives as long as a scoring does. So grading goes on, and its time limits mean
what they say, whatever the caller does meanwhile; and workers belong to one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trigon.errors import RewardError
from trigon.rewards.contract import RewardContract, RewardRequest, parts_of
from trigon.rewards.load import find
from trigon.rewards.process import ChildProcess, ending_of
from trigon.rewards.scoring import Scoring
from trigon.types import Score

LOAD_SECONDS = 300.0
"""Time in which a reward function's file must have run, with all that it imports."""

MAX_CHUNK = 32
"""Most answers that are sent to a worker at a time."""

_GRACE_SECONDS = 0.1
"""Time after its limit in which a worker may still say where it hangs."""


class RewardPool:
    """A reward function behind worker processes. It may be used from any thread, by one at a time."""

    def __init__(
        self,
        spec: str,
        *,
        kwargs: Mapping[str, Any],
        num_workers: int,
        timeout_seconds: float,
        max_failed_fraction: float,
    ) -> None:
        """Start the workers and return at once; they load the function meanwhile. ready() says whether they could.

        Args: spec: `file.py:function`, or a name of names.SHIPPED_REWARDS. kwargs: further arguments of the function.
        timeout_seconds: time that one answer may take. max_failed_fraction: share of the answers of one scoring that
        may fail.
        Raises: RewardError if there is no such file, or kwargs hold what a configuration file cannot.
        """
        source = find(spec)
        greeting = {"file": source.file, "module": source.module, "function": source.function}
        try:
            self._greeting = json.dumps({**greeting, "kwargs": dict(kwargs), "timeout_seconds": timeout_seconds})
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"worker.reward.reward_function_kwargs={dict(kwargs)!r} cannot be handed to another process: {error}; "
                "keep to text, numbers, lists and dicts"
            ) from error
        self._where = source.where
        self._name = Path(source.file).name if source.file else spec
        self._timeout_seconds = timeout_seconds
        self._max_failed_fraction = max_failed_fraction
        self._num_workers = num_workers
        self._chunk = MAX_CHUNK
        self._turn = threading.Lock()
        self._warned_of: set[str] = set()
        self._broken = ""
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()  # wakes who waits at the selector
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._workers: list[_Worker] = []
        for number in range(num_workers):
            self._start(number)

    def ready(self) -> None:
        """Wait until a worker has loaded the function.

        Raises: RewardError if it cannot be loaded, fits no contract, or does not take its further arguments.
        """
        with self._turn:
            self._contract()

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Return a score for each request, in order, whatever finishes first.

        An answer whose grader failed or took too long has the outcome "failed" or "timeout". An answer may be handed
        to the function more than once.
        Raises: RewardError when the function cannot be loaded, and as soon as more than max_failed_fraction failed.
        """
        with self.scoring(num_answers=len(requests)) as scoring:
            scoring.add(0, requests)
            return scoring.result()

    @contextlib.contextmanager
    def scoring(self, *, num_answers: int) -> Iterator[Scoring]:
        """Return a context in which answers are scored while others, num_answers at most, are still to come.

        Scores are those that score() would give, whenever the answers come. Leaving the context ends all grading.
        Raises: as ready; and as score, from add() or result() of what is returned.
        """
        with self._turn:
            is_batch = self._contract() == "batch"
            scoring = Scoring(
                num_answers=num_answers,
                together=self._share(num_answers) if is_batch else None,
                max_failed_fraction=self._max_failed_fraction,
                name=self._name,
                ring=self._ring,
                warn_of=self._warn_of,
            )
            thread = threading.Thread(target=self._work, args=(scoring,), name="rewards", daemon=True)
            thread.start()
            try:
                yield scoring
            finally:
                scoring.abandon()
                thread.join()
                for worker in [worker for worker in self._workers if worker.asked]:  # only if we leave by an error
                    self._remove(worker)
                    self._start(worker.number)

    def close(self) -> None:
        """Kill all workers and what they started. The pool cannot be used afterwards."""
        for worker in self._workers:
            self._forget(worker)
            worker.process.kill()
        self._workers.clear()
        self._selector.close()
        self._bell.close()
        self._ear.close()
        self._broken = "the reward pool is closed"

    def _contract(self) -> RewardContract:
        """Return the contract that the function keeps, which the first worker that has loaded it tells."""
        while True:
            for worker in self._workers:
                if worker.contract is not None:
                    return worker.contract
            self._wait(None)

    def _work(self, scoring: Scoring) -> None:
        """Score until all is scored or nobody waits for it. Runs in a thread, and hands its errors to the caller."""
        try:
            while not (scoring.is_answered or scoring.is_abandoned):
                self._hand_out(scoring)
                self._wait(scoring)
        except BaseException as error:  # noqa: BLE001 - none may get lost here, or the caller would wait for ever
            scoring.outcome.set_exception(error)
        else:
            if scoring.is_answered:
                scoring.outcome.set_result(scoring.in_order())

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is ringing
            self._bell.send(b"!")

    def _share(self, num_answers: int) -> int:
        """Return how many of these to send at a time: a quarter of a worker's share, so that none idles at the end."""
        return max(1, min(self._chunk, -(-num_answers // (4 * self._num_workers))))

    def _start(self, number: int) -> None:
        worker = _Worker(number, ChildProcess(f"reward {number}"))
        self._workers.append(worker)
        self._selector.register(worker.process.channel, selectors.EVENT_READ, (worker, "reply"))
        self._selector.register(worker.process.output, selectors.EVENT_READ, (worker, "output"))
        worker.deadline = time.monotonic() + LOAD_SECONDS
        self._send(worker, self._greeting, timeout_seconds=LOAD_SECONDS)  # if it is gone, waiting for it tells

    def _forget(self, worker: _Worker) -> None:
        for stream in (worker.process.channel, worker.process.output):
            if stream in self._selector.get_map():
                self._selector.unregister(stream)

    def _remove(self, worker: _Worker) -> int:
        """Kill a worker and return its exit code."""
        self._forget(worker)
        self._workers.remove(worker)
        return worker.process.kill()

    def _send(self, worker: _Worker, line: str, *, timeout_seconds: float) -> bool:
        """Send a line and return whether the worker was alive to take it. One too slow to is left to its deadline."""
        try:
            worker.process.send(line, timeout_seconds=timeout_seconds)
        except ConnectionError:
            return False
        except TimeoutError:
            return True
        return True

    def _hand_out(self, scoring: Scoring) -> None:
        for worker in list(self._workers):
            if worker.contract is None or worker.asked:
                continue
            # A list goes out as it is, unless lists have turned out to be too long.
            is_batch = worker.contract == "batch"
            places = scoring.next_chunk(at_most=self._chunk if is_batch else self._share(scoring.num_waiting))
            if not places:
                return
            worker.asked.extend(places)
            worker.chunk, worker.num_replies = secrets.token_hex(8), 0
            line = f'{{"chunk": "{worker.chunk}", "answers": {scoring.text(places)}}}'
            worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
            if not self._send(worker, line, timeout_seconds=self._timeout_seconds):
                scoring.put_back(worker.asked, apart=False)  # it had died before: these answers are not to blame
                self._remove(worker)
                self._start(worker.number)

    def _warn_of(self, columns: Sequence[str]) -> None:
        for column in set(columns) - self._warned_of:
            self._warned_of.add(column)
            warnings.warn(
                f"column {column!r} of the dataset holds what JSON cannot carry; the reward gets its rows without it",
                stacklevel=4,
            )

    def _wait(self, scoring: Scoring | None) -> None:
        """Wait for the next thing to happen, and deal with it. scoring: None while nothing is to be scored."""
        if self._broken:
            raise RewardError(self._broken)
        now = time.monotonic()
        deadlines = [worker.deadline for worker in self._workers if worker.is_busy]
        for key, _ in self._selector.select(max(0.0, min(deadlines) - now) if deadlines else None):
            if key.fileobj is self._ear:
                self._ear.recv(4096)
                continue
            worker, stream = key.data
            if worker not in self._workers:
                continue  # removed a moment ago
            if stream == "output":
                if not worker.process.show_output():
                    self._selector.unregister(worker.process.output)
            else:
                self._read(worker, scoring)
        if scoring is not None:
            scoring.take_in()
        # By the clock as it was before we looked: the caller's thread may have kept us from reading a timely reply.
        for worker in [worker for worker in self._workers if worker.is_busy and worker.deadline <= now]:
            self._lose(worker, scoring, timed_out=True)

    def _read(self, worker: _Worker, scoring: Scoring | None) -> None:
        lines = worker.process.receive()
        try:
            for line in lines:
                self._take(worker, json.loads(line), scoring)
        except (ValueError, KeyError, IndexError, TypeError):  # the user's code wrote to our channel
            worker.process.ended = True
        if worker.process.ended:
            self._lose(worker, scoring, timed_out=False)

    def _take(self, worker: _Worker, reply: dict[str, Any], scoring: Scoring | None) -> None:
        """Note one reply. Raises: what indexing raises, if it is none."""
        if worker.contract is None:
            if "load_error" in reply:
                self._broken = str(reply["load_error"])
                raise RewardError(self._broken)
            worker.contract = cast(RewardContract, reply["contract"])
            return
        # The user's code runs where the replies are written: what it writes there itself must not pass for one.
        is_ours = (reply["chunk"], reply["number"]) == (worker.chunk, worker.num_replies)
        if scoring is None or not worker.asked or not is_ours:
            raise ValueError("not a reply of ours")
        worker.num_replies += 1
        if "singly" in reply:
            scoring.put_back(worker.asked, apart=True)
            worker.asked.clear()
            return
        place = worker.asked[0]
        error, trace = str(reply.get("error", "")), str(reply.get("traceback", ""))
        if not error:
            try:  # checked again, since the worker runs code that we do not trust
                scoring.succeed(place, parts_of(reply["parts"]))
            except RewardError as lie:
                error = str(lie)
        worker.asked.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        if error:
            scoring.fail(place, "failed", error, trace)

    def _lose(self, worker: _Worker, scoring: Scoring | None, *, timed_out: bool) -> None:
        """Replace a worker that hangs or is gone, and find out which answer is to blame."""
        code = self._remove(worker)
        timed_out = (
            timed_out and code == -signal.SIGKILL
        )  # else it had died, and a child of its own kept its channel open
        if worker.contract is None:
            ending = f"took more than {LOAD_SECONDS:g} s and was killed" if timed_out else ending_of(code)
            self._broken = f"{self._where}: its worker {ending}, while it loaded\n{worker.process.tail}"
            raise RewardError(self._broken)
        self._start(worker.number)
        if scoring is None or not worker.asked:
            return
        if worker.contract == "batch" and len(worker.asked) > 1:
            scoring.put_back(worker.asked, apart=True)
            if timed_out:  # perhaps nothing hangs, and a chunk merely takes longer than one answer may
                self._chunk = max(1, self._chunk // 2)
            return
        guilty = worker.asked.popleft()
        scoring.put_back(worker.asked, apart=True)
        if timed_out:
            error = f"no score within {self._timeout_seconds:g} s; its worker was killed"
            scoring.fail(guilty, "timeout", error, worker.process.tail)
        else:
            scoring.fail(guilty, "failed", f"its worker {ending_of(code)}", worker.process.tail)


class _Worker:
    """One process and what it is doing.

    contract: None until it has loaded the function. asked: places of the answers that it owes, in order.
    deadline: when it must have loaded, or sent its next reply. chunk, num_replies: the secret name of what it was
    asked last, and how many replies it has sent to that.
    """

    def __init__(self, number: int, process: ChildProcess) -> None:
        self.number = number
        self.process = process
        self.contract: RewardContract | None = None
        self.asked: deque[int] = deque()
        self.deadline = 0.0
        self.chunk = ""
        self.num_replies = 0

    @property
    def is_busy(self) -> bool:
        return self.contract is None or bool(self.asked)
