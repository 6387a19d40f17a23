"""The answers of one call: which are there, which wait, which are scored, and whether too many have failed.

Knows how answers are put together into chunks, and that nothing of it may depend on when an answer comes: the answers
of a call have places, from 0, by which they are put together and put in order. Refuses to know about workers.

    the caller's thread       add(place, requests) ... result()
    the pool's thread         take_in, next_chunk, put_back, succeed, fail
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from trigon.errors import RewardError
from trigon.rewards.contract import RewardRequest, encode
from trigon.types import Score, ScoreOutcome

MAX_REQUEST_BYTES = 16 << 20
"""Longest answer, with its row, that is sent to a worker."""


class Scoring:
    """Answers that are scored while others are still to come. RewardPool.scoring() makes it, and a caller's thread
    uses add() and result(); what stands below them is the pool's.
    """

    def __init__(
        self,
        *,
        num_answers: int,
        together: int | None,
        max_failed_fraction: float,
        name: str,
        ring: Callable[[], None],
        warn_of: Callable[[Sequence[str]], None],
    ) -> None:
        """Args: num_answers: most that will come. together: answers of one list, where the function is handed lists, so
        that which answers are in one must not depend on time; None: any may be sent with any. name: of the function's
        file. ring: wakes the pool's thread. warn_of: hears of columns that cannot be handed over.
        """
        self.outcome: Future[list[Score]] = Future()
        self.is_abandoned = False
        self._ring = ring
        self._warn_of = warn_of
        self._max_failed_fraction = max_failed_fraction
        self._name = name
        self._arrivals: SimpleQueue[list[_Answer] | None] = SimpleQueue()
        # From here on the pool's thread alone.
        self._num_answers = num_answers
        self._are_all_there = False
        self._arrived: set[int] = set()
        self._texts: dict[int, str] = {}
        # A part is consecutive places, and waits to be asked once there is an answer for each.
        self._together = together
        self._part_length = together or 1
        self._unfilled: dict[int, list[_Answer]] = {}
        self._waiting: deque[list[int]] = deque()
        self._scores: dict[int, Score] = {}
        self._traces: dict[int, str] = {}

    # -- the caller's --

    def add(self, place: int, requests: Sequence[RewardRequest]) -> None:
        """Hand over the answers of consecutive places, of which `place` is the first. Each place may come once.

        Raises: RewardError if by now more than max_failed_fraction of num_answers failed.
        """
        if self.outcome.done():
            self.outcome.result()
        self._arrivals.put([self._answer(place + offset, request) for offset, request in enumerate(requests)])
        self._ring()

    def result(self) -> list[Score]:
        """Wait, and return a score for each answer that was added, in the order of their places.

        What was not added by now does not come, and does not count. Raises: as RewardPool.score.
        """
        self._arrivals.put(None)
        self._ring()
        return self.outcome.result()

    def _answer(self, place: int, request: RewardRequest) -> _Answer:
        try:
            text, left_out = encode(request)
        except RewardError as error:
            return _Answer(place, "", str(error))
        self._warn_of(left_out)
        if len(text) > MAX_REQUEST_BYTES:
            return _Answer(place, "", f"the answer and its row have {len(text)} bytes")
        return _Answer(place, text, "")

    # -- the pool's --

    def abandon(self) -> None:
        """Say that nobody waits for the result any more."""
        self.is_abandoned = True
        self._ring()

    @property
    def is_answered(self) -> bool:
        """Whether all answers are there, and scored or failed."""
        return self._are_all_there and len(self._scores) == len(self._arrived)

    def take_in(self) -> None:
        """Note what the caller has handed over meanwhile. Raises: as fail."""
        while True:
            try:
                answers = self._arrivals.get_nowait()
            except Empty:
                return
            if answers is None:
                self._close()
                continue
            for answer in answers:
                assert 0 <= answer.place < self._num_answers, f"{answer.place} of {self._num_answers}"
                assert answer.place not in self._arrived, f"{answer.place} came twice"
                self._arrived.add(answer.place)
                self._put(answer)

    def _put(self, answer: _Answer) -> None:
        first = answer.place - answer.place % self._part_length
        part = self._unfilled.setdefault(first, [])
        part.append(answer)
        if len(part) == min(self._part_length, self._num_answers - first):
            self._ask(self._unfilled.pop(first))

    def _ask(self, part: list[_Answer]) -> None:
        for answer in part:
            if answer.refusal:
                self.fail(answer.place, "failed", answer.refusal, "")
            else:
                self._texts[answer.place] = answer.text
        if places := sorted(answer.place for answer in part if not answer.refusal):
            self._waiting.append(places)

    def _close(self) -> None:
        for first in sorted(self._unfilled):  # some of whose answers do not come
            self._ask(self._unfilled.pop(first))
        self._are_all_there = True
        self._num_answers = len(self._arrived)
        self._judge()  # the same failures weigh more among fewer answers

    @property
    def num_waiting(self) -> int:
        """Answers, or lists of them where they are asked together, that wait to be asked."""
        return len(self._waiting)

    def next_chunk(self, *, at_most: int) -> list[int]:
        """Take the next answers to be asked, at most so many, and return their places; none if none wait."""
        if not self._waiting:
            return []
        if self._together is None:
            return [place for _ in range(min(at_most, len(self._waiting))) for place in self._waiting.popleft()]
        part = self._waiting.popleft()
        if len(part) > at_most:
            self._waiting.appendleft(part[at_most:])
        return part[:at_most]

    def put_back(self, places: Sequence[int], *, apart: bool) -> None:
        """Have answers asked again before all others: each alone, or as they were."""
        apart = apart or self._together is None
        self._waiting.extendleft([[place] for place in reversed(places)] if apart else [list(places)])

    def text(self, places: Sequence[int]) -> str:
        """Return answers as JSON."""
        return f"[{', '.join(self._texts[place] for place in places)}]"

    def succeed(self, place: int, parts: dict[str, float]) -> None:
        """Note the score of an answer."""
        self._scores[place] = Score(overall=parts["overall"], parts=parts, outcome="ok", error="")

    def fail(self, place: int, outcome: ScoreOutcome, error: str, trace: str) -> None:
        """Note that an answer could not be scored. Raises: RewardError if too many cannot."""
        self._scores[place] = Score(overall=0.0, parts={}, outcome=outcome, error=error)
        self._traces[place] = trace
        self._judge()

    def in_order(self) -> list[Score]:
        """Return all scores."""
        return [self._scores[place] for place in sorted(self._scores)]

    def _judge(self) -> None:
        max_failed = int(self._max_failed_fraction * self._num_answers + 1e-9)  # 0.29 * 100 is a little less than 29
        if len(self._traces) <= max_failed:
            return
        first = min(self._traces)
        outcomes = [self._scores[failed].outcome for failed in self._traces]
        raise RewardError(
            f"{self._name} could not score {len(outcomes)} of {self._num_answers} answers, and "
            f"worker.reward.max_failed_fraction allows {max_failed} ({outcomes.count('failed')} failed, "
            f"{outcomes.count('timeout')} ran out of time; the rest was not asked). "
            f"The first: {self._scores[first].error}\n{self._traces[first]}"
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    """text: as JSON. refusal: why it cannot be handed over, else empty."""

    place: int
    text: str
    refusal: str
