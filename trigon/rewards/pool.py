"""Scores answers in killable processes, so that a grader that hangs, crashes or lies costs an answer and never the run.

Knows who is asked what, for how long, and who is to blame. Refuses to know what a score means.

Answers go out in chunks. The sequential and legacy contracts reply answer by answer, so the one that was being graded
when its worker hung or died is known, and the rest of its chunk goes to another worker. The batch contract replies for
the whole chunk: when that fails, its answers are asked again one by one, so that only the guilty one is blamed.
"""

from __future__ import annotations

import json
import secrets
import selectors
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trigon.errors import RewardError
from trigon.rewards.contract import RewardContract, RewardRequest, encode, parts_of
from trigon.rewards.load import find
from trigon.rewards.process import ChildProcess, ending_of
from trigon.types import Score, ScoreOutcome

LOAD_SECONDS = 300.0
"""Time in which a reward function's file must have run, with all that it imports."""

MAX_CHUNK = 32
"""Most answers that are sent to a worker at a time."""

MAX_REQUEST_BYTES = 16 << 20
"""Longest answer, with its row, that is sent to a worker."""

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

        Args: spec: `file.py:function`, or a name of load.SHIPPED. kwargs: further arguments of the function.
        timeout_seconds: time that one answer may take. max_failed_fraction: share of the answers of one call of score()
        that may fail.
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
        self._chunk = MAX_CHUNK
        self._turn = threading.Lock()
        self._warned_of: set[str] = set()
        self._broken = ""
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for number in range(num_workers):
            self._start(number)

    def ready(self) -> None:
        """Wait until a worker has loaded the function.

        Raises: RewardError if it cannot be loaded, fits no contract, or does not take its further arguments.
        """
        with self._turn:
            while not any(worker.contract for worker in self._workers):
                self._wait(_Asked([], max_failed=0, name=self._name))

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Return a score for each request, in order, whatever finishes first.

        An answer whose grader failed or took too long has the outcome "failed" or "timeout". An answer may be handed
        to the function more than once.
        Raises: RewardError when the function cannot be loaded, and as soon as more than max_failed_fraction failed.
        """
        max_failed = int(self._max_failed_fraction * len(requests) + 1e-9)  # 0.29 * 100 is a little less than 29
        asked = _Asked(requests, max_failed=max_failed, name=self._name)
        with self._turn:
            try:
                while not asked.is_answered:
                    self._hand_out(asked)
                    self._wait(asked)
            finally:
                for worker in [worker for worker in self._workers if worker.asked]:  # only if we leave by an error
                    self._remove(worker)
                    self._start(worker.number)
        return asked.in_order()

    def close(self) -> None:
        """Kill all workers and what they started. The pool cannot be used afterwards."""
        for worker in self._workers:
            self._forget(worker)
            worker.process.kill()
        self._workers.clear()
        self._selector.close()
        self._broken = "the reward pool is closed"

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

    def _hand_out(self, asked: _Asked) -> None:
        for worker in list(self._workers):
            if worker.contract is None or worker.asked:
                continue
            share = -(-len(asked.requests) // (4 * len(self._workers)))  # so that no worker idles long at the end
            indices, answers = self._next_chunk(asked, limit=min(self._chunk, share))
            if not indices:
                return
            worker.asked.extend(indices)
            worker.chunk, worker.num_replies = secrets.token_hex(8), 0
            line = f'{{"chunk": "{worker.chunk}", "answers": {answers}}}'
            worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
            if not self._send(worker, line, timeout_seconds=self._timeout_seconds):
                asked.waiting.extendleft(reversed(worker.asked))  # it had died before: these answers are not to blame
                self._remove(worker)
                self._start(worker.number)

    def _next_chunk(self, asked: _Asked, *, limit: int) -> tuple[list[int], str]:
        """Take up to limit answers, or one that must be asked alone. Return their indices, and them as JSON."""
        indices: list[int] = []
        encoded: list[str] = []
        alone = bool(asked.alone)
        queue = asked.alone if alone else asked.waiting
        while queue and len(indices) < (1 if alone else limit):
            index = queue.popleft()
            try:
                text, left_out = encode(asked.requests[index])
            except RewardError as error:
                asked.fail(index, "failed", str(error), "")
                continue
            self._warn_of(left_out)
            if len(text) > MAX_REQUEST_BYTES:
                asked.fail(index, "failed", f"the answer and its row have {len(text)} bytes", "")
                continue
            indices.append(index)
            encoded.append(text)
        return indices, f"[{', '.join(encoded)}]"

    def _warn_of(self, columns: Sequence[str]) -> None:
        for column in set(columns) - self._warned_of:
            self._warned_of.add(column)
            warnings.warn(
                f"column {column!r} of the dataset holds what JSON cannot carry; the reward gets its rows without it",
                stacklevel=4,
            )

    def _wait(self, asked: _Asked) -> None:
        """Wait for the next thing to happen, and deal with it."""
        if self._broken:
            raise RewardError(self._broken)
        now = time.monotonic()
        patience = min((worker.deadline for worker in self._workers if worker.is_busy), default=now) - now
        for key, _ in self._selector.select(max(0.0, patience)):
            worker, stream = key.data
            if worker not in self._workers:
                continue  # removed a moment ago
            if stream == "output":
                if not worker.process.show_output():
                    self._selector.unregister(worker.process.output)
            else:
                self._read(worker, asked)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.is_busy and worker.deadline <= now]:
            self._lose(worker, asked, timed_out=True)

    def _read(self, worker: _Worker, asked: _Asked) -> None:
        lines = worker.process.receive()
        try:
            for line in lines:
                self._take(worker, json.loads(line), asked)
        except (ValueError, KeyError, IndexError, TypeError):  # the user's code wrote to our channel
            worker.process.ended = True
        if worker.process.ended:
            self._lose(worker, asked, timed_out=False)

    def _take(self, worker: _Worker, reply: dict[str, Any], asked: _Asked) -> None:
        """Note one reply. Raises: what indexing raises, if it is none."""
        if worker.contract is None:
            if "load_error" in reply:
                self._broken = str(reply["load_error"])
                raise RewardError(self._broken)
            worker.contract = cast(RewardContract, reply["contract"])
            return
        # The user's code runs where the replies are written: what it writes there itself must not pass for one.
        if (reply["chunk"], reply["number"]) != (worker.chunk, worker.num_replies):
            raise ValueError("not a reply of ours")
        worker.num_replies += 1
        if "singly" in reply:
            asked.alone.extend(worker.asked)
            worker.asked.clear()
            return
        index = worker.asked[0]
        error, trace = str(reply.get("error", "")), str(reply.get("traceback", ""))
        if not error:
            try:  # checked again, since the worker runs code that we do not trust
                asked.succeed(index, parts_of(reply["parts"]))
            except RewardError as lie:
                error = str(lie)
        worker.asked.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        if error:
            asked.fail(index, "failed", error, trace)

    def _lose(self, worker: _Worker, asked: _Asked, *, timed_out: bool) -> None:
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
        if not worker.asked:
            return
        if worker.contract == "batch" and len(worker.asked) > 1:
            asked.alone.extend(worker.asked)
            if timed_out:  # perhaps nothing hangs, and a chunk merely takes longer than one answer may
                self._chunk = max(1, self._chunk // 2)
            return
        guilty = worker.asked.popleft()
        asked.waiting.extendleft(reversed(worker.asked))
        if timed_out:
            error = f"no score within {self._timeout_seconds:g} s; its worker was killed"
            asked.fail(guilty, "timeout", error, worker.process.tail)
        else:
            asked.fail(guilty, "failed", f"its worker {ending_of(code)}", worker.process.tail)


class _Worker:
    """One process and what it is doing.

    contract: None until it has loaded the function. asked: indices of the answers that it owes, in order.
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


