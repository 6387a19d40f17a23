"""The state of one scoring: its requests, their scores, and whether too many of them have failed.

Requests may be added in any order and at any time. They are indexed from 0, and neither which
completions are scored in one call nor the order of scores depends on when a request is added. Does
not depend on reward workers.

    the caller's thread       add(first_index, requests) ... result()
    the pool's thread         process_added, next_call, requeue, succeed, fail
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from trigon.errors import BadRow, DataError, RewardError
from trigon.rewards.contract import RequestFiles, RewardRequest, encode_request
from trigon.system.files import replace_file
from trigon.system.temporary import private_folder
from trigon.types import EncodedMedia, ReadMedia, Score, ScoreOutcome

MAX_REQUEST_BYTES = 16 << 20
"""Maximum size of an encoded request, including the row of its prompt."""

_PROGRESS_SECONDS = 0.2
"""Interval at which result() reports progress."""


@dataclass(slots=True)
class Call:
    """Completions that the reward function scores in one call.

    indices: indices in order. error: why they are scored again; "" if the reason is not known, or
    if they are not scored again.
    is_alone: whether their worker may have no other call at the same time. is_second: whether a
    worker that had them was killed from outside. deadline: when their worker must have replied.
    """

    indices: list[int]
    error: str = ""
    is_alone: bool = False
    is_second: bool = False
    deadline: float = math.inf

    def explain(self, error: str) -> str:
        """Return an error of the call, with why its completions were scored again."""
        return f"{self.error}; scored again alone: {error}" if self.error else error


class Scoring:
    """Scores completions while others are still being sampled; made by RewardPool.scoring().

    The caller uses add() and result(). All other methods are for the pool.
    """

    def __init__(
        self,
        *,
        num_completions: int,
        call_size: int | None,
        max_failed_fraction: float,
        name: str,
        wake_pool: Callable[[], None],
        warn_omitted: Callable[[Sequence[str]], None],
        media: MediaFolder | None = None,
        num_separate: int = 0,
        min_counted: int = 0,
    ) -> None:
        """Make an empty scoring.

        Args: num_completions: the maximum that will be added. call_size: how many consecutive
        indices are scored in one call; None: completions that are added together, for the group
        contract.
        name: the name of the reward function, for errors. wake_pool: wakes the pool's thread.
        warn_omitted: called with the columns that JSON cannot represent. media: where images and
        videos are written; None if the function does not look at them. num_separate: the maximum
        number of further completions, whose indices follow; each of them is a call by itself.
        min_counted: the number to which max_failed_fraction is relative, if fewer are added.
        """
        self.outcome: Future[list[Score]] = Future()
        self.is_cancelled = False
        self._wake_pool = wake_pool
        self._warn_omitted = warn_omitted
        self._media = media
        self._max_failed_fraction = max_failed_fraction
        self._name = name
        # A request with its index, for each of a group; None: nothing more will be added.
        self._added: SimpleQueue[list[tuple[int, RewardRequest]] | None] = SimpleQueue()
        # The fields below are only used by the pool's thread.
        self._first_separate = num_completions
        self._num_completions = num_completions + num_separate
        self._min_counted = min_counted
        self._is_closed = False
        self._requests: dict[int, _EncodedRequest] = {}
        self._call_size = call_size
        self._incomplete: dict[int, list[_EncodedRequest]] = {}  # calls by first index
        self._queue: deque[Call] = deque()
        self._scores: dict[int, Score] = {}
        self._tracebacks: dict[int, str] = {}  # of failed requests
        self._seconds: dict[int, float] = {}
        self.wrong_length = ""  # the first error of a call that returned another number of scores

    # -- for the caller --

    def add(self, first_index: int, requests: Sequence[RewardRequest]) -> None:
        """Add the requests of a group, with consecutive indices from first_index.

        Each index may be added once.

        Raises: RewardError if more than max_failed_fraction of num_completions have failed so far.
        """
        if self.outcome.done():
            self.outcome.result()
        self._added.put(list(enumerate(requests, start=first_index)))
        self._wake_pool()

    def result(self, *, on_progress: Callable[[int | None], object] | None = None) -> list[Score]:
        """Wait, and return the score of each request that was added, in the order of their indices.

        Nothing can be added afterwards. The allowed number of failures is relative to the requests
        that were added.
        on_progress: called several times a second while nothing else happens, with the number of
        requests scored since the last call, None for none; it may raise.
        Raises: as RewardPool.score.
        """
        self._added.put(None)
        self._wake_pool()
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

        To be called after result(). The reward worker, which runs the user's code, reports the
        times. A request that timed out has the time limit, and a request whose worker exited has 0.
        """
        return [self._seconds.get(index, 0.0) for index in sorted(self._scores)]

    # -- for the pool --

    def cancel(self) -> None:
        """Stop scoring; result() will not be called."""
        self.is_cancelled = True
        self._wake_pool()

    @property
    def is_complete(self) -> bool:
        """Whether all requests have been added, and each is scored or failed."""
        return self._is_closed and len(self._scores) == len(self._requests)

    def process_added(self) -> None:
        """Queue the requests that the caller has added since the last call. Raises: as fail."""
        while not self.is_cancelled:
            try:
                added = self._added.get_nowait()
            except Empty:
                return
            if added is None:
                self._close()
                continue
            requests = self._encode(added)
            for request in requests:
                index = request.index
                assert 0 <= index < self._num_completions, f"index {index} of {self._num_completions}"
                assert index not in self._requests, f"index {index} was added twice"
                self._requests[index] = request
                if self._call_size is not None:
                    self._add_to_call(request, self._call_size)
            if self._call_size is None:  # all of a group fail if one of its requests cannot be sent
                error = next((request.error for request in requests if request.error), "")
                self._enqueue([replace(request, error=error) for request in requests])
            if self._media is not None:  # files take time: the workers begin with these
                self._wake_pool()
                return

    def _encode(self, added: Sequence[tuple[int, RewardRequest]]) -> list[_EncodedRequest]:
        """Return the requests of a group as text, and write their media."""
        group, encoded = object(), []
        try:
            files = None if self._media is None else self._media.write([request for _, request in added])
        except RewardError as error:
            return [_EncodedRequest(index, "", group, str(error)) for index, _ in added]
        for number, (index, request) in enumerate(added):
            text, problem = "", ""
            try:
                text, omitted = encode_request(request, None if files is None else files[number])
                self._warn_omitted(omitted)
                if len(text) > MAX_REQUEST_BYTES:
                    problem = f"the completion and its row have {len(text)} bytes"
            except RewardError as error:
                problem = str(error)
            encoded.append(_EncodedRequest(index, text, group, problem))
        return encoded

    def _add_to_call(self, request: _EncodedRequest, call_size: int) -> None:
        if request.index >= self._first_separate:
            self._enqueue([request])
            return
        first_index = request.index - request.index % call_size
        call = self._incomplete.setdefault(first_index, [])
        call.append(request)
        if len(call) == min(call_size, self._first_separate - first_index):
            self._enqueue(self._incomplete.pop(first_index))

    def _enqueue(self, requests: Sequence[_EncodedRequest]) -> None:
        for request in requests:
            if request.error:
                self.fail([request.index], "failed", request.error, "")
        if indices := sorted(request.index for request in requests if not request.error):
            self._queue.append(Call(indices))

    def _close(self) -> None:
        for first_index in sorted(self._incomplete):  # completions of these could not be sampled
            self._enqueue(self._incomplete.pop(first_index))
        self._is_closed = True
        self._num_completions = len(self._requests)
        self._check_failures()  # the number of failures that is allowed may have decreased

    @property
    def num_queued(self) -> int:
        """The number of queued calls."""
        return len(self._queue)

    def next_call(self, *, max_size: int) -> Call:
        """Remove the next of the queued calls; a longer one than max_size is split before."""
        call = self._queue.popleft()
        if len(call.indices) > max_size:
            self._queue.appendleft(replace(call, indices=call.indices[max_size:]))
            call.indices = call.indices[:max_size]
        return call

    def requeue(self, calls: Sequence[Call]) -> None:
        """Put calls back at the front of the queue, in this order."""
        self._queue.extendleft(reversed(calls))

    def encode_requests(self, indices: Sequence[int]) -> str:
        """Return requests as a JSON list."""
        return f"[{', '.join(self._requests[index].text for index in indices)}]"

    def group_of(self, index: int) -> object:
        """Return an object that identifies the group of a request."""
        return self._requests[index].group

    def set_seconds(self, indices: Sequence[int], seconds: float) -> None:
        """Store how long each of these requests took. Raises: ValueError if that is impossible."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a request took {seconds} seconds")
        self._seconds.update(dict.fromkeys(indices, seconds))

    def succeed(self, index: int, scores: dict[str, float]) -> None:
        """Store the scores of a request."""
        self._scores[index] = Score(overall=scores["overall"], parts=scores, outcome="ok", error="")

    def fail(self, indices: Sequence[int], outcome: ScoreOutcome, error: str, traceback: str) -> None:
        """Store the failure of requests. Raises: RewardError if too many have failed."""
        for index in indices:
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
            f"The first error: {self._scores[first].error}\n{self._tracebacks[first]}".rstrip()
        )


@dataclass(frozen=True, slots=True)
class _EncodedRequest:
    """A request as it is sent.

    text: the request as JSON. group: identifies the requests that were added together. error: why
    it cannot be sent to a reward worker; "" if it can.
    """

    index: int
    text: str
    group: object
    error: str


class MediaFolder:
    """A private folder with images and videos as files that reward workers can read.

    They are the media of prompts, and the images that the turns of an episode observed. The thread
    of the reward pool writes them, so that the caller, which samples, waits for no file. The folder
    holds the files of one scoring, by hash, so that a file that several prompts or completions
    share is there once. Its methods may be used by one thread at a time.
    """

    def __init__(self) -> None:
        """Make the folder."""
        self._stack = ExitStack()
        self.path: Path = self._stack.enter_context(private_folder())

    def write(self, requests: Sequence[RewardRequest]) -> list[RequestFiles]:
        """Write the media of requests, and return the paths for each; media are read once each.

        Raises: RewardError if some cannot be read or written.
        """
        written: dict[int, RequestFiles] = {}  # by the identity of what gives the media

        def write(given: EncodedMedia | ReadMedia | None, owner: str) -> RequestFiles:
            if id(given) not in written:
                try:
                    media = given() if callable(given) else given
                    written[id(given)] = RequestFiles() if media is None else self._write(media)
                except (BadRow, DataError, OSError) as error:
                    raise RewardError(f"the images of {owner} cannot be read: {error}") from error
            return written[id(given)]

        return [
            replace(
                write(request.media, "the prompt"),
                turns=[
                    write(each, "an observation").images for each in request.turn_media or [None] * len(request.turns)
                ],
            )
            for request in requests
        ]

    def clear(self) -> None:
        """Remove the files."""
        for path in self.path.glob("media-*"):
            path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        self._stack.close()

    def _write(self, media: EncodedMedia) -> RequestFiles:
        paths = []
        for file in media.encoded:
            # The hashes of media are not used: they name what engines see.
            path = self.path / f"media-{hashlib.sha256(file).hexdigest()}"
            if not path.exists():
                replace_file(path, file, sync=False)  # a full disk leaves no part of a file
            paths.append(str(path))
        return RequestFiles(images=paths) if media.kind == "image" else RequestFiles(videos=paths)
