"""Scores completions in reward workers, which are killed when the reward function hangs.

A failure costs the completion that caused it, never the run. Does not depend on the meaning of
scores.

Completions are sent in chunks. Functions of the sequential and legacy contracts return scores one
by one, so when their worker hangs or exits, the completion that caused it is known, and the rest of
the chunk goes to another worker. Batch functions return scores for a whole chunk; when that fails,
its completions are sent again one by one.

During a scoring, a thread of the pool communicates with the workers. So scoring continues, and its
time limits hold, while the caller is busy.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trigon.errors import RewardError
from trigon.json_files import parse_json
from trigon.rewards.confinement.options import DEFAULT, Confinement, check_confinement
from trigon.rewards.contract import RewardContract, RewardRequest, read_scores
from trigon.rewards.load import RewardSource, RewardTerm
from trigon.rewards.pooled_worker import PooledWorker
from trigon.rewards.process import (
    ChildProcess,
    check_passed_variables,
    describe_exit,
    explain_withheld,
    warn_of_withheld_variables,
)
from trigon.rewards.scoring import Scoring
from trigon.rewards.setup import make_setup
from trigon.secrets import scrub
from trigon.system.signals import termination_blocked
from trigon.types import Score

LOAD_SECONDS = 300.0
"""Time limit for loading a reward function's file, with all its imports."""

MAX_CHUNK_SIZE = 32
"""Maximum number of completions that are sent to a worker at a time."""

MIN_TIMEOUTS_TO_STOP = 5
"""The run stops after this many timeouts in a row, unless all are of one group. With more than two
workers it is twice their number, because a short outage can make all of them time out at once.
"""

_GRACE_SECONDS = 0.1
"""How long a worker lives after its time limit, to print its stack."""

_log = logging.getLogger(__name__)


