"""Scores completions in reward workers, which are killed when the reward function hangs.

A failure costs the completion that caused it, never the run. Does not depend on the meaning of
scores.

Completions are sent in chunks. Functions of the sequential and legacy contracts return scores one
by one, so when their worker hangs or exits, the completion that caused it is known, and the rest of
the chunk goes to another worker. Batch functions return scores for a whole chunk; when that fails,
its completions are sent again one by one. Group functions return scores for all completions of a
prompt, which succeed or fail together. A worker with an async function has several chunks at a
time; when it hangs or exits, each of them is sent again alone, to find the one that caused it.

During a scoring, a thread of the pool communicates with the workers. So scoring continues, and its
time limits hold, while the caller is busy.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trigon.errors import RewardError
from trigon.rewards.calls import BLOCKED_SECONDS
from trigon.rewards.confinement.options import DEFAULT, Confinement, check_confinement
from trigon.rewards.contract import RewardContract, RewardRequest, limit_of_call, read_scores
from trigon.rewards.load import RewardSource, RewardTerm
from trigon.rewards.media import MediaFolder, MediaWriter
from trigon.rewards.pooled_worker import LOAD_SECONDS, PooledChunk, PooledWorker, PooledWorkers
from trigon.rewards.process import (
    check_passed_variables,
    describe_exit,
    explain_withheld,
    warn_of_withheld_variables,
)
from trigon.rewards.scoring import Scoring
from trigon.rewards.setup import make_setup
from trigon.rewards.timeouts import Timeouts
from trigon.system.json_files import parse_json
from trigon.system.secrets import scrub
from trigon.types import Score

MAX_CHUNK_SIZE = 32
"""Maximum number of completions that are sent to a worker at a time."""

DEFAULT_CONCURRENCY = 16
"""Chunks that a worker has at a time, if the function is async."""

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
        concurrency: int = DEFAULT_CONCURRENCY,
        passed_variables: Sequence[str] = (),
        confinement: Confinement = DEFAULT,
    ) -> None:
        """Start the workers, which load the function; ready() waits for them.

        Args: reward: `file.py:function`, or a name of names.SHIPPED_REWARDS; or the source of a
        function, or several functions with their weights. kwargs: keyword arguments of a single
        function.
        timeout_seconds: time limit for each completion. max_failed_fraction: the fraction of the
        completions of one scoring that may fail. concurrency: completions, or lists of them for the
        batch contract, that a worker scores at a time if the function is async.
        passed_variables: environment variables that the workers get besides those of
        environment.ALLOWED. confinement: of the workers; the folders of the functions are always
        readable.
        Raises: RewardError if there is no such file, if one of the variables is not set, also of
        `env:NAME` in kwargs, or if JSON cannot represent kwargs.
        """
        setup = make_setup(reward, kwargs, timeout_seconds=timeout_seconds, concurrency=concurrency)
        self._setup, self._name, self._where = setup.message, setup.name, setup.where
        check_passed_variables(passed_variables)
        warn_of_withheld_variables(setup.files, passed_variables)
        self._media = MediaFolder()
        folders = [str(self._media.path), *(str(Path(file).parent) for file in setup.files)]
        self._confinement = confinement.with_readable(folders)
        self._takes_images = False  # until the function is loaded
        self._workers = PooledWorkers(setup.message, confinement=self._confinement, passed_variables=passed_variables)
        self._has_warned = False
        self._env = tuple(passed_variables)
        self._timeout_seconds = timeout_seconds
        self._max_failed_fraction = max_failed_fraction
        self._num_workers = num_workers
        self._concurrency = concurrency
        self._is_async = False  # until the function is loaded
        self._max_chunk_size = MAX_CHUNK_SIZE
        self._lock = threading.Lock()
        self._warned_columns: set[str] = set()
        self._timeouts = Timeouts()
        self._fatal_error = ""
        for number in range(num_workers):
            self._workers.start(number)

    def ready(self) -> None:
        """Wait until a worker has loaded the function.

        Raises: RewardError if it cannot be loaded, fits no contract, or does not accept its keyword
        arguments.
        """
        with self._lock:
            self._contract()

    def takes_images(self) -> bool:
        """Wait as ready, and return whether the function looks at the images of prompts."""
        with self._lock:
            self._contract()
            return self._takes_images

    def scores_groups(self) -> bool:
        """Wait as ready, and return whether all completions of a prompt are scored together."""
        with self._lock:
            return self._contract() == "group"

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
            f"{self._where} has no score for {described}, on which it is called before training: {error}. It must "
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
    def scoring(self, *, num_completions: int, num_separate: int = 0, min_counted: int = 0) -> Iterator[Scoring]:
        """Return a context in which completions are scored while others are still being sampled.

        The scores equal those of score(), whenever completions are added. Leaving the context stops
        all scoring.
        Args: num_completions: the maximum that will be added. num_separate: the maximum number of
        further completions, whose indices follow. They do not change the lists that a function of
        the batch contract receives for the others, and are each a list by themselves. min_counted:
        the number to which max_failed_fraction is relative, if fewer are added.
        Raises: as ready; add() and result() of the Scoring raise as score does.
        """
        with self._open_scoring(
            num_completions=num_completions,
            chunk_size=self._chunk_size(num_completions),
            max_failed_fraction=self._max_failed_fraction,
            num_separate=num_separate,
            min_counted=min_counted,
        ) as scoring:
            yield scoring

    @contextlib.contextmanager
    def _open_scoring(
        self,
        *,
        num_completions: int,
        chunk_size: int,
        max_failed_fraction: float,
        num_separate: int = 0,
        min_counted: int = 0,
    ) -> Iterator[Scoring]:
        """See scoring. chunk_size: of a batch function."""
        with self._lock:
            contract = self._contract()
            media = MediaWriter(self._media) if self._takes_images else None
            scoring = Scoring(
                num_completions=num_completions,
                fixed_chunk_size=chunk_size if contract == "batch" else None,
                by_group=contract == "group",
                max_failed_fraction=max_failed_fraction,
                name=self._name,
                wake_pool=self._workers.wake,
                warn_omitted=self._warn_omitted,
                media=media,
                num_separate=num_separate,
                min_counted=min_counted,
            )
            thread = threading.Thread(target=self._run, args=(scoring,), name="rewards", daemon=True)
            thread.start()
            try:
                yield scoring
            finally:
                scoring.cancel()
                thread.join()
                if media is not None:
                    media.close()
                for worker in [worker for worker in self._workers if worker.chunks]:  # only after an error
                    self._workers.kill(worker)
                    self._workers.start(worker.number)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the workers now. May be read in any thread."""
        return self._workers.process_ids

    def close(self) -> None:
        """Kill all workers and the processes that they started. The pool is then unusable."""
        self._workers.close()
        self._media.close()
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

    def _chunk_size(self, num_items: int) -> int:
        """Return a quarter of a worker's share, so that no worker is idle for long at the end."""
        return max(1, min(self._max_chunk_size, -(-num_items // (4 * self._num_workers))))

    def _send_chunks(self, scoring: Scoring) -> None:
        """Send chunks to the workers that can take one, first to those with the fewest."""
        while can_take := [w for w in self._workers if w.can_take_chunk(concurrency=self._concurrency)]:
            worker = min(can_take, key=lambda each: len(each.chunks))
            indices = scoring.next_chunk(max_size=self._max_size(worker, scoring))
            if not indices:
                return
            is_alone = scoring.is_alone(indices)
            if is_alone and worker.chunks:  # when the worker with the fewest has none
                scoring.requeue(indices, singly=False)
                return
            chunk = PooledChunk(deque(indices), 0.0, is_alone)
            chunk.deadline = time.monotonic() + self._limit_of(worker, chunk)
            chunk_id = secrets.token_hex(8)
            worker.chunks[chunk_id] = chunk
            line = f'{{"chunk": "{chunk_id}", "requests": {scoring.encode_chunk(indices)}}}'
            if not self._workers.send(worker, line, timeout_seconds=self._timeout_seconds):
                # The worker had exited before: these completions are not the cause.
                scoring.requeue(worker.chunks.pop(chunk_id).pending, singly=False)
                self._replace_worker(worker, scoring, timed_out=False)

    def _max_size(self, worker: PooledWorker, scoring: Scoring) -> int:
        """Return the maximum size of the next chunk of a worker."""
        match worker.contract:
            case "batch":  # fixed, unless chunks of that size have timed out
                return self._max_chunk_size
            case "group":
                return sys.maxsize
            case _:  # calls of async functions have time limits of their own, so none may wait for another
                return 1 if worker.is_async else self._chunk_size(scoring.num_queued)

    def _limit_of(self, worker: PooledWorker, chunk: PooledChunk) -> float:
        """Return how many seconds a worker may take for a result before it is killed."""
        assert worker.contract is not None
        seconds = limit_of_call(worker.contract, len(chunk.pending), self._timeout_seconds)
        return seconds + (BLOCKED_SECONDS if worker.is_async else _GRACE_SECONDS)

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
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        for worker in self._workers.wait(max(0.0, min(deadlines) - now) if deadlines else None):
            self._receive(worker, scoring)
        if scoring is not None:
            scoring.process_added()
        # `now` was read before select(): a result that arrived in time counts if read late.
        for worker in [w for w in self._workers if w.deadline is not None and w.deadline <= now]:
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
            worker.is_async = self._is_async = bool(message["is_async"])
            self._takes_images = bool(message["takes_images"])
            return
        # The user's code runs in the process that sends results, so it could send forged ones. It
        # does not know the random id of a chunk.
        chunk_id = message["chunk"]
        chunk = worker.chunks[chunk_id]
        if scoring is None or message["number"] != chunk.num_results:
            raise ValueError("unexpected message from a reward worker")
        chunk.num_results += 1
        timed_out = message.get("timed_out") is True
        if "retry_singly" in message:
            scoring.set_chunk_error(chunk.pending, scrub(str(message["error"])))
            self._retry_singly(worker.chunks.pop(chunk_id), scoring, timed_out=timed_out)
            return
        if not timed_out:
            self._timeouts.clear()
        index = chunk.pending[0]
        scoring.set_seconds(index, float(message["seconds"]))
        error, traceback = scrub(str(message.get("error", ""))), scrub(str(message.get("traceback", "")))
        if not error:
            try:  # validated again: the worker runs untrusted code
                scoring.succeed(index, read_scores(message["scores"]))
            except RewardError as invalid:
                error = str(invalid)
        chunk.pending.popleft()
        chunk.deadline = time.monotonic() + self._limit_of(worker, chunk)
        if not chunk.pending:
            del worker.chunks[chunk_id]
        if timed_out:
            scoring.fail(index, "timeout", error, traceback)
            if worker.contract != "group" or chunk.num_results == 1:
                self._count_timeout(worker, scoring.group_of(index), traceback)
        elif error:
            scoring.fail(index, "failed", explain_withheld(error, self._env), traceback)

    def _retry_singly(self, chunk: PooledChunk, scoring: Scoring, *, timed_out: bool) -> None:
        """Send the completions of a batch function's list again one by one."""
        scoring.requeue(chunk.pending, singly=True)
        if timed_out:  # nothing may hang: a chunk of this size may just take too long
            self._max_chunk_size = max(1, self._max_chunk_size // 2)

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
        code = self._workers.kill(worker)
        output = scrub(worker.process.tail)
        exit_text = worker.process.exceeded or describe_exit(code)
        # Any other code: it had exited just before.
        timed_out = timed_out and code == -signal.SIGKILL and not worker.process.exceeded
        if worker.contract is None:
            ending = f"took more than {LOAD_SECONDS:g} s and was killed" if timed_out else exit_text
            self._fatal_error = f"{self._where}: its worker {ending} while loading\n{output}"
            raise RewardError(self._fatal_error)
        self._workers.start(worker.number)
        if scoring is None or not worker.chunks:
            return
        if len(worker.chunks) > 1:
            for each in reversed(worker.chunks.values()):
                scoring.requeue(each.pending, singly=False, alone=True)
            return
        [chunk] = worker.chunks.values()
        if worker.contract == "batch" and len(chunk.pending) > 1:
            self._retry_singly(chunk, scoring, timed_out=timed_out)
            return
        failed = list(chunk.pending)
        if worker.contract != "group":
            scoring.requeue(failed[1:], singly=True)
            del failed[1:]
        if timed_out:
            limit = limit_of_call(worker.contract, len(failed), self._timeout_seconds)
            for index in failed:
                scoring.set_seconds(index, self._timeout_seconds)
                scoring.fail(index, "timeout", f"no score within {limit:g} s; its worker was killed", output)
            self._count_timeout(worker, scoring.group_of(failed[0]), output)
        else:
            self._timeouts.clear()
            was_killed = code == -signal.SIGKILL and not worker.process.exceeded
            if was_killed and scoring.retry(failed):  # it may not be the cause
                return
            for index in failed:
                scoring.fail(index, "failed", f"its worker {exit_text}", output)

    def _count_timeout(self, worker: PooledWorker, group: object, output: str) -> None:
        """Count a timeout. Raises: RewardError after too many in a row."""
        num_calls = self._num_workers * (self._concurrency if self._is_async else 1)
        num_timeouts = self._timeouts.add(group, num_calls=num_calls)
        if num_timeouts is not None:
            counted = "groups" if worker.contract == "group" else "completions"
            raise RewardError(
                f"{self._name} timed out for {num_timeouts} {counted} in a row (no score within "
                f"worker.reward.timeout_seconds={self._timeout_seconds:g} s), so it seems to hang for all of them. "
                f"Correct it, or raise the limit if it is only slow. Where the last call was:\n{output}".rstrip()
            )
