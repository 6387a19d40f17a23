"""The state of one scoring: its requests, their scores, and whether too many of them have failed.

Requests may be added in any order and at any time. They are indexed from 0, and neither the
composition of chunks nor the order of scores depends on when a request is added. Does not depend on
reward workers.

    the caller's thread       add(first_index, requests) ... result()
    the pool's thread         process_added, next_chunk, requeue, succeed, fail
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from trigon.errors import RewardError
from trigon.rewards.contract import RequestFiles, RewardRequest, encode_request
from trigon.rewards.media import MediaFolder, MediaWriter
from trigon.types import Score, ScoreOutcome

MAX_REQUEST_BYTES = 16 << 20
"""Maximum size of an encoded request, including the row of its prompt."""

_PROGRESS_SECONDS = 0.2
"""Interval at which result() reports progress."""


class Scoring:
    """Scores completions while others are still being sampled; made by RewardPool.scoring().

    The caller uses add() and result(). All other methods are for the pool.
    """

    def __init__(
        self,
        *,
        num_completions: int,
        fixed_chunk_size: int | None,
        by_group: bool,
        max_failed_fraction: float,
        name: str,
        wake_pool: Callable[[], None],
        warn_omitted: Callable[[Sequence[str]], None],
        media: MediaWriter | None = None,
        num_separate: int = 0,
        min_counted: int = 0,
    ) -> None:
        """Make an empty scoring.

        Args: num_completions: the maximum that will be added. num_separate: the maximum number of
        further completions, whose indices follow; each of them is a chunk by itself for the batch
        contract. fixed_chunk_size: for the batch
        contract, whose scores may depend on the chunk, the size of the fixed chunks of consecutive
        indices; None if chunks may be arbitrary. by_group: whether requests that are added together
        are a chunk, for the group contract.
        name: of the reward function, for errors. wake_pool: wakes the pool's thread. warn_omitted:
        called with the columns that JSON cannot represent. media: writes images and videos; None if
        the function does not look at them. min_counted: the number to which max_failed_fraction is
        relative, if fewer are added.
        """
        self.outcome: Future[list[Score]] = Future()
        self.is_cancelled = False
        self._wake_pool = wake_pool
        self._warn_omitted = warn_omitted
        self._media = media
        self._max_failed_fraction = max_failed_fraction
        self._name = name
        # None: nothing more will be added.
        self._added: SimpleQueue[list[_EncodedRequest] | Exception | None] = SimpleQueue()
        # The fields below are only used by the pool's thread.
        self._first_separate = num_completions
        self._num_completions = num_completions + num_separate
        self._min_counted = min_counted
        self._is_closed = False
        self._indices: set[int] = set()
        self._encoded: dict[int, str] = {}
        self._groups: dict[int, object] = {}
        self._by_group = by_group
        self._has_fixed_chunks = fixed_chunk_size is not None or by_group
        self._chunk_size = fixed_chunk_size or 1
        self._incomplete_chunks: dict[int, list[_EncodedRequest]] = {}  # by first index
        self._queue: deque[list[int]] = deque()  # the indices of each complete chunk
        self._scores: dict[int, Score] = {}
        self._tracebacks: dict[int, str] = {}  # of failed requests
        self._seconds: dict[int, float] = {}
        self._chunk_errors: dict[int, str] = {}  # of requests that are scored again alone
        self._retried: set[int] = set()
        self._alone: set[int] = set()

    # -- for the caller --

    def add(self, first_index: int, requests: Sequence[RewardRequest | None]) -> None:
        """Add the requests of a group, with consecutive indices from first_index.

        Each index may be added once; None is left out.

        Raises: RewardError if more than max_failed_fraction of num_completions have failed so far.
        """
        if self.outcome.done():
            self.outcome.result()
        indexed = [(first_index + offset, each) for offset, each in enumerate(requests) if each is not None]
        if self._media is None:
            self._put(indexed, None)
        else:
            self._media.thread.submit(self._put_with_media, self._media.folder, indexed)

    def result(self, *, on_progress: Callable[[int | None], object] | None = None) -> list[Score]:
        """Wait, and return the score of each request that was added, in the order of their indices.

        Nothing can be added afterwards. The allowed number of failures is relative to the requests
        that were added.
        on_progress: called several times a second while nothing else happens, with the number of
        requests scored since the last call, None for none; it may raise.
        Raises: as RewardPool.score.
        """
        if self._media is None:
            self._put_end()
        else:  # after the requests that were added
            self._media.thread.submit(self._put_end)
        num_scored = 0
        while on_progress is not None and not wait([self.outcome], timeout=_PROGRESS_SECONDS).done:
            before, num_scored = num_scored, len(self._scores)
            on_progress(num_scored - before or None)
        return self.outcome.result()

    def find_scores(self, indices: Sequence[int]) -> list[Score] | None:
        """Return the scores of these requests; None while one of them is not scored.

        Raises: as add.
        """
        if self.outcome.done():
            self.outcome.result()
        scores = [self._scores.get(index) for index in indices]
        found = [score for score in scores if score is not None]
        return found if len(found) == len(scores) else None

    def seconds(self) -> list[float]:
        """Return how long the reward function took for each request, in the order of the scores.

        To be called after result(). As the reward worker says, which runs the user's code; the time
        limit for one that timed out, and 0 for one whose worker exited.
        """
        return [self._seconds.get(index, 0.0) for index in sorted(self._scores)]

    def _put(self, indexed: Sequence[tuple[int, RewardRequest]], files: Sequence[RequestFiles] | None) -> None:
        group = object()
        each_files = [None] * len(indexed) if files is None else files
        self._added.put(
            [
                self._encode(index, request, its_files, group)
                for (index, request), its_files in zip(indexed, each_files, strict=True)
            ]
        )
        self._wake_pool()

    def _put_with_media(self, folder: MediaFolder, indexed: Sequence[tuple[int, RewardRequest]]) -> None:
        if self.is_cancelled:
            return
        try:
            files = folder.write([request for _, request in indexed])
        except RewardError as error:
            group = object()
            self._added.put([_EncodedRequest(index, "", group, str(error)) for index, _ in indexed])
            self._wake_pool()
        except Exception as error:  # noqa: BLE001 - the pool's thread raises it, since nothing waits for this one
            self._added.put(error)
            self._wake_pool()
        else:
            self._put(indexed, files)

    def _put_end(self) -> None:
        self._added.put(None)
        self._wake_pool()

    def _encode(self, index: int, request: RewardRequest, files: RequestFiles | None, group: object) -> _EncodedRequest:
        try:
            text, omitted = encode_request(request, files)
        except RewardError as error:
            return _EncodedRequest(index, "", group, str(error))
        self._warn_omitted(omitted)
        if len(text) > MAX_REQUEST_BYTES:
            return _EncodedRequest(index, "", group, f"the completion and its row have {len(text)} bytes")
        return _EncodedRequest(index, text, group, "")

    # -- for the pool --

    def cancel(self) -> None:
        """Stop scoring; result() will not be called."""
        self.is_cancelled = True
        self._wake_pool()

    @property
    def is_complete(self) -> bool:
        """Whether all requests have been added, and each is scored or failed."""
        return self._is_closed and len(self._scores) == len(self._indices)

    def process_added(self) -> None:
        """Queue the requests that the caller has added since the last call. Raises: as fail."""
        while True:
            try:
                requests = self._added.get_nowait()
            except Empty:
                return
            if requests is None:
                self._close()
                continue
            if isinstance(requests, Exception):
                raise requests
            for request in requests:
                index = request.index
                assert 0 <= index < self._num_completions, f"index {index} of {self._num_completions}"
                assert index not in self._indices, f"index {index} was added twice"
                self._indices.add(index)
                if not self._by_group:
                    self._add_to_chunk(request)
            if self._by_group:
                self._enqueue_group(requests)

    def _add_to_chunk(self, request: _EncodedRequest) -> None:
        if request.index >= self._first_separate:
            self._enqueue([request])
            return
        first_index = request.index - request.index % self._chunk_size
        chunk = self._incomplete_chunks.setdefault(first_index, [])
        chunk.append(request)
        if len(chunk) == min(self._chunk_size, self._first_separate - first_index):
            self._enqueue(self._incomplete_chunks.pop(first_index))

    def _enqueue_group(self, group: list[_EncodedRequest]) -> None:
        """Queue a group, or fail all of it if one of its requests cannot be sent."""
        error = next((request.error for request in group if request.error), "")
        self._enqueue([replace(request, error=error) for request in group])

    def _enqueue(self, chunk: list[_EncodedRequest]) -> None:
        for request in chunk:
            self._groups[request.index] = request.group
            if request.error:
                self.fail(request.index, "failed", request.error, "")
            else:
                self._encoded[request.index] = request.text
        if indices := sorted(request.index for request in chunk if not request.error):
            self._queue.append(indices)

    def _close(self) -> None:
        for first_index in sorted(self._incomplete_chunks):  # completions of these could not be sampled
            self._enqueue(self._incomplete_chunks.pop(first_index))
        self._is_closed = True
        self._num_completions = len(self._indices)
        self._check_failures()  # the number of failures that is allowed may have decreased

    @property
    def num_queued(self) -> int:
        """The number of queued chunks."""
        return len(self._queue)

    def next_chunk(self, *, max_size: int) -> list[int]:
        """Remove up to max_size requests from the queue, and return their indices.

        Fixed chunks are returned one at a time, and split if they are longer than max_size; others
        are joined.
        """
        if not self._queue:
            return []
        if not self._has_fixed_chunks:
            return [index for _ in range(min(max_size, len(self._queue))) for index in self._queue.popleft()]
        chunk = self._queue.popleft()
        if len(chunk) > max_size:
            self._queue.appendleft(chunk[max_size:])
        return chunk[:max_size]

    def requeue(self, indices: Sequence[int], *, singly: bool, alone: bool = False) -> None:
        """Put requests back at the front of the queue, as single chunks or as one chunk.

        alone: their worker may have nothing else from now on.
        """
        if alone:
            self._alone.update(indices)
        singly = singly or not self._has_fixed_chunks
        self._queue.extendleft([[index] for index in reversed(indices)] if singly else [list(indices)])

    def is_alone(self, indices: Sequence[int]) -> bool:
        """Return whether the worker of these requests may have nothing else."""
        return not self._alone.isdisjoint(indices)

    def retry(self, indices: Sequence[int]) -> bool:
        """Put a chunk back at the front of the queue, once. Returns: False the second time."""
        if not self._retried.isdisjoint(indices):
            return False
        self._retried.update(indices)
        self.requeue(indices, singly=False)
        return True

    def encode_chunk(self, indices: Sequence[int]) -> str:
        """Return requests as a JSON list."""
        return f"[{', '.join(self._encoded[index] for index in indices)}]"

    def group_of(self, index: int) -> object:
        """Return an object that identifies the group of a request."""
        return self._groups[index]

    def succeed(self, index: int, scores: dict[str, float]) -> None:
        """Store the scores of a request."""
        self._scores[index] = Score(overall=scores["overall"], parts=scores, outcome="ok", error="")

    def set_seconds(self, index: int, seconds: float) -> None:
        """Store how long a request took. Raises: ValueError for nan, infinity or less than 0."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a request took {seconds} seconds")
        self._seconds[index] = seconds

    def set_chunk_error(self, indices: Sequence[int], error: str) -> None:
        """Store why a chunk is scored again, one by one; "" if the next errors will say more."""
        self._chunk_errors.update(dict.fromkeys(indices, error))

    def fail(self, index: int, outcome: ScoreOutcome, error: str, traceback: str) -> None:
        """Store the failure of a request. Raises: RewardError if too many have failed."""
        if chunk_error := self._chunk_errors.get(index):
            error = f"{chunk_error}; scored again alone: {error}"
        self._scores[index] = Score(overall=0.0, parts={}, outcome=outcome, error=error)
        self._tracebacks[index] = traceback
        self._check_failures()

    def ordered_scores(self) -> list[Score]:
        """Return all scores in the order of the indices."""
        return [self._scores[index] for index in sorted(self._scores)]

    @property
    def first_failure(self) -> tuple[str, str] | None:
        """The error and the traceback of the first failed request by index; None if none failed."""
        first = min(self._tracebacks, default=None)
        return None if first is None else (self._scores[first].error, self._tracebacks[first])

    def _check_failures(self) -> None:
        counted = max(self._num_completions, self._min_counted)
        max_failed = int(self._max_failed_fraction * counted + 1e-9)  # 0.29 * 100 is slightly below 29
        if len(self._tracebacks) <= max_failed:
            return
        first = min(self._tracebacks)
        outcomes = [self._scores[index].outcome for index in self._tracebacks]
        raise RewardError(
            f"{self._name} could not score {len(outcomes)} of {counted} completions, and "
            f"worker.reward.max_failed_fraction allows {max_failed} ({outcomes.count('failed')} failed, "
            f"{outcomes.count('timeout')} timed out; the others were not scored). "
            f"The first error: {self._scores[first].error}\n{self._tracebacks[first]}"
        )


@dataclass(frozen=True, slots=True)
class _EncodedRequest:
    """text: the request as JSON. group: identifies the requests that were added together.

    error: why it cannot be sent to a reward worker; "" if it can.
    """

    index: int
    text: str
    group: object
    error: str