class RewardPool:
    """Reward workers for one reward function, or a sum of several.

    May be used by any thread, one at a time.
    """

    def __init__(
        self,
        reward: str | RewardSource | Sequence[RewardTerm],
        *,
        kwargs: Mapping[str, Any],
        num_workers: int,
        timeout_seconds: float,
        max_failed_fraction: float,
        passed_variables: Sequence[str] = (),
        confinement: Confinement = DEFAULT,
    ) -> None:
        """Start the workers, which load the function; ready() waits for them.

        Args: reward: `file.py:function`, or a name of names.SHIPPED_REWARDS; or the source of a
        function, or several functions with their weights. kwargs: keyword arguments of a single
        function.
        timeout_seconds: time limit for each completion. max_failed_fraction: the fraction of the
        completions of one scoring that may fail. passed_variables: environment variables that the
        workers get besides those of environment.ALLOWED. confinement: of the workers; the folders
        of the functions are always readable.
        Raises: RewardError if there is no such file, if one of the variables is not set, also of
        `env:NAME` in kwargs, or if JSON cannot represent kwargs.
        """
        setup = make_setup(reward, kwargs, timeout_seconds=timeout_seconds)
        self._setup, self._name, self._where = setup.message, setup.name, setup.where
        check_passed_variables(passed_variables)
        warn_of_withheld_variables(setup.files, passed_variables)
        self._confinement = confinement.with_readable(str(Path(file).parent) for file in setup.files)
        self._has_warned = False
        self._env = tuple(passed_variables)
        self._timeout_seconds = timeout_seconds
        self._max_failed_fraction = max_failed_fraction
        self._num_workers = num_workers
        self._max_chunk_size = MAX_CHUNK_SIZE
        self._lock = threading.Lock()
        self._warned_columns: set[str] = set()
        self._timeouts: list[object] = []  # the groups of the completions that timed out since the last other result
        self._fatal_error = ""
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()  # ends a select() of the pool's thread
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._workers: list[PooledWorker] = []
        for number in range(num_workers):
            self._start_worker(number)

    def ready(self) -> None:
        """Wait until a worker has loaded the function.

        Raises: RewardError if it cannot be loaded, fits no contract, or does not accept its keyword
        arguments.
        """
        with self._lock:
            self._contract()

    def check(self, requests: Sequence[RewardRequest], *, described: str) -> None:
        """Call the function on dummy completions, so that an error is found before training.

        described: the completions in the error message.
        Raises: RewardError if the function cannot be loaded, or does not return a score for each.
        """
        with self._open_scoring(num_completions=len(requests), chunk_size=len(requests), max_failed_fraction=1.0) as s:
            s.add(0, requests)
            s.result()
        self._timeouts.clear()
        if s.first_failure is None:
            return
        error, traceback = s.first_failure
        raise RewardError(
            f"{self._where} has no score for {described}, on which it is called once before training: {error}. It must "
            f"return a score for any text that a model may write\n{traceback}".rstrip()
        )

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Return a score for each request, in the order of requests.

        A completion for which the function failed or timed out has the outcome "failed" or
        "timeout". The function may be called more than once for a completion.
        Raises: RewardError if the function cannot be loaded, once more than max_failed_fraction
        have failed, or after too many timeouts in a row.
        """
        with self.scoring(num_completions=len(requests)) as scoring:
            for index, request in enumerate(requests):  # each is a group of its own
                scoring.add(index, [request])
            return scoring.result()

    @contextlib.contextmanager
    def scoring(self, *, num_completions: int) -> Iterator[Scoring]:
        """Return a context in which completions are scored while others are still being sampled.

        Args: num_completions: the maximum that will be added. The scores equal those of score(),
        whenever completions are added. Leaving the context stops all scoring.
        Raises: as ready; add() and result() of the Scoring raise as score does.
        """
        with self._open_scoring(
            num_completions=num_completions,
            chunk_size=self._chunk_size(num_completions),
            max_failed_fraction=self._max_failed_fraction,
        ) as scoring:
            yield scoring

    @contextlib.contextmanager
    def _open_scoring(self, *, num_completions: int, chunk_size: int, max_failed_fraction: float) -> Iterator[Scoring]:
        """See scoring. chunk_size: of a batch function."""
        with self._lock:
            is_batch = self._contract() == "batch"
            scoring = Scoring(
                num_completions=num_completions,
                fixed_chunk_size=chunk_size if is_batch else None,
                max_failed_fraction=max_failed_fraction,
                name=self._name,
                wake_pool=self._wake,
                warn_omitted=self._warn_omitted,
            )
            thread = threading.Thread(target=self._run, args=(scoring,), name="rewards", daemon=True)
            thread.start()
            try:
                yield scoring
            finally:
                scoring.cancel()
                thread.join()
                for worker in [worker for worker in self._workers if worker.pending]:  # only after an error
                    self._kill_worker(worker)
                    self._start_worker(worker.number)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the workers now. May be read in any thread."""
        return tuple(worker.process.pid for worker in list(self._workers))

    def close(self) -> None:
        """Kill all workers and the processes that they started. The pool is then unusable."""
        for worker in self._workers:
            self._unregister(worker)
            worker.process.kill()
        self._workers.clear()
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()
        self._fatal_error = "the reward pool is closed"

    def _contract(self) -> RewardContract:
        """Wait until a worker has loaded the function, and return the function's contract."""
        while True:
            for worker in self._workers:
                if worker.contract is not None:
                    return worker.contract
            self._wait(None)

    def _run(self, scoring: Scoring) -> None:
        """Score until the scoring is complete or cancelled. Runs in the thread of the pool."""
        try:
            while not (scoring.is_complete or scoring.is_cancelled):
                self._send_chunks(scoring)
                self._wait(scoring)
        except BaseException as error:  # noqa: BLE001 - the caller waits for this future, so it must get every error
            scoring.outcome.set_exception(error)
        else:
            if scoring.is_complete:
                scoring.outcome.set_result(scoring.ordered_scores())

    def _wake(self) -> None:
        """End the current or next select() of the pool's thread."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so select() will return
            self._wake_sender.send(b"!")

    def _chunk_size(self, num_items: int) -> int:
        """Return a quarter of a worker's share, so that no worker is idle for long at the end."""
        return max(1, min(self._max_chunk_size, -(-num_items // (4 * self._num_workers))))

    def _start_worker(self, number: int) -> None:
        with termination_blocked():  # until the worker has its handlers
            process = ChildProcess(f"reward {number}", confinement=self._confinement, passed_variables=self._env)
        worker = PooledWorker(number, process)
        self._workers.append(worker)
        self._selector.register(worker.process.channel, selectors.EVENT_READ, (worker, "result"))
        self._selector.register(worker.process.output, selectors.EVENT_READ, (worker, "output"))
        worker.deadline = time.monotonic() + LOAD_SECONDS
        self._send(worker, self._setup, timeout_seconds=LOAD_SECONDS)  # if it has exited, _wait() detects that

    def _unregister(self, worker: PooledWorker) -> None:
        for stream in (worker.process.channel, worker.process.output):
            if stream in self._selector.get_map():
                self._selector.unregister(stream)

    def _kill_worker(self, worker: PooledWorker) -> int:
        """Kill a worker and return its exit code, as ChildProcess.kill does."""
        self._unregister(worker)
        self._workers.remove(worker)
        return worker.process.kill()

    def _send(self, worker: PooledWorker, line: str, *, timeout_seconds: float) -> bool:
        """Send a line. Returns: False if the worker has exited.

        If the worker does not read the line, it is replaced at its deadline.
        """
        try:
            worker.process.send(line, timeout_seconds=timeout_seconds)
        except ConnectionError:
            return False
        except TimeoutError:
            return True
        return True

    def _send_chunks(self, scoring: Scoring) -> None:
        """Send a chunk to each idle worker."""
        for worker in list(self._workers):
            if worker.contract is None or worker.pending:
                continue
            # The chunks of batch functions are fixed, unless chunks of that size have timed out.
            is_batch = worker.contract == "batch"
            max_size = self._max_chunk_size if is_batch else self._chunk_size(scoring.num_queued)
            indices = scoring.next_chunk(max_size=max_size)
            if not indices:
                return
            worker.pending.extend(indices)
            worker.chunk_id, worker.num_results = secrets.token_hex(8), 0
            line = f'{{"chunk": "{worker.chunk_id}", "requests": {scoring.encode_chunk(indices)}}}'
            worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
            if not self._send(worker, line, timeout_seconds=self._timeout_seconds):
                # The worker had exited while it was idle: these completions are not the cause.
                scoring.requeue(worker.pending, singly=False)
                self._kill_worker(worker)
                self._start_worker(worker.number)

    def _warn_omitted(self, columns: Sequence[str]) -> None:
        for column in set(columns) - self._warned_columns:
            self._warned_columns.add(column)
            warnings.warn(
                f"column {column!r} of the dataset has values that JSON cannot represent; the reward function gets its "
                "rows without this column",
                stacklevel=4,
            )

    def _wait(self, scoring: Scoring | None) -> None:
        """Wait for the next event and handle it. scoring: None while the function is loaded."""
        if self._fatal_error:
            raise RewardError(self._fatal_error)
        now = time.monotonic()
        deadlines = [worker.deadline for worker in self._workers if worker.is_busy]
        for key, _ in self._selector.select(max(0.0, min(deadlines) - now) if deadlines else None):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                continue
            worker, stream = key.data
            if worker not in self._workers:
                continue  # killed while an earlier event was handled
            if stream == "output":
                if not worker.process.log_output():
                    self._selector.unregister(worker.process.output)
            else:
                self._receive(worker, scoring)
        if scoring is not None:
            scoring.process_added()
        # `now` was read before select(): a result that arrived in time counts if read late.
        for worker in [worker for worker in self._workers if worker.is_busy and worker.deadline <= now]:
            self._replace_worker(worker, scoring, timed_out=True)

    def _receive(self, worker: PooledWorker, scoring: Scoring | None) -> None:
        lines = worker.process.receive()
        try:
            for line in lines:
                self._handle_message(worker, parse_json(line), scoring)
        except (ValueError, KeyError, IndexError, TypeError):  # the user's code has written to the channel
            worker.process.ended = True
        if worker.process.ended:
            self._replace_worker(worker, scoring, timed_out=False)

    def _handle_message(self, worker: PooledWorker, message: dict[str, Any], scoring: Scoring | None) -> None:
        """Handle a message. Raises: ValueError, KeyError or TypeError if it is invalid."""
        if not worker.is_confined:
            self._check_confinement(message)
            worker.is_confined = True
            return
        if worker.contract is None:
            if "load_error" in message:
                self._fatal_error = explain_withheld(scrub(str(message["load_error"])), self._env)
                raise RewardError(self._fatal_error)
            worker.contract = cast(RewardContract, message["contract"])
            return
        # The user's code runs in the process that sends results, so it could send forged ones. It
        # does not know the random id of the chunk.
        is_valid = (message["chunk"], message["number"]) == (worker.chunk_id, worker.num_results)
        if scoring is None or not worker.pending or not is_valid:
            raise ValueError("unexpected message from a reward worker")
        worker.num_results += 1
        if "retry_singly" in message:
            scoring.set_chunk_error(worker.pending, scrub(str(message["error"])))
            scoring.requeue(worker.pending, singly=True)
            worker.pending.clear()
            return
        self._timeouts.clear()
        index = worker.pending[0]
        scoring.set_seconds(index, float(message["seconds"]))
        error, traceback = scrub(str(message.get("error", ""))), scrub(str(message.get("traceback", "")))
        if not error:
            try:  # validated again: the worker runs untrusted code
                scoring.succeed(index, read_scores(message["scores"]))
            except RewardError as invalid:
                error = str(invalid)
        worker.pending.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        if error:
            scoring.fail(index, "failed", explain_withheld(error, self._env), traceback)

    def _check_confinement(self, message: dict[str, Any]) -> None:
        """Warn once of what is not confined here. Raises: RewardError if that is not acceptable."""
        try:
            warning = check_confinement(self._confinement, message["used"], str(message["obstacle"]))
        except RewardError as error:
            self._fatal_error = str(error)
            raise
        if warning and not self._has_warned:
            _log.warning("%s", warning)
        self._has_warned = True

    def _replace_worker(self, worker: PooledWorker, scoring: Scoring | None, *, timed_out: bool) -> None:
        """Replace a worker that hangs or has exited, and fail or retry its completions."""
        code = self._kill_worker(worker)
        output = scrub(worker.process.tail)
        exit_text = worker.process.exceeded or describe_exit(code)
        # Any other code: it had exited just before.
        timed_out = timed_out and code == -signal.SIGKILL and not worker.process.exceeded
        if worker.contract is None:
            ending = f"took more than {LOAD_SECONDS:g} s and was killed" if timed_out else exit_text
            self._fatal_error = f"{self._where}: its worker {ending} while loading\n{output}"
            raise RewardError(self._fatal_error)
        self._start_worker(worker.number)
        if scoring is None or not worker.pending:
            return
        if worker.contract == "batch" and len(worker.pending) > 1:
            scoring.requeue(worker.pending, singly=True)
            if timed_out:  # nothing may hang: a chunk of this size may just take too long
                self._max_chunk_size = max(1, self._max_chunk_size // 2)
            return
        failed_index = worker.pending.popleft()
        scoring.requeue(worker.pending, singly=True)
        if timed_out:
            error = f"no score within {self._timeout_seconds:g} s; its worker was killed"
            scoring.set_seconds(failed_index, self._timeout_seconds)
            scoring.fail(failed_index, "timeout", error, output)
            self._stop_if_hanging(scoring.group_of(failed_index), output)
        else:
            self._timeouts.clear()
            was_killed = code == -signal.SIGKILL and not worker.process.exceeded
            if was_killed and scoring.retry(failed_index):  # it may not be the cause
                return
            scoring.fail(failed_index, "failed", f"its worker {exit_text}", output)

    def _stop_if_hanging(self, group: object, output: str) -> None:
        """Count a timeout.

        The completions of a group are alike: a function may hang for all of them and for no others.
        Raises: RewardError after too many timeouts in a row, unless all are of one group.
        """
        self._timeouts.append(group)
        if len(self._timeouts) < max(MIN_TIMEOUTS_TO_STOP, 2 * self._num_workers) or len(set(self._timeouts)) == 1:
            return
        num_timeouts = len(self._timeouts)
        self._timeouts.clear()
        raise RewardError(
            f"{self._name} timed out for {num_timeouts} completions in a row (no score within "
            f"worker.reward.timeout_seconds={self._timeout_seconds:g} s), so it seems to hang for all of them. Correct "
            f"it, or raise the limit if it is only slow. Where the last call was:\n{output}".rstrip()
        )