class _Asked:
    """The answers of one call of score(): which wait, which must be asked alone, which are scored, and which failed."""

    def __init__(self, requests: Sequence[RewardRequest], *, max_failed: int, name: str) -> None:
        self.requests = requests
        self.waiting = deque(range(len(requests)))
        self.alone: deque[int] = deque()
        self._scores: dict[int, Score] = {}
        self._traces: dict[int, str] = {}
        self._max_failed = max_failed
        self._name = name

    @property
    def is_answered(self) -> bool:
        return len(self._scores) == len(self.requests)

    def in_order(self) -> list[Score]:
        return [self._scores[index] for index in range(len(self.requests))]

    def succeed(self, index: int, parts: dict[str, float]) -> None:
        self._scores[index] = Score(overall=parts["overall"], parts=parts, outcome="ok", error="")

    def fail(self, index: int, outcome: ScoreOutcome, error: str, trace: str) -> None:
        """Note that an answer could not be scored. Raises: RewardError if too many cannot."""
        self._scores[index] = Score(overall=0.0, parts={}, outcome=outcome, error=error)
        self._traces[index] = trace
        if len(self._traces) <= self._max_failed:
            return
        first = min(self._traces)
        outcomes = [self._scores[failed].outcome for failed in self._traces]
        raise RewardError(
            f"{self._name} could not score {len(outcomes)} of {len(self.requests)} answers, and "
            f"worker.reward.max_failed_fraction allows {self._max_failed} ({outcomes.count('failed')} failed, "
            f"{outcomes.count('timeout')} ran out of time; the rest was not asked). "
            f"The first: {self._scores[first].error}\n{self._traces[first]}"
        )
