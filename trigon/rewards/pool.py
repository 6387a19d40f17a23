"""Scores completions in reward workers, which are killed when the reward function hangs.

A failure costs the completion that caused it, never the run. Does not depend on the meaning of
scores.

What the function scores in one call, a worker is sent as one message. When a call fails, hangs or
ends its worker, and the call was for a batch, the completions of the batch are sent again one by
one. All completions of a group succeed or fail together. A worker whose function is not async may
be sent further calls, which it carries out one after the other, so that the first of them is the
cause when the worker hangs or exits. A worker with an async function carries out several calls at a
time; when it hangs or exits, each of them is sent again alone, to find the cause.

During a scoring, a thread of the pool communicates with the workers. So scoring continues, and its
time limits hold, while the caller is busy.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.errors import RewardError
from trigon.rewards.contract import BLOCKED_SECONDS, CallStyle, RewardRequest, read_scores
from trigon.rewards.load import RewardTerm, describe_terms, encode_setup
from trigon.rewards.scoring import Call, MediaFolder, Scoring
from trigon.system.child import FORGED, GRACE_SECONDS, Child, Children, ChildSpec, Ending, explain_withheld
from trigon.system.confinement.options import DEFAULT, Confinement
from trigon.system.files import OmittedColumns
from trigon.system.frames import encode_frame
from trigon.system.secrets import scrub
from trigon.types import Score

MAX_BATCH = 32
"""Maximum number of completions of a batch, and of calls that wait in a worker for others."""

DEFAULT_CONCURRENCY = 16
"""Calls that a worker carries out at a time, if the function is async."""

MIN_TIMEOUTS = 5
"""The run stops after this many timeouts in a row, unless all are of one group. With more than two
calls at a time it is twice their number, because a short outage can make all of them time out.
"""

_MAX_REPLY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Result:
    """What a worker says of one completion, or of a whole call that has failed.

    scores: None with an error.
    """

    scores: dict[str, float] | None
    error: str
    traceback: str

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> _Result:
        """Read a part of a reply, which may be forged. Raises: one of FORGED."""
        error, traceback = scrub(str(message.get("error", ""))), scrub(str(message.get("traceback", "")))
        if "error" not in message:
            try:  # validated again: the worker runs untrusted code
                return cls(read_scores(message["scores"]), "", "")
            except RewardError as invalid:
                error = str(invalid)
        return cls(None, error, traceback)


class RewardPool:
    """Reward workers for one reward function, or a sum of several.

    May be used by any thread, one at a time.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        *,
        num_workers: int,
        timeout_seconds: float,
        max_failed_fraction: float,
        concurrency: int = DEFAULT_CONCURRENCY,
        passed_variables: Sequence[str] = (),
        confinement: Confinement = DEFAULT,
    ) -> None:
        """Start the workers, which load the function; ready() waits for them.

        Args: terms: the function, or several with their weights (load.find_reward).
        timeout_seconds: time limit for each completion. max_failed_fraction: the fraction of the
        completions of one scoring that may fail. concurrency: completions, or lists of them for the
        batch contract, that a worker scores at a time if the function is async.
        passed_variables: environment variables that the workers get besides
        child.ALLOWED. confinement: how the workers are confined; the folders of the functions are
        always readable.
        Raises: RewardError if one of the variables is not set, also of `env:NAME` in the functions'
        arguments, or if JSON cannot represent these.
        """
        setup = encode_setup(terms, timeout_seconds=timeout_seconds, concurrency=concurrency)
        self._name, self._where = describe_terms(terms)
        self._media = MediaFolder()
        spec = ChildSpec(
            program="trigon.rewards.worker",
            setup=setup,
            where=self._where,
            confined="reward functions",
            error=RewardError,
            confinement=confinement.with_readable([str(self._media.path)]),
            files=[term.source.file for term in terms if term.source.file],
            passed_variables=tuple(passed_variables),
            max_frame_bytes=_MAX_REPLY_BYTES,
        )
        self._children = Children(spec)
        self._calls: dict[Child, dict[str, Call]] = {}  # what each worker was sent, by random ids
        self._loaded: CallStyle | None = None  # until a worker has loaded the function
        self._scoring: Scoring | None = None  # the current one
        self._passed_variables = tuple(passed_variables)
        self._timeout_seconds = timeout_seconds
        self._max_failed_fraction = max_failed_fraction
        self._num_workers = num_workers
        self._concurrency = concurrency
        self._max_batch = MAX_BATCH
        self._lock = threading.Lock()
        self._omitted = OmittedColumns("the reward function")
        self._timed_out_groups: list[object] = []  # since the last other result
        self._fatal_error = ""
        for number in range(num_workers):
            self._start(f"reward {number}")

    def ready(self) -> CallStyle:
        """Wait until a worker has loaded the function, and return how it is called.

        Raises: RewardError if it cannot be loaded, fits no contract, or does not accept its keyword
        arguments.
        """
        with self._lock:
            return self._wait_until_loaded()

    def check(self, requests: Sequence[RewardRequest], *, described: str) -> None:
        """Call the function on dummy completions, so that an error is found before training.

        described: the completions in the error message.
        Raises: RewardError if the function cannot be loaded, does not return a score for each
        completion, or returns another number of scores than it received completions.
        """
        together = len(requests)
        with self.scoring(num_completions=together, batch_size=together, max_failed_fraction=1.0) as scoring:
            scoring.add(0, requests)
            scoring.result()
        self._timed_out_groups.clear()
        error, traceback = scoring.first_failure or (scoring.wrong_length, "")
        if not error:
            return
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
    def scoring(
        self,
        *,
        num_completions: int,
        num_separate: int = 0,
        min_counted: int = 0,
        batch_size: int | None = None,
        max_failed_fraction: float | None = None,
    ) -> Iterator[Scoring]:
        """Return a context in which completions are scored while others are still being sampled.

        The scores equal those of score(), whenever completions are added. Leaving the context stops
        all scoring.
        Args: num_completions: the maximum that will be added. num_separate: the maximum number of
        further completions, whose indices follow. They do not change the lists that a function of
        the batch contract receives for the others, and are each a list by themselves. min_counted:
        the number to which max_failed_fraction is relative, if fewer are added. batch_size: length
        of these lists; None: it depends on the number of workers. max_failed_fraction: None: the
        pool's.
        Raises: as ready; add() and result() of the Scoring raise as score does.
        """
        with self._lock:
            style = self._wait_until_loaded()
            call_size = {"completion": 1, "batch": batch_size or self._share(num_completions), "group": None}
            scoring = self._scoring = Scoring(
                num_completions=num_completions,
                call_size=call_size[style.unit],
                max_failed_fraction=self._max_failed_fraction if max_failed_fraction is None else max_failed_fraction,
                name=self._name,
                wake_pool=self._children.wake,
                warn_omitted=self._omitted.warn,
                media=self._media if style.takes_images else None,
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
                self._media.clear()
                self._scoring = None
                for child in [child for child, calls in self._calls.items() if calls]:  # only after an error
                    self._replace(child)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the workers now. May be read in any thread."""
        return tuple(child.pid for child in self._children)

    def close(self) -> None:
        """Kill all workers and the processes that they started. The pool is then unusable."""
        self._children.close()
        self._media.close()
        self._fatal_error = "the reward pool is closed"

    def _start(self, name: str) -> None:
        self._calls[self._children.start(name)] = {}

    def _wait_until_loaded(self) -> CallStyle:
        if self._fatal_error:
            raise RewardError(self._fatal_error)
        while self._loaded is None:
            self._wait()
        return self._loaded

    @property
    def _style(self) -> CallStyle:
        assert self._loaded is not None, "scoring begins once the function is loaded"
        return self._loaded

    def _run(self, scoring: Scoring) -> None:
        """Score until the scoring is complete or cancelled. Runs in the thread of the pool."""
        try:
            while not (scoring.is_complete or scoring.is_cancelled):
                self._send_calls(scoring)
                self._wait()
                scoring.process_added()
        except BaseException as error:  # noqa: BLE001 - the caller waits for this future, so it must get every error
            scoring.outcome.set_exception(error)
        else:
            if scoring.is_complete:
                scoring.outcome.set_result(scoring.ordered_scores())

    def _share(self, num_items: int) -> int:
        """Return a quarter of a worker's share, so that no worker is idle for long at the end."""
        return max(1, min(self._max_batch, -(-num_items // (4 * self._num_workers))))

    def _send_calls(self, scoring: Scoring) -> None:
        """Send calls to the workers that can take one, first to those with the fewest."""
        while scoring.num_queued:
            able = [child for child in self._children if self._can_take_call(child, scoring.num_queued)]
            if not able:
                return
            child = min(able, key=lambda child: len(self._calls[child]))
            calls = self._calls[child]
            call = scoring.next_call(max_size=self._max_batch if self._style.unit == "batch" else sys.maxsize)
            if call.is_alone and calls:  # when the worker with the fewest has some
                scoring.requeue([call])
                return
            call_id = secrets.token_hex(8)
            child.forget_output()
            frame = encode_frame({"call": call_id}, requests=scoring.encode_requests(call.indices))
            self._children.send(child.channel, frame)
            if not child.channel.can_send:  # the worker had exited before: this call is not the cause
                child.has_ended = True
                scoring.requeue([call])
                continue
            calls[call_id] = call
            if self._style.is_async or len(calls) == 1:
                self._begin(call)

    def _can_take_call(self, child: Child, num_queued: int) -> bool:
        calls = self._calls[child]
        if child.loaded is None or child.has_ended or any(call.is_alone for call in calls.values()):
            return False
        if self._style.limits_completions:
            # So a completion that is scored alone never waits in the worker, within its time limit,
            # and a group of n waits for less than n times the limit.
            return sum(len(call.indices) for call in calls.values()) < self._concurrency
        if self._style.is_async:
            return len(calls) < self._concurrency
        # Calls of single completions may be short: the next ones wait in the worker.
        return len(calls) < (self._share(num_queued) if self._style.unit == "completion" else 1)

    def _limit_of(self, call: Call) -> float:
        return self._style.time_limit(len(call.indices), self._timeout_seconds)

    def _begin(self, call: Call) -> None:
        """Set the deadline of a call that its worker begins now."""
        grace = BLOCKED_SECONDS if self._style.is_async else GRACE_SECONDS
        call.deadline = time.monotonic() + self._limit_of(call) + grace

    def _wait(self) -> None:
        """Wait for the next event and handle it."""
        now = time.monotonic()
        deadline = min(map(self._deadline_of, self._children))
        for child in self._children.wait(None if deadline == math.inf else max(0.0, deadline - now)):
            assert isinstance(child, Child)
            self._receive(child)
        # `now` was read before select(): a result that arrived in time counts if read late.
        for child in [child for child in self._children if self._deadline_of(child) <= now]:
            self._handle_end(child)

    def _deadline_of(self, child: Child) -> float:
        """Return when a worker must be replaced, unless it sends something before."""
        if child.has_ended:
            return 0.0
        if child.loaded is None:
            return child.load_deadline
        return min((call.deadline for call in self._calls[child].values()), default=math.inf)

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Raise an error in all later calls, too."""
        try:
            yield
        except RewardError as error:
            self._fatal_error = str(error)
            raise

    def _receive(self, child: Child) -> None:
        with self._fatal():  # the function cannot be loaded, or confined as it must be
            frames = self._children.receive(child)
        try:
            if child.loaded is not None and self._loaded is None:
                self._loaded = CallStyle(**child.loaded)
            for frame in frames:
                self._handle_reply(child, frame.content)
        except FORGED:  # the user's code has written to the channel
            child.has_ended = True

    def _handle_reply(self, child: Child, message: Mapping[str, Any]) -> None:
        """Handle the reply to a call. Raises: one of FORGED if it is none."""
        # The user's code runs in the process that sends results, so it could send forged ones. It
        # does not know the random id of a call.
        calls = self._calls[child]
        call = calls[message["call"]]
        assert self._scoring is not None
        self._scoring.set_seconds(call.indices, float(message["seconds"]) / len(call.indices))
        failed = "error" in message
        results = [_Result.read(each) for each in ([message] if failed else message["results"])]
        if not failed and len(results) != len(call.indices):
            raise ValueError("a reply with another number of results")
        del calls[message["call"]]
        if calls and not self._style.is_async:
            self._begin(next(iter(calls.values())))
        if failed:
            self._handle_failure(
                call,
                results[0],
                of_batch=message.get("wrong_length") is True,
                timed_out=message.get("timed_out") is True,
            )
            return
        self._timed_out_groups.clear()
        for index, result in zip(call.indices, results, strict=True):
            if result.scores is None:
                self._fail([index], call, result)
            else:
                self._scoring.succeed(index, result.scores)

    def _handle_failure(self, call: Call, result: _Result, *, of_batch: bool = False, timed_out: bool = False) -> None:
        """Fail the completions of a call, or send the completions of a batch again one by one.

        of_batch: whether the error belongs to the batch, rather than to one of its completions.
        """
        assert self._scoring is not None
        if of_batch:
            self._scoring.wrong_length = self._scoring.wrong_length or result.error
        if self._style.unit == "batch" and len(call.indices) > 1:
            self._scoring.requeue([Call([index], result.error if of_batch else "") for index in call.indices])
            if timed_out:  # nothing may hang: a batch of this size may just take too long
                # Not half of the maximum: several batches may have timed out at the same time.
                self._max_batch = min(self._max_batch, len(call.indices) // 2)
        elif timed_out:
            self._scoring.fail(call.indices, "timeout", call.explain(result.error), result.traceback)
            self._count_timeout(self._scoring.group_of(call.indices[0]), result.traceback)
        else:
            self._timed_out_groups.clear()
            self._fail(call.indices, call, result)

    def _fail(self, indices: Sequence[int], call: Call, result: _Result) -> None:
        assert self._scoring is not None
        error = explain_withheld(call.explain(result.error), self._passed_variables)
        self._scoring.fail(indices, "failed", error, result.traceback)

    def _replace(self, child: Child) -> tuple[Ending, list[Call]]:
        """Start another worker for one that is ended. Returns: how it ended, and its calls."""
        with self._fatal():  # it had not loaded the function
            ending = self._children.end(child)
        self._start(child.name)
        return ending, list(self._calls.pop(child).values())

    def _handle_end(self, child: Child) -> None:
        """Replace a worker that hangs or has exited, and fail its calls or send them again."""
        ending, calls = self._replace(child)
        if self._scoring is None or not calls:
            return
        if self._style.is_async and len(calls) > 1:
            self._scoring.requeue([Call(call.indices, call.error, is_alone=True) for call in calls])
            return
        call, *waiting = calls
        self._scoring.requeue(waiting)
        if ending.timed_out:
            limit = self._limit_of(call)
            self._scoring.set_seconds(call.indices, limit / len(call.indices))
            result = _Result(None, f"no score within {limit:g} s; its worker was killed", ending.output)
            self._handle_failure(call, result, timed_out=True)
        elif ending.was_killed and not call.is_second:  # it may not be the cause
            self._timed_out_groups.clear()
            self._scoring.requeue([Call(call.indices, call.error, call.is_alone, is_second=True)])
        else:
            self._handle_failure(call, _Result(None, f"its worker {ending.text}", ending.output))

    def _count_timeout(self, group: object, output: str) -> None:
        """Count a timeout. Raises: RewardError after too many in a row.

        The completions of a group are alike: a function may hang for all of them and for no others.
        The count starts again after too many.
        """
        self._timed_out_groups.append(group)
        number = len(self._timed_out_groups)
        num_calls = self._num_workers * (self._concurrency if self._style.is_async else 1)
        if number < max(MIN_TIMEOUTS, 2 * num_calls) or len(set(self._timed_out_groups)) == 1:
            return
        self._timed_out_groups.clear()
        counted = "groups" if self._style.unit == "group" else "completions"
        raise RewardError(
            f"{self._name} timed out for {number} {counted} in a row (no score within "
            f"worker.reward.timeout_seconds={self._timeout_seconds:g} s), so it seems to hang for all of them. "
            f"Correct it, or raise the limit if it is only slow. Where the last call was:\n{output}".rstrip()
        )
