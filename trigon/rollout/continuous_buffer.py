"""Samples all the time, beside the steps: a max_staleness above 1.

Batches depend on time. See the drawings in buffer.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trigon.errors import LostSamplersError
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.buffer import (
    DROPPED_GROUPS,
    DROPPED_TOKENS,
    NUM_SKIPPED,
    Batch,
    Found,
    Position,
    RolloutBuffer,
    Running,
    awake,
    by_id,
    completions_of,
    describe_shortage,
    oldest_of,
)
from trigon.rollout.collect import collect_until_interrupted, nothing_sampled
from trigon.rollout.parity import Probe
from trigon.rollout.protocol import Interruption, Work
from trigon.rollout.sampling_call import SamplingCall
from trigon.rollout.statistics import (
    count_new,
    describe_carried,
    describe_groups,
    find_oldest_version,
    warn_if_rewards_are_equal,
)
from trigon.types import Phase, RolloutGroup, WeightsHandle

_NO_COUNTS: Metrics = dict.fromkeys((NUM_SKIPPED, DROPPED_GROUPS, DROPPED_TOKENS), Sum(0.0))


class ContinuousBuffer(RolloutBuffer):
    """Samples as many groups at a time as the next steps learn from."""

    _running: _Running | None = None
    _taken: Found | None = None  # by the last step that began: its groups, and what was counted until then
    _has_failed = False  # whether the engine failed for every prompt of the call before

    def next(self, step: int, weights: WeightsHandle, *, version: int) -> Batch:
        """See RolloutBuffer."""
        self._taken = None
        probes = self._sample(step, weights, version)
        groups, found = self._usable(version)[: self._plan.prompts_per_step], self._found
        self._taken = replace(found, groups=groups, unfinished=[], filtered=list(found.filtered))
        sampled = [*groups, *(group for group, _ in found.filtered)]
        if step == 1:
            warn_if_rewards_are_equal(sampled, self._report.warn)
        waiting = {"rollout/waiting_groups": Sum(float(len(found.groups) - len(groups)))}
        described = merge(_NO_COUNTS, describe_groups(sampled), waiting)
        return replace(self._take(step, groups, described, version=version), probes=probes)

    def pop_metrics(self) -> Metrics:
        """See RolloutBuffer. The engine, which may be in use, has its counts in the batch."""
        return {**self._prompts.metrics(), **self._clock.pop_metrics()}

    def pause(self) -> None:
        """See RolloutBuffer."""
        if self._running is None:
            return
        self._running.interruption.ask("stop" if self._config.worker.rollout.partial == "continue" else "drain")
        self._await(None, 0)
        if self._running.failure is None:
            self._end()

    def pause_to_save(self) -> None:
        """See RolloutBuffer. Completions that are to finish begin again."""
        if self._config.worker.rollout.partial == "continue":
            self.pause()

    def _position_before(self) -> Position:
        """See RolloutBuffer."""
        return self._position(self._taken)

    def _settle(self) -> Running | None:
        """See RolloutBuffer."""
        self._absorb()
        return self._running

    def _usable(self, version: int) -> list[RolloutGroup]:
        """Return the groups that a step with these weights may learn from, in order."""
        oldest_allowed = version - self._config.oldest_age
        usable = [group for group in self._found.groups if oldest_of(group, version) >= oldest_allowed]
        return sorted(usable, key=lambda group: oldest_of(group, version))

    def _sample(self, step: int, weights: WeightsHandle, version: int) -> list[Probe]:
        """Wait until the groups of a step can be learned from.

        Returns: probes of the new weights; an empty list if these are not sent, since completions
        that run continue with the old ones.
        """
        num_groups = self._plan.prompts_per_step
        probes: list[Probe] = []
        self._interrupt(version)
        self._await(num_groups, version)
        if self._running is not None and not self._running.call.is_done:
            return probes
        num_drawn = 0
        while True:
            self._end()
            if num_drawn and self._is_short_after(num_drawn, version):
                return probes
            new_probes, num_new = self._begin(step, weights, version)
            probes, num_drawn = probes or new_probes, num_drawn + num_new
            self._await(num_groups, version)
            if self._has(num_groups, version):
                return probes

    def _is_short_after(self, num_drawn: int, version: int) -> bool:
        """Return whether a step has drawn as many prompts as a filter allows, and note it."""
        config, found = self._config, self._found
        most = config.trainer.max_try_make_batch * config.prompts_per_round
        if not (config.algorithm.online_filtering and 0 < most <= num_drawn):
            return False
        num_found = len(self._usable(version))
        found.shortage = describe_shortage(
            num_found, self._plan.prompts_per_step, f"{num_drawn} prompts", found.metrics
        )
        return True

    def _interrupt(self, version: int) -> None:
        """End the call for new weights: now, or once its weights are old enough."""
        running, config = self._running, self._config
        if running is None:
            return
        if config.worker.rollout.partial == "continue":
            running.interruption.ask("stop")
            self._await(None, version)
        elif version - running.version >= max(1, config.algorithm.max_staleness // 2):
            running.interruption.ask("drain")  # not at each version: the last ones leave most of the engine idle

    def _await(self, num_groups: int | None, version: int) -> None:
        """Wait until the call has ended, or this many groups can be learned from."""
        if self._running is not None and not self._has(num_groups, version):
            self._wait_for(self._running.call, lambda: self._has(num_groups, version))
            self._absorb()

    def _has(self, num_groups: int | None, version: int) -> bool:
        """Return whether this many groups can be learned from, and take those that have ended."""
        self._absorb()
        return num_groups is not None and len(self._usable(version)) >= num_groups

    def _absorb(self) -> None:
        """Take the groups that have ended since the last call."""
        running, found = self._running, self._found
        while running is not None and running.ended:
            group = running.ended.popleft()
            begun = running.begun.pop(group.prompt.prompt_id)
            found.groups += self._kept([group], found)
            found.num_tokens += count_new(completions_of(group), begun)
            running.num_ended += 1

    def _end(self) -> None:
        """Take what is left of the call. Raises: its error, unless samplers were lost."""
        running, found = self._running, self._found
        if running is None:
            return
        self._absorb()
        if running.failure is not None and not isinstance(running.failure, LostSamplersError):
            raise running.failure
        self._running = None
        self._has_failed = running.has_failed
        if running.call.result is None:
            self._report.warn(f"{running.call.error}: their groups are sampled again")
            found.unfinished += running.begun.values()
            return
        for left in running.call.result.unfinished:
            found.num_tokens += count_new(left.completions, running.begun.pop(left.prompt.prompt_id))
            found.unfinished.append(left)
        found.count(NUM_SKIPPED, len(running.begun))

    def _begin(self, step: int, weights: WeightsHandle, version: int) -> tuple[list[Probe], int]:
        """Send the weights, and begin as many groups as allowed.

        A group that begins now is learned from max_staleness steps later, if groups end in the
        order in which they begin.
        Returns: probes of the weights, and the number of prompts that were drawn.
        """
        config, report, per_step, found = self._config, self._report, self._plan.prompts_per_step, self._found
        self._drop_old(version)
        steps_ahead = min(config.algorithm.max_staleness, self._plan.total_steps - step)
        most = math.ceil(per_step * (1 + steps_ahead) * (1.0 + config.worker.rollout.oversampling))
        if not config.algorithm.online_filtering:  # no more than is ever learned from
            most = min(most, per_step * (self._plan.total_steps - step + 1))
        num_new = max(0, most - len(found.groups) - len(found.unfinished))
        new = self._draw(step, num_new, self._known_ids, report.phase)
        carried = describe_carried([each for each in found.unfinished if each.completions])
        found.unfinished.sort(key=lambda each: find_oldest_version(each.completions, version))
        found.unfinished += new
        first = (found.unfinished or found.groups)[0].prompt
        with awake(self._rollout, weights, version=version, phase=report.phase), report.phase("parity"):
            # None of the groups has these weights yet, so each replica samples a few tokens.
            probes = self._parity.probe((), self._rollout, self._sampling, prompt=first, version=version)
        found.metrics = merge(found.metrics, carried, self._rollout.pop_metrics())
        work, found.unfinished = found.unfinished, []  # not earlier: a step that is left above keeps its work
        if work:
            self._begin_continuous(step, version, work)
        return probes, len(new)

    def _begin_continuous(self, step: int, version: int, work: Sequence[Work]) -> None:
        """Begin to sample work in a thread, until it is interrupted."""
        per_step = self._plan.prompts_per_step
        ended: deque[RolloutGroup] = deque()
        interruption = Interruption()

        def sample(phase: Phase) -> Found:
            with self._clock.sampling():
                unfinished = collect_until_interrupted(
                    work,
                    self._rollout,
                    self._rewards,
                    self._sampling,
                    interruption,
                    phase=phase,
                    on_scored=ended.append,
                    min_counted=per_step * self._sampling.n,
                )
            return Found(unfinished=unfinished)

        self._running = _Running(
            SamplingCall(step, sample),
            by_id(work),
            self._prompts.state(),
            version,
            interruption,
            ended,
            max_failed=0 if self._has_failed else per_step - 1,
        )


@dataclass(slots=True, eq=False)
class _Running(Running):
    """What is sampled until the next weight sync.

    begun: without the groups that were taken from ended. version: the policy version of the weights
    that sample. ended: groups that have ended and are scored. max_failed: the number of prompts
    that may fail although no other one has ended. num_ended: the number of groups that were taken
    from ended.
    """

    version: int
    interruption: Interruption
    ended: deque[RolloutGroup]
    max_failed: int
    num_ended: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed for every prompt of a call that is done and absorbed."""
        found = self.call.result
        return found is not None and not found.unfinished and not self.num_ended

    @property
    def failure(self) -> BaseException | None:
        """The error of a call that is done, also if the engine failed for too many prompts."""
        if not self.has_failed or len(self.begun) <= self.max_failed:
            return self.call.error
        return nothing_sampled(len(self.begun))
