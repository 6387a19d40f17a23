"""Samples all the time, up to max_staleness steps ahead; a step learns from what has ended.

The samplers always have as many groups as the steps up to max_staleness ahead learn from: those
that wait for their step, those that are sampled, and new ones. A step learns from the groups that
began first of those that have ended. Which ones have depends on time, so that two runs differ.

    partial: continue    | v0 ........ | v1 ........ | v2 ...   interrupted at each weight sync,
                           =====.   ========#########.          and goes on with the new weights
    partial: finish      | v0 ........ : ...... | v2 ........   from ":" on nothing begins; the
                           =====.   ===============.            sync waits until all have ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from trigon.batch import Batch, surplus_state, warn_if_rewards_are_equal, with_unique_id
from trigon.batch_source import POLL_SECONDS, awake, training_prompts
from trigon.carried import (
    CarriedGroup,
    carried_state,
    count_sampled,
    describe_carried,
    describe_staleness,
    find_oldest_version,
)
from trigon.errors import EngineError, LostSamplersError
from trigon.metrics import Metrics, Sum, merge
from trigon.parity import Probe
from trigon.pool_clock import PoolClock
from trigon.rollout.collect import collect_as_they_end
from trigon.rollout.protocol import Interruption, Until
from trigon.rollout.statistics import describe_groups
from trigon.run import Run, StreamedGroups
from trigon.sampling_thread import SamplingThread
from trigon.types import Completion, Prompt, RolloutGroup

_FAILED, _DROPPED_GROUPS, _DROPPED_TOKENS = (
    "rollout/num_set_aside",
    "staleness/dropped_groups",
    "staleness/dropped_tokens",
)
_NO_COUNTS: Metrics = dict.fromkeys((_FAILED, _DROPPED_GROUPS, _DROPPED_TOKENS), Sum(0.0))


class StreamSource:
    """Samples continuously beside the steps. Implements BatchSource.

    Each group that is drawn, and that no step has learned from, is in one of three places: _ready,
    ended and scored; _carried, to be sampled, perhaps begun; the flight. _begin bounds how many.
    """

    def __init__(self, run: Run, streamed: StreamedGroups | None) -> None:
        """Begin at the position of the run's prompts. streamed: what a checkpoint has left."""
        self._run = run
        self._clock = PoolClock()
        self._ready = [] if streamed is None else list(streamed.ready)
        self._carried = [] if streamed is None else list(streamed.carried)
        self._taken: list[RolloutGroup] = []  # by the last step that began
        self._flight: _Flight | None = None
        self._has_failed = False  # every prompt of the last flight
        self._staleness: Metrics = {}
        self._counts: Metrics = {}  # of the engine and of what was left, since the last pop_metrics
        self._num_tokens = 0  # sampled since the last batch

    def next(
        self, step: int, *, kept: Sequence[RolloutGroup], carried: Sequence[CarriedGroup] = ()
    ) -> tuple[Batch, list[Probe]]:
        """See BatchSource. No probes if the weights are not sent, since completions run on."""
        assert [*kept, *carried] == [], "what is sampled ahead is kept here"
        run, num_groups = self._run, self._run.plan.prompts_per_step
        version = run.policy_version(step - 1)
        self._taken = []
        probes: list[Probe] = []
        self._interrupt(version)
        self._await(num_groups, version)
        if self._flight is None or self._flight.is_done:
            while True:
                self._end_flight()
                probes = self._begin(step, version)
                self._await(num_groups, version)
                if self._has(num_groups, version):
                    break
        batch = self._take(num_groups, version)
        if step == 1:
            warn_if_rewards_are_equal(batch.groups, run.report.warn)
        self._staleness = describe_staleness(batch.groups, version=version)
        return batch, probes

    def pop_metrics(self) -> Metrics:
        """See BatchSource. Counts of the rollout engine are those up to the last weight sync."""
        counts, self._counts = merge(_NO_COUNTS, self._counts), {}
        return {**counts, **training_prompts(self._run).metrics(), **self._staleness, **self._clock.pop_metrics()}

    def wait(self) -> None:
        """See BatchSource. What has not ended goes on in the next step; next() raises errors."""
        if self._flight is not None:
            self._flight.interruption.ask("stop" if self._run.partial == "continue" else "drain")
            self._await(None, 0)
            if self._flight.failure is None:
                self._end_flight()

    def wait_to_save(self) -> None:
        """See BatchSource. Completions that are to finish are not waited for: they begin again."""
        if self._run.partial == "continue":
            self.wait()

    def state_before(self) -> dict[str, Any]:
        """See BatchSource."""
        return self._state(self._taken)

    def state_after(self) -> dict[str, Any]:
        """See BatchSource. What is sampled now is in it as it was when the flight began."""
        return self._state([])

    def close(self) -> None:
        """Give up what is sampled."""
        if self._flight is not None:
            self._flight.interruption.ask("stop")
            self._flight.give_up()

    # -- groups --

    def _usable(self, version: int) -> list[RolloutGroup]:
        """Return the groups that a step with these weights may learn from, oldest first."""
        oldest_allowed = version - self._run.max_staleness
        usable = [group for group in self._ready if _oldest_of(group, version) >= oldest_allowed]
        return sorted(usable, key=lambda group: _oldest_of(group, version))

    def _take(self, num_groups: int, version: int) -> Batch:
        """Return a batch of the groups that are ready, and remember it until the next step."""
        groups = self._taken = self._usable(version)[:num_groups]
        names = {group.prompt.prompt_id for group in groups}
        self._ready = [group for group in self._ready if group.prompt.prompt_id not in names]
        num_tokens, self._num_tokens = self._num_tokens, 0
        metrics = merge(describe_groups(groups), {"rollout/waiting_groups": Sum(float(len(self._ready)))})
        return Batch(groups, [], metrics, num_tokens, None)

    def _drop_old(self, version: int) -> None:
        """Begin groups again that have become older than max_staleness, and count them."""
        oldest_allowed = version - self._run.max_staleness
        old_ready = [group for group in self._ready if _oldest_of(group, version) < oldest_allowed]
        old_begun = [
            group for group in self._carried if find_oldest_version(group.completions, version) < oldest_allowed
        ]
        old = [group.prompt for group in old_ready] + [group.prompt for group in old_begun]
        names = {prompt.prompt_id for prompt in old}
        self._ready = [group for group in self._ready if group.prompt.prompt_id not in names]
        self._carried = [group for group in self._carried if group.prompt.prompt_id not in names]
        self._carried += [CarriedGroup(prompt, (), 0) for prompt in old]
        dropped = [rollout.completion for group in old_ready for rollout in group.rollouts]
        dropped += [completion for group in old_begun for completion in group.completions]
        self._count(_DROPPED_GROUPS, len(names))
        self._count(_DROPPED_TOKENS, count_sampled(dropped))

    def _count(self, name: str, number: int) -> None:
        self._counts = merge(self._counts, {name: Sum(float(number))})

    def _state(self, taken: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the entries of a checkpoint. taken: groups of a step that is made again."""
        self._absorb()
        begun = [] if self._flight is None else list(self._flight.begun.values())
        return {
            "prompts": training_prompts(self._run).state(),
            "streamed": {
                "ready": surplus_state([*taken, *self._ready]),
                "carried": carried_state([*begun, *self._carried]),
            },
        }

    # -- the flight --

    def _interrupt(self, version: int) -> None:
        """Let the flight end for new weights: now, or once its weights are old enough."""
        flight, run = self._flight, self._run
        if flight is None:
            return
        if run.partial == "continue":
            flight.interruption.ask("stop")
            self._await(None, version)
        elif version - flight.version >= max(1, run.max_staleness // 2):
            flight.interruption.ask("drain")  # not at each version: the last ones leave most of the engine idle

    def _await(self, num_groups: int | None, version: int) -> None:
        """Wait until the flight has ended, or so many groups can be learned from."""
        flight = self._flight
        if flight is None or self._has(num_groups, version) or flight.is_done:
            return
        with self._clock.waiting(), self._run.report.phase("wait") as advance:
            while not flight.wait(POLL_SECONDS):
                if self._has(num_groups, version):
                    return
                advance(0 if flight.pop_progress() else None)
        self._absorb()

    def _has(self, num_groups: int | None, version: int) -> bool:
        """Return whether so many groups can be learned from, and take those that have ended."""
        self._absorb()
        return num_groups is not None and len(self._usable(version)) >= num_groups

    def _absorb(self) -> None:
        """Take the groups that have ended since the last call."""
        flight = self._flight
        while flight is not None and flight.ended:
            group = flight.ended.popleft()
            begun = flight.begun.pop(group.prompt.prompt_id)
            self._ready.append(group)
            sampled = count_sampled(rollout.completion for rollout in group.rollouts)
            self._num_tokens += sampled - count_sampled(begun.completions)
            flight.num_ended += 1

    def _end_flight(self) -> None:
        """Take what is left of a flight. Raises: its error, unless samplers were lost."""
        flight = self._flight
        if flight is None:
            return
        self._absorb()
        if flight.failure is not None and not isinstance(flight.failure, LostSamplersError):
            raise flight.failure
        self._flight = None
        self._has_failed = flight.has_failed
        unfinished = flight.result
        if unfinished is None:
            self._run.report.warn(f"{flight.error}: their groups are sampled again")
            self._carried += flight.begun.values()
            return
        for prompt, completions in unfinished:
            begun = flight.begun.pop(prompt.prompt_id)
            self._num_tokens += count_sampled(completions) - count_sampled(begun.completions)
            kept = completions if any(each.token_ids for each in completions) else ()
            self._carried.append(CarriedGroup(prompt, kept, 0))
        self._count(_FAILED, len(flight.begun))

    def _begin(self, step: int, version: int) -> list[Probe]:
        """Send the weights, and begin as many groups as allowed; return probes of the weights.

        A group that begins now is learned from max_staleness steps later, if groups end in the
        order in which they begin.
        """
        run, prompts = self._run, training_prompts(self._run)
        self._drop_old(version)
        steps_ahead = min(run.max_staleness, run.plan.total_steps - step)
        num_outstanding = len(self._ready) + len(self._carried)
        num_new = max(0, run.plan.prompts_per_step * (1 + steps_ahead) - num_outstanding)
        names = {group.prompt.prompt_id for group in self._ready}
        names |= {group.prompt.prompt_id for group in self._carried}
        with run.report.phase("data"):
            new = [with_unique_id(prompt, names) for prompt in prompts.take(num_new)]
        self._counts = merge(self._counts, describe_carried([group for group in self._carried if group.completions]))
        self._carried.sort(key=lambda group: find_oldest_version(group.completions, version))
        self._carried += [CarriedGroup(prompt, (), 0) for prompt in new]
        first = self._carried[0].prompt if self._carried else self._ready[0].prompt
        with awake(run, version=version), run.report.phase("parity"):
            # None of the groups has these weights yet, so each replica samples a few tokens.
            probes = run.parity.probe((), run.rollout, run.sampling, prompt=first, step=step, version=version)
        self._counts = merge(self._counts, run.rollout.pop_metrics())
        if self._carried:
            carried, self._carried = self._carried, []
            max_failed = 0 if self._has_failed else run.plan.prompts_per_step - 1
            self._flight = _Flight(run, step, version, carried, self._clock, max_failed=max_failed)
        return probes


class _Flight(SamplingThread[list[tuple[Prompt, tuple[Completion, ...]]]]):
    """What is sampled between two weight syncs, in a thread. Its result is what has not ended.

    version: of the weights. begun: what it began with, by the prompt's id, less what was taken from
    ended: groups that have ended and are scored. num_ended: how many were taken.
    max_failed: so many prompts may fail although no other one has ended.
    """

    def __init__(
        self,
        run: Run,
        step: int,
        version: int,
        groups: Sequence[CarriedGroup],
        clock: PoolClock,
        *,
        max_failed: int,
    ) -> None:
        super().__init__(run, step)
        self.version = version
        self.max_failed = max_failed
        self.begun = {group.prompt.prompt_id: group for group in groups}
        self.ended: deque[RolloutGroup] = deque()
        self.num_ended = 0
        self.interruption = Interruption()
        self._run = run
        self._clock = clock
        self._groups = groups
        self.start(self._sample)

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed for every prompt of a flight that is done and absorbed."""
        return self.error is None and not self.result and not self.num_ended

    @property
    def failure(self) -> BaseException | None:
        """The error of a flight that is done, also if the engine failed for too many prompts."""
        if not self.has_failed or len(self.begun) <= self.max_failed:
            return self.error
        return EngineError(
            f"The rollout engine failed to sample any of {len(self.begun)} prompts, twice each. See the engine's log."
        )

    def _sample(self) -> list[tuple[Prompt, tuple[Completion, ...]]]:
        run, groups = self._run, self._groups
        until = Until(len(groups), 0, tuple(group.completions for group in groups), self.interruption)
        with self._clock.sampling():
            return collect_as_they_end(
                [group.prompt for group in groups],
                run.rollout,
                run.rewards,
                run.sampling,
                until,
                step=self.step,
                phase=self.report.phase,
                on_scored=self.ended.append,
                min_counted=run.plan.prompts_per_step * run.sampling.n,
            )


def _oldest_of(group: RolloutGroup, version: int) -> int:
    """Return the version of the oldest token of a group; version: of the newest weights."""
    return find_oldest_version([rollout.completion for rollout in group.rollouts], version)
