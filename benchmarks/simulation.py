"""A discrete-event simulation of a cluster that samples and learns: the clock, the lengths of
completions, replicas of the rollout engine, and resources that do one thing at a time.

It has no figures of its own: benchmarks/cluster.py gives it times of trigon/tools/plan, and
benchmarks/cluster_runs.py times of real runs. What the parts do, and in which order, is decided in
benchmarks/cluster_modes.py. The same seed gives the same numbers.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, exp, log
from statistics import NormalDist

Action = Callable[[], None]

_ROUNDING = 1e-6  # tokens


class Clock:
    """Calls actions at simulated times, those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Action]] = []
        self._added = 0
        self._stopped = False

    def at(self, time: float, action: Action) -> None:
        """Call an action at a time, which is not in the past."""
        assert time >= self.now, f"{time} is before {self.now}"
        heapq.heappush(self._actions, (time, self._added, action))
        self._added += 1

    def after(self, seconds: float, action: Action) -> None:
        """Call an action after this many seconds."""
        self.at(self.now + seconds, action)

    def stop(self) -> None:
        """End run after the action that is being called."""
        self._stopped = True

    def run(self) -> None:
        """Call actions until stop, or until none is left."""
        while self._actions and not self._stopped:
            self.now, _, action = heapq.heappop(self._actions)
            action()


# -- lengths --


@dataclass(frozen=True, slots=True)
class LongTail:
    """Lengths of completions: lognormal, whole tokens, at least 1, cut at a limit.

    sigma: of the logarithm; 0: all have the median.
    """

    median: float
    sigma: float
    limit: int

    @classmethod
    def with_longest(cls, median: float, *, ratio: float, of: int) -> LongTail:
        """Return lengths of which the longest of this many is about `ratio` medians: the limit."""
        return cls(median, log(ratio) / NormalDist().inv_cdf(1 - 1 / of), ceil(ratio * median))

    def draw(self, rng: random.Random) -> int:
        """Return a length."""
        return min(self.limit, max(1, round(self.median * exp(self.sigma * rng.gauss(0.0, 1.0)))))

    @property
    def mean(self) -> float:
        """The mean of the distribution, cut at the limit; without the rounding to whole tokens."""
        if self.sigma == 0:
            return min(self.median, float(self.limit))
        normal, cut = NormalDist(), log(self.limit / self.median) / self.sigma
        below = self.median * exp(self.sigma**2 / 2) * normal.cdf(cut - self.sigma)
        return below + self.limit * (1 - normal.cdf(cut))


