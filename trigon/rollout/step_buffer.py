"""Samples each batch in its step, or one step ahead: a max_staleness of 0 or 1.

Batches are a function of the weights and the prompts alone. See the drawings in buffer.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from trigon.errors import EngineError, LostSamplersError, first_line
from trigon.metrics import Metrics, Sum, merge
from trigon.rollout.buffer import (
    NUM_SKIPPED,
    Batch,
    Found,
    Position,
    RolloutBuffer,
    Running,
    awake,
    by_id,
    describe_shortage,
)
from trigon.rollout.collect import Collected, collect_until, nothing_sampled
from trigon.rollout.parity import ended_in_step
from trigon.rollout.protocol import Work
from trigon.rollout.sampling_call import SamplingCall
from trigon.rollout.statistics import describe_carried, describe_groups, warn_if_rewards_are_equal
from trigon.types import Phase, RolloutGroup, WeightsHandle


class StepBuffer(RolloutBuffer):
    """Samples the groups of one step at a time."""

    _before: Position | None = None  # before the last step that began, once it is known

    def next(self, step: int, weights: WeightsHandle, *, version: int) -> Batch:
        """See RolloutBuffer. What is missing of the batch is sampled with these weights."""
        self._before = None
        config, report, per_step = self._config, self._report, self._plan.prompts_per_step
        if self._running is not None:
            self._wait_for(self._running.call)
            self._end_ahead(self._running)
        self._drop_old(version)
        self._before = self._position()
        needed = per_step - len(self._found.groups)
        sampled: list[RolloutGroup] = []
        work: Sequence[Work] = ()
        with awake(self._rollout, weights, version=version, phase=report.phase):
            if needed > 0:
                work = self._found.unfinished
                with self._clock.waiting(), self._clock.sampling():
                    found = self._sample_groups(step, needed, work, report.phase)
                self._found.unfinished = []
                if config.algorithm.max_staleness == 1:  # before the next call, which counts its own
                    found.metrics = merge(found.metrics, self._rollout.pop_metrics(), self._prompts.metrics())
                sampled = found.groups
                self._found.add(found)
            elif not self._found.metrics:  # nothing was sampled for the step: earlier ones have left enough groups
                left = [replace(each, num_carried=each.num_carried + 1) for each in self._found.unfinished]
                carried = describe_carried(left) if config.worker.rollout.oversampling > 0 else {}
                described = merge(describe_groups(self._found.groups[:per_step]), carried, {NUM_SKIPPED: Sum(0.0)})
                self._found.unfinished, self._found.metrics = left, described
            batch = self._take(step, self._found.groups[:per_step], self._count_passed(), version=version)
            learned = set(map(id, batch.groups))
            ended = ended_in_step([group for group in sampled if id(group) in learned], work)
            # A batch that was sampled ahead is older than the weights that were sent just now, so
            # that each replica samples a few tokens with them.
            with report.phase("parity") if config.algorithm.max_staleness > 0 else nullcontext():
                probes = self._parity.probe(
                    ended, self._rollout, self._sampling, prompt=batch.groups[0].prompt, version=version
                )
        if config.algorithm.max_staleness == 1 and step < self._plan.total_steps:
            self._begin_ahead(step + 1)
        return replace(batch, probes=probes)

    def pop_metrics(self) -> Metrics:
        """See RolloutBuffer. While a batch is sampled ahead, the batch has the engine's counts."""
        sampled = {**self._rollout.pop_metrics(), **self._prompts.metrics()} if self._running is None else {}
        return sampled if self._config.worker.hybrid_engine else {**sampled, **self._clock.pop_metrics()}

    def pause(self) -> None:
        """See RolloutBuffer."""
        if self._running is not None:
            self._wait_for(self._running.call)

    def state(self, *, made: bool) -> dict[str, Any]:
        """See RolloutBuffer."""
        state = super().state(made=made)
        if self._running is not None and (made or self._before is None):
            call = self._running.call
            missing = "are not sampled yet" if call.error is None else f"have failed ({first_line(call.error)})"
            self._report.warn(
                f"the checkpoint is saved without the groups of step {call.step}, which {missing}: a run that "
                "resumes from it samples them with newer weights, and has other numbers than this one"
            )
        return state

    def _position_before(self) -> Position:
        """See RolloutBuffer."""
        return self._before or self._position()

    # -- one step ahead --

    def _begin_ahead(self, step: int) -> None:
        """Begin to sample what the next step learns from, with the weights that the engine has."""
        needed = self._plan.prompts_per_step - len(self._found.groups)
        if needed <= 0:
            return
        work, self._found.unfinished = self._found.unfinished, []

        def sample(phase: Phase) -> Found:
            with self._clock.sampling():
                started = time.perf_counter()
                found = self._sample_groups(step, needed, work, phase)
                found.count("perf/sampling_seconds", time.perf_counter() - started)
            counts = merge(self._rollout.pop_metrics(), self._prompts.metrics())
            found.metrics = merge(found.metrics, counts)
            return found

        prompts = self._prompts.state()  # before the thread draws any
        self._running = Running(SamplingCall(step, sample), by_id(work), prompts)

    def _end_ahead(self, ahead: Running) -> None:
        """Take over what was sampled while the step before was made. Raises: the call's error."""
        error, step = ahead.call.error, ahead.call.step
        if error is None:
            self._settle()
            return
        if not isinstance(error, LostSamplersError):
            raise error
        self._report.warn(
            f"{error}: the groups of step {step} are sampled again, with the weights after step {step - 1}, "
            "so that this run has other numbers than one without the loss"
        )
        self._running = None
        self._prompts.load_state(ahead.prompts)
        self._found.unfinished = [*ahead.begun.values(), *self._found.unfinished]

    def _settle(self) -> Running | None:
        """See RolloutBuffer."""
        running = self._running
        if running is None:
            return None
        if running.call.result is not None:
            self._running = None
            self._found.add(running.call.result)
            return None
        return running

    # -- rounds of sampling --

    def _sample_groups(self, step: int, needed: int, work: Sequence[Work], phase: Phase) -> Found:
        """Sample work, and further prompts, until this many groups can be learned from.

        One round of sampling without a filter, which ends with fewer groups if the engine fails to
        sample some. Changes nothing of this object but the position of the prompts, so that it can
        run in a thread. Draws no more prompts than the steps that are left learn from.
        """
        config, per_step = self._config, self._plan.prompts_per_step
        filters, max_rounds = config.algorithm.online_filtering, config.trainer.max_try_make_batch
        found = Found(unfinished=list(work))
        num_carried = {each.prompt.prompt_id: each.num_carried for each in work}
        known = self._known_ids | set(num_carried)
        num_left = per_step * (self._plan.total_steps - step + 1) - len(self._found.groups)
        rounds = num_failed_last = 0  # prompts of the last rounds, in which every prompt failed
        while len(found.groups) < needed:
            if rounds and not filters and not found.unfinished:
                break  # the engine has failed to sample the others
            if filters and 0 < max_rounds <= rounds:
                break
            rounds += 1
            quota = config.prompts_per_round if filters else needed - len(found.groups)
            num_sampled = math.ceil(quota * (1.0 + config.worker.rollout.oversampling))
            if not filters:
                num_sampled = min(num_sampled, num_left - len(found.groups)) if rounds == 1 else len(found.unfinished)
            begun = [each for each in found.unfinished if each.completions or each.num_carried]
            fresh = [each for each in found.unfinished if not (each.completions or each.num_carried)]
            num_fresh = max(0, num_sampled - len(begun))
            chosen, left = [*begun, *fresh[:num_fresh]], fresh[num_fresh:]
            chosen += self._draw(step, max(0, num_sampled - len(chosen)), known, phase)
            is_last, most = step == self._plan.total_steps, config.worker.rollout.max_carried_steps
            waits_for = [each for each in chosen if is_last or each.num_carried >= most]
            collected = collect_until(
                chosen,
                self._rollout,
                self._rewards,
                self._sampling,
                num_groups=min(quota, len(chosen)),
                num_required=len(waits_for),
                phase=phase,
                may_all_fail=True,
            )
            if step == 1 and rounds == 1:
                warn_if_rewards_are_equal(collected.groups, self._report.warn)
            num_failed = self._add(collected, found, len(chosen))
            if num_failed < len(chosen):
                num_failed_last = 0
            # Few prompts may all fail, as many as a batch may not: a filter would draw without end.
            elif num_failed_last + quota >= per_step:
                raise nothing_sampled(num_failed_last + num_failed)
            else:
                num_failed_last += num_failed
            found.unfinished = [
                replace(each, num_carried=num_carried.get(each.prompt.prompt_id, 0) + 1)
                for each in collected.unfinished
            ]
            found.unfinished += left
        found.unfinished.sort(key=lambda each: -each.num_carried)
        if config.worker.rollout.oversampling > 0:
            found.metrics = merge(found.metrics, describe_carried(found.unfinished))
        if filters:
            self._end_filtering(found, needed, rounds)
        return found

    def _add(self, collected: Collected, found: Found, num_prompts: int) -> int:
        """Add what a round has sampled to what is found; return how many prompts failed.

        Raises: EngineError if nothing was sampled at all.
        """
        groups = collected.groups
        num_failed = num_prompts - len(groups) - len(collected.unfinished)
        found.num_tokens += collected.num_tokens
        found.count(NUM_SKIPPED, num_failed)
        found.metrics = merge(found.metrics, describe_groups(groups))
        found.groups += self._kept(groups, found)
        if not (groups or num_failed or collected.num_tokens):
            raise EngineError(
                f"The rollout engine completed none of {num_prompts} groups, and sampled no token. See the engine's "
                "log."
            )
        return num_failed

    def _end_filtering(self, found: Found, needed: int, rounds: int) -> None:
        """Drop what is beyond the batch, and count."""
        num_groups = self._plan.prompts_per_step
        # No more than the next step uses, so that no group becomes older than one step.
        num_used = needed + (num_groups if self._config.algorithm.filter_surplus == "keep" else 0)
        dropped = found.groups[num_used:]
        for group in dropped:
            found.filter_out(group, "surplus")
        found.groups = found.groups[:num_used]
        found.count("filter/rounds", rounds)
        found.count("filter/dropped_groups", len(dropped))
        if len(found.groups) < needed:
            num_found = num_groups - needed + len(found.groups)
            found.shortage = describe_shortage(num_found, num_groups, f"{rounds} rounds", found.metrics)

    def _count_passed(self) -> Metrics:
        """Return how many groups have passed the filter, over all calls that sampled for a step."""
        dropped = self._found.metrics.get("filter/dropped_groups")
        return {} if dropped is None else {"filter/groups": Sum(len(self._found.groups) + dropped.value)}