def draw_groups(lengths: LongTail, completions: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the completions of one group after the other, without end."""
    rng = random.Random(seed)
    while True:
        yield tuple(lengths.draw(rng) for _ in range(completions))


# -- what is sampled --


@dataclass(slots=True, eq=False)
class Group:
    """The completions of a prompt. prompt: its tokens. number: in the order of prompts."""

    number: int
    prompt: int
    completions: tuple[Completion, ...] = ()
    unfinished: int = 0
    prefilled: tuple[int, int] | None = None  # the replica, and its number of loads

    @classmethod
    def of(cls, number: int, prompt: int, lengths: Sequence[int]) -> Group:
        """Return a group of which nothing is sampled."""
        group = cls(number, prompt, unfinished=len(lengths))
        group.completions = tuple(Completion(group, length) for length in lengths)
        return group

    @property
    def sampled_tokens(self) -> int:
        """The tokens of all its completions."""
        return sum(each.length for each in self.completions)

    @property
    def row_tokens(self) -> int:
        """The tokens of its packed row: the prompt once."""
        return self.prompt + self.sampled_tokens

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that sampled a part of it."""
        return min(version for each in self.completions for version, _ in each.segments)


@dataclass(slots=True, eq=False)
class Completion:
    """A completion. segments: (version of the weights, tokens that it sampled), in their order.

    sampled: tokens of all segments.
    """

    group: Group
    length: int
    segments: list[tuple[int, float]] = field(default_factory=list)
    sampled: float = 0.0
    segment_start: float = 0.0  # the replica's progress when the open segment began

    def add(self, version: int, tokens: float) -> None:
        """Add a segment."""
        self.segments.append((version, tokens))
        self.sampled += tokens


@dataclass(frozen=True, slots=True)
class SamplingTimes:
    """What one replica of the rollout engine takes.

    decode_step: seconds in which each of this many running sequences gets one token.
    max_sequences: that run at a time. prompt_seconds: prefill of one prompt, during which no
    sequence gets a token. token_seconds: likewise, of a token that another version of the weights
    or another replica had sampled.
    """

    decode_step: Callable[[int], float]
    max_sequences: int
    prompt_seconds: float = 0.0
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Linear:
    """The decoding step of an engine limited by memory: fixed + per_sequence * sequences."""

    fixed: float
    per_sequence: float

    def __call__(self, sequences: int) -> float:
        """Return its seconds."""
        return self.fixed + self.per_sequence * sequences


class Replica:
    """One replica of the rollout engine. Sequences that do not fit wait in the order of their
    submission; those that run get their tokens at the same rate.

    finished: called with each group whose last completion ends here.
    """

    def __init__(self, clock: Clock, times: SamplingTimes, finished: Callable[[Group], None], number: int = 0) -> None:
        self._clock, self._times, self._finished, self._number = clock, times, finished, number
        self._decode_step = lru_cache(maxsize=None)(times.decode_step)
        self._waiting: deque[Completion] = deque()
        self._running: list[tuple[float, int, Completion]] = []  # a heap, by the progress at the end
        self._progress = 0.0  # tokens that a sequence has got that runs since the beginning
        self._prefill = 0.0  # seconds of prefill that are left
        self._since = 0.0
        self._submitted = 0
        self._changes = 0
        self._paused = False
        self._loads = 0
        self._busy = 0.0
        self._sequence_seconds = 0.0
        self.version = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    def totals(self) -> tuple[float, float]:
        """Return the seconds in which it had something to do, and the sum of running sequences over
        them.
        """
        self._advance()
        return self._busy, self._sequence_seconds

    def submit(self, completions: Iterable[Completion]) -> None:
        """Sample these completions, or the rest of them."""
        self._advance()
        self._waiting.extend(completions)
        self._go_on()

    def pause(self) -> None:
        """Sample nothing until load."""
        self._advance()
        self._paused = True
        self._changes += 1

    def load(self, version: int) -> None:
        """Continue with new weights: what runs is prefilled again, since its cache is outdated."""
        self._advance()
        self._loads += 1
        self._prefill = 0.0
        for _, _, completion in self._running:
            self._close_segment(completion)
            self._prefill += self._prefill_of(completion)
        self.version, self._paused = version, False
        self._go_on()

    def withdraw(self) -> list[Completion]:
        """Return all completions that have not ended; they are sampled no further here."""
        self._advance()
        unfinished = [completion for _, _, completion in sorted(self._running, key=_by_submission)]
        for completion in unfinished:
            self._close_segment(completion)
        unfinished += self._waiting
        self._running, self._prefill = [], 0.0
        self._waiting.clear()
        self._changes += 1
        return unfinished

    def _advance(self) -> None:
        """Bring the progress to the present."""
        seconds = self._clock.now - self._since
        self._since = self._clock.now
        if self._paused or not self._running or seconds <= 0:
            return
        self._busy += seconds
        self._sequence_seconds += seconds * len(self._running)
        prefill = min(seconds, self._prefill)
        self._prefill -= prefill
        self._progress += (seconds - prefill) / self._decode_step(len(self._running))

    def _go_on(self) -> None:
        """Start what fits, and call _end at the end of the next completion."""
        self._changes += 1
        if self._paused:
            return
        while self._waiting and len(self._running) < self._times.max_sequences:
            completion = self._waiting.popleft()
            self._prefill += self._prefill_of(completion)
            completion.segment_start = self._progress
            finish = self._progress + completion.length - completion.sampled
            heapq.heappush(self._running, (finish, self._submitted, completion))
            self._submitted += 1
        if self._running:
            change, finish = self._changes, self._running[0][0]
            seconds = max(0.0, finish - self._progress) * self._decode_step(len(self._running))

            def end() -> None:
                if change == self._changes:  # otherwise something happened in between
                    self._end(finish)

            self._clock.after(self._prefill + seconds, end)

    def _end(self, finish: float) -> None:
        self._advance()
        self._progress = finish
        ended = []
        while self._running and self._running[0][0] <= finish + _ROUNDING:
            completion = heapq.heappop(self._running)[2]
            completion.add(self.version, completion.length - completion.sampled)
            ended.append(completion)
        self._go_on()
        for completion in ended:
            completion.group.unfinished -= 1
            if completion.group.unfinished == 0:
                self._finished(completion.group)

    def _close_segment(self, completion: Completion) -> None:
        tokens = self._progress - completion.segment_start
        if tokens > 0:
            completion.add(self.version, tokens)
        completion.segment_start = self._progress

    def _prefill_of(self, completion: Completion) -> float:
        """Return the seconds before a completion gets its next token: its prompt, if no other of
        its group has brought it, and what it has sampled before.
        """
        seconds = completion.sampled * self._times.token_seconds
        here = (self._number, self._loads)
        if completion.group.prefilled != here:
            completion.group.prefilled = here
            seconds += self._times.prompt_seconds
        return seconds


def _by_submission(running: tuple[float, int, Completion]) -> int:
    return running[1]


class Serial:
    """Does one piece of work after the other: the learners together, or the driver."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at = 0.0
        self._done = 0.0  # seconds of work that have ended
        self._begun: deque[tuple[float, float]] = deque()  # (begin, end) of the rest

    def work(self, seconds: float, then: Action) -> None:
        """Work so long, after everything else that it has to do, and then call an action."""
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + seconds
        self._begun.append((begin, self._free_at))
        self._clock.at(self._free_at, then)

    def total(self) -> float:
        """Return the seconds of work until now."""
        now = self._clock.now
        while self._begun and self._begun[0][1] <= now:
            begin, end = self._begun.popleft()
            self._done += end - begin
        return self._done + sum(max(0.0, now - begin) for begin, _ in self._begun)
