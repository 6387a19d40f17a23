"""Decides what is sampled, when, and with which weights: the sampling half of a training step.

    prompts --sampled--> ready --taken--> a step
                ^   |
                '-- unfinished   stopped by a weight sync, or by the end of an oversampled step

A group that is drawn, and that no step has learned from, is ready (sampled and scored), unfinished
(to be sampled, perhaps begun), or in the call that samples now. Their number never exceeds
groups per step x (1 + max_staleness) x (1 + oversampling). With version v the weights after v
steps, max_staleness decides when what is sampled:

    0         | sample 1 | learn 1 | sample 2 | learn 2 | sample 3 | ...     with v0, v1, v2
    1         | sample 1 | learn 1             | learn 2             | ...
                         | sample 2 (with v0)  | sample 3 (with v1)  | ...
    above 1   sampled all the time; a step learns from the groups that began first of those that
              have ended, and no token is older than max_staleness steps when it is learned from:
      continue  | v0 ........ | v1 ........ | v2 ...   interrupted at each weight sync, and
                  #####. #######==========.            continued with the new weights
      finish    | v0 ........ : ...... | v2 ........   from ":" on nothing begins, and the sync
                  #####. #############.                waits until all completions have ended

In the last drawing "|" is a weight sync, followed by the version that it sends. The line below it
shows two completions: "#" are tokens sampled with version 0, "=" tokens sampled with version 1, and
"." is the end of a completion.

With 0 and 1, batches are a function of the weights and the prompts alone, so that a run that
resumes has the same ones. Above 1 they depend on time. Oversampling and online filtering are
settings of all of these. Does not know which engine samples, or where.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.stream import PromptStream, with_repeat_id
from trigon.errors import DataError, EngineError, LostSamplersError, first_line
from trigon.metrics import Metrics, Sum, merge
from trigon.rewards.pool import RewardPool
from trigon.rollout.collect import collect_until, collect_until_interrupted, nothing_sampled
from trigon.rollout.filtering import label_groups
from trigon.rollout.parity import ParityCheck, Probe, ended_in_step
from trigon.rollout.protocol import Interruption, RolloutEngine, Work
from trigon.rollout.sampling_call import PoolClock, SamplingCall
from trigon.rollout.saved import groups_state, load_groups, load_metrics, load_work, metrics_state, work_state
from trigon.rollout.statistics import (
    count_new,
    count_sampled,
    describe_carried,
    describe_groups,
    describe_staleness,
    find_oldest_version,
    warn_if_rewards_are_equal,
)
from trigon.types import Completion, Phase, Prompt, RolloutGroup, SamplingParams, WeightsHandle

POLL_SECONDS = 0.1
"""How often the loop looks for progress while it waits for groups."""

Reason = Literal["low", "high", "unscored", "surplus"]
"""Why no step learns from a group: see GroupClass; surplus: there were more than a step needs."""

FilteredGroup = tuple[RolloutGroup, Reason]

_FAILED = "rollout/num_skipped"
_DROPPED_GROUPS, _DROPPED_TOKENS = "staleness/dropped_groups", "staleness/dropped_tokens"


class BufferReport(Protocol):
    """What a buffer reports to. Reporter satisfies it."""

    @property
    def phase(self) -> Phase: ...

    def warn(self, text: str) -> None: ...

    def filtered(
        self, step: int, groups: Sequence[FilteredGroup], *, read_images: Callable[[str], Sequence[bytes]]
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups that a step learns from.

    probes: completions for the parity check of the step's weights; none if these were not sent.
    metrics: over everything that was sampled for the step, filtered out or not; above a
    max_staleness of 1, over what it learns from, and what was filtered out meanwhile.
    num_sampled_tokens: sampled since the last batch, filtered out or not.
    """

    groups: list[RolloutGroup]
    probes: list[Probe]
    metrics: Metrics
    num_sampled_tokens: int


@dataclass(slots=True, eq=False)
class _Found:
    """What was sampled since the last batch.

    groups: the groups that are ready, in the order in which steps learn from them. filtered: the
    groups that were filtered out, without their images. shortage: why there are fewer groups than
    were requested; "" if there are enough.
    """

    groups: list[RolloutGroup] = field(default_factory=list)
    unfinished: list[Work] = field(default_factory=list)
    filtered: list[FilteredGroup] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    num_tokens: int = 0
    shortage: str = ""

    def count(self, name: str, number: float) -> None:
        self.metrics = merge(self.metrics, {name: Sum(float(number))})

    def filter_out(self, group: RolloutGroup, label: Reason) -> None:
        # The images would stay in memory until the step is recorded.
        self.filtered.append((replace(group, prompt=replace(group.prompt, vision=None)), label))


@dataclass(frozen=True, slots=True, eq=False)
class _Position:
    """What a checkpoint is made of. prompts: the state of the prompt stream."""

    prompts: Mapping[str, Any]
    ready: tuple[RolloutGroup, ...]
    work: tuple[Work, ...]
    found: _Found


class RolloutBuffer:
    """Gives each step a batch of scored groups."""

    def __init__(
        self,
        prompts: PromptStream,
        rollout: RolloutEngine,
        rewards: RewardPool,
        sampling: SamplingParams,
        config: Config,
        plan: Plan,
        report: BufferReport,
        parity: ParityCheck,
    ) -> None:
        """Begin at the position of the prompts."""
        self._prompts, self._rollout, self._rewards = prompts, rollout, rewards
        self._sampling, self._config, self._plan = sampling, config, plan
        self._report, self._parity = report, parity
        self._clock = PoolClock()
        self._ready: list[RolloutGroup] = []
        self._unfinished: list[Work] = []
        self._taken: list[RolloutGroup] = []  # by the last step that began
        self._found = _Found()  # without groups and unfinished work, which are in the lists above
        self._found_by_taken = _Found()  # what was sampled for the step that has taken those groups
        self._running: _Running | None = None
        self._has_failed = False  # whether every prompt of the call before failed, if prompts are sampled all the time
        self._before: _Position | None = None  # the state before the last step that began, once it is known
        self._staleness: Metrics = {}

    # -- steps --

    def next(self, step: int, weights: WeightsHandle, *, version: int) -> Batch:
        """Return the groups of a step, oldest first.

        There are fewer than plan.prompts_per_step only if online filtering found no more groups in
        its rounds, or if the engine failed to sample the others.
        weights: the newest weights, whose policy version is version.
        Raises: what sampling and scoring raise, and what the report's phases raise; DataError if
        online filtering has found no group.
        """
        self._taken, self._found_by_taken, self._before = [], _Found(), None
        if self._config.algorithm.samples_continuously:
            probes = self._sample_continuously(step, weights, version)
            batch = self._take(step, version, probes)
        else:
            batch = self._sample_for_step(step, weights, version)
            if self._config.algorithm.max_staleness == 1 and step < self._plan.total_steps:
                self._begin_ahead(step + 1, version)
        self._staleness = describe_staleness(batch.groups, version=version)
        return batch

    def pop_metrics(self) -> Metrics:
        """Return what was counted since the last call, and is not in the metrics of a batch."""
        config = self._config
        has_pools = not config.worker.hybrid_engine
        metrics: dict[str, Any] = {}
        continuous = config.algorithm.samples_continuously
        if not continuous and self._running is None:  # else the engine is in use, and the batch has its counts
            metrics |= self._rollout.pop_metrics()
        if continuous or self._running is None:  # else the prompts are in use as well
            metrics |= self._prompts.metrics()
        if has_pools or config.worker.rollout.oversampling > 0:
            metrics |= self._staleness
        return {**metrics, **self._clock.pop_metrics()} if has_pools else metrics

    def pause(self) -> None:
        """Wait until nothing is sampled any more, for a validation. next() raises errors."""
        if self._running is None:
            return
        if not self._config.algorithm.samples_continuously:
            self._wait_for(self._running.call)
            return
        self._running.interruption.ask("stop" if self._config.worker.rollout.partial == "continue" else "drain")
        self._await(None, 0)
        if self._running.failure is None:
            self._end_continuous()

    def pause_to_save(self) -> None:
        """Wait until a checkpoint loses nothing, where that does not take long.

        Completions that are to finish are not waited for: they begin again.
        """
        if not self._config.algorithm.samples_continuously or self._config.worker.rollout.partial == "continue":
            self.pause()

    def close(self) -> None:
        """Give up what is sampled."""
        if self._running is not None:
            self._running.interruption.ask("stop")
            self._running.call.give_up()

    def image_files(self, prompt_id: str) -> list[bytes]:
        """Return the images of a prompt that was sampled, see PromptStream.image_files."""
        return self._prompts.image_files(prompt_id)

    # -- checkpoints --

    def state(self, *, made: bool) -> dict[str, Any]:
        """Return the entries of a checkpoint. Read by load_state.

        made: whether the step that began last was made. If not, the entries are from before that
        step, or contain its groups, so that the run that resumes from them makes the step again.
        """
        if made:
            position = self._position([], _Found())
        else:
            position = self._before or self._position(self._taken, self._found_by_taken)
        return {
            "prompts": position.prompts,
            "buffer": {
                "ready": groups_state(position.ready),
                "work": work_state(position.work),
                "filtered": groups_state([group for group, _ in position.found.filtered]),
                "reasons": [reason for _, reason in position.found.filtered],
                "metrics": metrics_state(position.found.metrics),
                "num_tokens": position.found.num_tokens,
            },
        }

    def load_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Continue from what state() has returned.

        version: the policy version of the checkpoint's weights. Groups that this run cannot use as
        they are, are sampled again, with a warning; groups of other data are dropped.
        Raises: as PromptStream.load_state and PromptStream.rebuild.
        """
        sampling, warn, buffer = self._sampling, self._report.warn, state["buffer"]
        self._prompts.load_state(state["prompts"])
        num_saved = len(buffer["ready"]) + len(buffer["work"])
        if num_saved and not self._prompts.continues(state["prompts"]):
            warn(f"{num_saved} groups that the saved run had sampled are dropped: their prompts are of other data")
            return
        with_baseline = sampling.with_baseline
        self._ready, again = load_groups(
            buffer["ready"], self._prompts, n=sampling.n, with_baseline=with_baseline, warn=warn
        )
        self._unfinished = again + load_work(
            buffer["work"],
            self._prompts,
            num_completions=sampling.num_completions,
            max_tokens=sampling.max_tokens,
            warn=warn,
        )
        found = self._found = _Found(metrics=load_metrics(buffer["metrics"]), num_tokens=buffer["num_tokens"])
        filtered, _ = load_groups(
            buffer["filtered"], self._prompts, n=sampling.n, with_baseline=with_baseline, warn=warn
        )
        reasons = dict(zip((group["prompt_id"] for group in buffer["filtered"]), buffer["reasons"], strict=True))
        for group in filtered:
            found.filter_out(group, reasons[group.prompt.prompt_id])
        num_old = self._drop_old(version)
        if num_old:
            warn(
                f"{num_old} groups that the saved run had sampled ahead are sampled again: they are older than this "
                "run learns from (algorithm.max_staleness, worker.rollout.oversampling, algorithm.filter_surplus)"
            )

    def _position(self, taken: Sequence[RolloutGroup], found_by_taken: _Found) -> _Position:
        """Return what a checkpoint is made of. What is sampled now is in it as it was before.

        taken: of a step that is made again, and what was sampled for it.
        """
        continuous = self._config.algorithm.samples_continuously
        if continuous:
            self._absorb()
        else:
            self._end_ahead_if_done()
        running = self._running
        if running is not None and not continuous:
            error = running.call.error
            state = "are not sampled yet" if error is None else f"have failed ({first_line(error)})"
            self._report.warn(
                f"the checkpoint is saved without the groups of step {running.call.step}, which {state}: a run that "
                "resumes from it samples them with newer weights, and has other numbers than this one"
            )
        return _Position(
            self._prompts.state() if running is None else running.prompts,
            (*taken, *self._ready),
            (*(() if running is None else running.begun.values()), *self._unfinished),
            _Found(
                filtered=found_by_taken.filtered + self._found.filtered,
                metrics=merge(found_by_taken.metrics, self._found.metrics),
                num_tokens=found_by_taken.num_tokens + self._found.num_tokens,
            ),
        )

    # -- batches --

    def _take(self, step: int, version: int, probes: list[Probe]) -> Batch:
        """Return a batch of the groups that are ready, and remember it until the next step."""
        config, found = self._config, self._found
        groups = self._taken = self._usable(version)[: self._plan.prompts_per_step]
        self._found_by_taken = replace(found)  # without what is described below
        taken = set(map(id, groups))
        self._ready = [group for group in self._ready if id(group) not in taken]
        if config.algorithm.samples_continuously:
            described = [*groups, *(group for group, _ in found.filtered)]
            waiting = {"rollout/waiting_groups": Sum(float(len(self._ready)))}
            found.metrics = merge(_NO_COUNTS, describe_groups(described), waiting, found.metrics)
            if step == 1:
                warn_if_rewards_are_equal(described, self._report.warn)
        if self._sampling.with_baseline:
            missing = sum(group.baseline is None or group.baseline.score.outcome != "ok" for group in groups)
            found.count("reward_function/num_missing_baselines", missing)
        if "filter/rounds" in found.metrics:  # over all calls that have sampled for the step
            num_passed = len(self._ready) + len(groups) + found.metrics["filter/dropped_groups"].value
            found.metrics = {**found.metrics, "filter/groups": Sum(num_passed)}
        if config.algorithm.online_filtering:
            self._report.filtered(step, found.filtered, read_images=self.image_files)
        if found.shortage:
            if not groups:
                raise DataError(
                    f"{found.shortage}; use data or a prompt template for which the model is sometimes right, raise "
                    "worker.rollout.n, or set algorithm.online_filtering=false"
                )
            self._report.warn(f"{found.shortage}; the step learns from {len(groups)}")
        if not groups:  # several replicas: some failed, and the others had none to complete
            raise EngineError(
                "The rollout engine completed no group of this step: each failed twice, or is unfinished. See the "
                "engine's log."
            )
        self._found = _Found()
        return Batch(groups, probes, found.metrics, found.num_tokens)

    def _usable(self, version: int) -> list[RolloutGroup]:
        """Return the groups that a step with these weights may learn from, in order."""
        if not self._config.algorithm.samples_continuously:
            return self._ready
        oldest_allowed = version - self._config.oldest_age
        usable = [group for group in self._ready if _oldest_of(group, version) >= oldest_allowed]
        return sorted(usable, key=lambda group: _oldest_of(group, version))

    def _drop_old(self, version: int) -> int:
        """Begin groups again that have become too old; count them, and return their number."""
        oldest_allowed = version - self._config.oldest_age
        ready = [group for group in self._ready if _oldest_of(group, version) < oldest_allowed]
        begun = [each for each in self._unfinished if find_oldest_version(each.completions, version) < oldest_allowed]
        dropped = {*map(id, ready), *map(id, begun)}
        self._ready = [group for group in self._ready if id(group) not in dropped]
        self._unfinished = [each for each in self._unfinished if id(each) not in dropped]
        self._unfinished += [Work(group.prompt) for group in ready]
        self._unfinished += [Work(each.prompt) for each in begun]
        completions = [rollout.completion for group in ready for rollout in group.rollouts]
        completions += [completion for each in begun for completion in each.completions]
        if self._config.algorithm.samples_continuously:
            self._found.count(_DROPPED_GROUPS, len(dropped))
            self._found.count(_DROPPED_TOKENS, count_sampled(completions))
        return len(dropped)

    def _draw(self, step: int, num_prompts: int, known: set[str], phase: Phase) -> list[Work]:
        """Return new work for a step. known: ids of its prompts so far; the new ones are added."""
        with phase("data"):
            return [
                Work(replace(_with_unique_id(prompt, known), draw=step)) for prompt in self._prompts.take(num_prompts)
            ]

    @property
    def _filtered_ids(self) -> set[str]:
        """The ids of what was filtered out since the last batch.

        Under such an id a prompt that is drawn again would be sampled with the same seeds.
        """
        return {group.prompt.prompt_id for group, _ in self._found.filtered}

    def _awake(self, weights: WeightsHandle, version: int) -> AbstractContextManager[None]:
        return awake(self._rollout, weights, version=version, phase=self._report.phase)

    # -- sampled in the step, or in the one before it --

    def _sample_for_step(self, step: int, weights: WeightsHandle, version: int) -> Batch:
        """Return the batch of a step; what is missing of it is sampled with these weights."""
        config, report, per_step = self._config, self._report, self._plan.prompts_per_step
        if self._running is not None:
            self._wait_for(self._running.call)
            self._end_ahead(step)
        self._drop_old(version)
        self._before = self._position([], _Found())
        needed = per_step - len(self._ready)
        sampled: list[RolloutGroup] = []
        work: Sequence[Work] = ()
        with self._awake(weights, version):
            if needed > 0:
                work, self._unfinished = self._unfinished, []
                try:
                    with self._clock.waiting(), self._clock.sampling():
                        found = self._sample_groups(step, needed, work, report.phase)
                except BaseException:
                    self._unfinished = list(work)
                    raise
                if config.algorithm.max_staleness == 1:  # before the next call, which counts its own
                    found.metrics = merge(found.metrics, self._rollout.pop_metrics(), self._prompts.metrics())
                sampled = found.groups
                self._take_over(found)
            elif not self._found.metrics:  # nothing was sampled for the step: earlier ones have left enough groups
                self._unfinished = [replace(each, num_carried=each.num_carried + 1) for each in self._unfinished]
                carried = describe_carried(self._unfinished) if config.worker.rollout.oversampling > 0 else {}
                self._found.metrics = merge(describe_groups(self._ready[:per_step]), carried, {_FAILED: Sum(0.0)})
            batch = self._take(step, version, [])
            learned = set(map(id, batch.groups))
            ended = ended_in_step([group for group in sampled if id(group) in learned], work)
            # A batch that was sampled ahead is older than the weights that were sent just now, so
            # that each replica samples a few tokens with them.
            with report.phase("parity") if config.algorithm.max_staleness > 0 else nullcontext():
                probes = self._parity.probe(
                    ended, self._rollout, self._sampling, prompt=batch.groups[0].prompt, version=version
                )
        return replace(batch, probes=probes)

    def _begin_ahead(self, step: int, version: int) -> None:
        """Begin to sample what the next step learns from, with the weights that the engine has."""
        needed = self._plan.prompts_per_step - len(self._ready)
        if needed <= 0:
            return
        work, self._unfinished = self._unfinished, []

        def sample(phase: Phase) -> _Found:
            with self._clock.sampling():
                started = time.perf_counter()
                found = self._sample_groups(step, needed, work, phase)
                found.count("perf/sampling_seconds", time.perf_counter() - started)
            counts = merge(self._rollout.pop_metrics(), self._prompts.metrics())
            found.metrics = merge(found.metrics, counts)
            return found

        prompts = self._prompts.state()
        self._running = _Running(version, _by_id(work), prompts, SamplingCall(step, sample))

    def _end_ahead(self, step: int) -> None:
        """Take over what was sampled for this step while the one before it was made."""
        ahead = self._running
        assert ahead is not None
        if not isinstance(ahead.call.error, LostSamplersError):
            if ahead.call.error is not None:
                raise ahead.call.error
            self._end_ahead_if_done()
            return
        self._report.warn(
            f"{ahead.call.error}: the groups of step {step} are sampled again, with the weights after step {step - 1}, "
            "so that this run has other numbers than one without the loss"
        )
        self._running = None
        self._prompts.load_state(ahead.prompts)
        self._unfinished = [*ahead.begun.values(), *self._unfinished]

    def _end_ahead_if_done(self) -> None:
        found = None if self._running is None else self._running.call.result
        if found is not None:
            self._running = None
            self._take_over(found)

    def _take_over(self, found: _Found) -> None:
        self._ready += found.groups
        self._unfinished += found.unfinished
        self._found.filtered += found.filtered
        self._found.metrics = merge(self._found.metrics, found.metrics)
        self._found.num_tokens += found.num_tokens
        self._found.shortage = found.shortage

    def _sample_groups(self, step: int, needed: int, work: Sequence[Work], phase: Phase) -> _Found:
        """Sample work, and further prompts, until this many groups can be learned from.

        One round of sampling without a filter, which ends with fewer groups if the engine fails to
        sample some. Changes nothing of this object but the position of the prompts, so that it can
        run in a thread. Draws no more prompts than the steps that are left learn from.
        """
        config, per_step = self._config, self._plan.prompts_per_step
        filters, max_rounds = config.algorithm.online_filtering, config.trainer.max_try_make_batch
        found = _Found(unfinished=list(work))
        num_carried = {each.prompt.prompt_id: each.num_carried for each in work}
        known = {group.prompt.prompt_id for group in self._ready} | set(num_carried) | self._filtered_ids
        num_left = per_step * (self._plan.total_steps - step + 1) - len(self._ready)
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
                num_sampled = min(num_sampled, num_left - len(found.groups)) if rounds == 1 else 0
            begun = [each for each in found.unfinished if each.completions or each.num_carried]
            fresh = [each for each in found.unfinished if not (each.completions or each.num_carried)]
            num_fresh = max(0, num_sampled - len(begun)) if rounds == 1 or filters else len(fresh)
            left = fresh[num_fresh:]
            chosen = [*begun, *fresh[:num_fresh]]
            chosen += self._draw(step, max(0, num_sampled - len(chosen)), known, phase)
            found.unfinished = []
            # Few prompts may all fail, as many as a batch may not: a filter would draw without end.
            may_all_fail = num_failed_last + quota < per_step
            is_first = step == 1 and rounds == 1
            num_failed = self._sample_round(
                step, chosen, quota, found, phase, is_first=is_first, may_all_fail=may_all_fail
            )
            num_failed_last = num_failed_last + num_failed if num_failed == len(chosen) else 0
            found.unfinished = [
                replace(each, num_carried=num_carried.get(each.prompt.prompt_id, 0) + 1) for each in found.unfinished
            ]
            found.unfinished += left
        found.unfinished.sort(key=lambda each: -each.num_carried)
        if config.worker.rollout.oversampling > 0:
            found.metrics = merge(found.metrics, describe_carried(found.unfinished))
        if filters:
            self._end_filtering(found, needed, rounds)
        return found

    def _sample_round(
        self,
        step: int,
        work: Sequence[Work],
        quota: int,
        found: _Found,
        phase: Phase,
        *,
        is_first: bool,
        may_all_fail: bool,
    ) -> int:
        """Sample work until this many groups are complete; return how many prompts failed.

        Raises: EngineError if nothing was sampled at all.
        """
        oldest = sum(each.num_carried >= self._config.worker.rollout.max_carried_steps for each in work)
        collected = collect_until(
            work,
            self._rollout,
            self._rewards,
            self._sampling,
            num_groups=min(quota, len(work)),
            num_required=len(work) if step == self._plan.total_steps else oldest,
            phase=phase,
            may_all_fail=may_all_fail,
        )
        groups = collected.groups
        if is_first:
            warn_if_rewards_are_equal(groups, self._report.warn)
        found.unfinished = collected.unfinished
        num_failed = len(work) - len(groups) - len(found.unfinished)
        found.num_tokens += collected.num_tokens
        found.count(_FAILED, num_failed)
        found.metrics = merge(found.metrics, describe_groups(groups))
        found.groups += self._kept(groups, found)
        if not (groups or num_failed or collected.num_tokens):
            raise EngineError(
                f"The rollout engine completed none of {len(work)} groups, and sampled no token. See the engine's log."
            )
        return num_failed

    def _kept(self, groups: Sequence[RolloutGroup], found: _Found) -> list[RolloutGroup]:
        """Return the groups that pass the filter; the others are counted and recorded."""
        if not self._config.algorithm.online_filtering or not groups:
            return list(groups)
        labels, fractions = label_groups(groups, self._config.algorithm)
        found.metrics = merge(found.metrics, fractions)
        for group, label in zip(groups, labels, strict=True):
            if label != "kept":
                found.filter_out(group, label)
        return [group for group, label in zip(groups, labels, strict=True) if label == "kept"]

    def _end_filtering(self, found: _Found, needed: int, rounds: int) -> None:
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
            found.shortage = _describe_shortage(num_found, num_groups, f"{rounds} rounds", found.metrics)

    # -- sampled all the time --

    def _sample_continuously(self, step: int, weights: WeightsHandle, version: int) -> list[Probe]:
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
            self._end_continuous()
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
        found.shortage = _describe_shortage(
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

    def _wait_for(self, call: SamplingCall[Any], until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a call is done, or something else holds, which is asked now and then."""
        if call.is_done:
            return
        with self._clock.waiting(), self._report.phase("wait") as advance:
            while not call.wait(POLL_SECONDS):
                if until():
                    return
                advance(0 if call.pop_progress() else None)

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
            self._ready += self._kept([group], found)
            found.num_tokens += count_new(_all(group), begun)
            running.num_ended += 1

    def _end_continuous(self) -> None:
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
            self._unfinished += running.begun.values()
            return
        for left in running.call.result.unfinished:
            found.num_tokens += count_new(left.completions, running.begun.pop(left.prompt.prompt_id))
            self._unfinished.append(left)
        found.count(_FAILED, len(running.begun))

    def _begin(self, step: int, weights: WeightsHandle, version: int) -> tuple[list[Probe], int]:
        """Send the weights, and begin as many groups as allowed.

        A group that begins now is learned from max_staleness steps later, if groups end in the
        order in which they begin.
        Returns: probes of the weights, and the number of prompts that were drawn.
        """
        config, report, per_step = self._config, self._report, self._plan.prompts_per_step
        self._drop_old(version)
        steps_ahead = min(config.algorithm.max_staleness, self._plan.total_steps - step)
        most = math.ceil(per_step * (1 + steps_ahead) * (1.0 + config.worker.rollout.oversampling))
        if not config.algorithm.online_filtering:  # no more than is ever learned from
            most = min(most, per_step * (self._plan.total_steps - step + 1))
        known = {group.prompt.prompt_id for group in self._ready}
        known |= {each.prompt.prompt_id for each in self._unfinished} | self._filtered_ids
        new = self._draw(step, max(0, most - len(self._ready) - len(self._unfinished)), known, report.phase)
        carried = describe_carried([each for each in self._unfinished if each.completions])
        self._found.metrics = merge(self._found.metrics, carried)
        self._unfinished.sort(key=lambda each: find_oldest_version(each.completions, version))
        work, self._unfinished = [*self._unfinished, *new], []
        first = work[0].prompt if work else self._ready[0].prompt
        with self._awake(weights, version), report.phase("parity"):
            # None of the groups has these weights yet, so each replica samples a few tokens.
            probes = self._parity.probe((), self._rollout, self._sampling, prompt=first, version=version)
        self._found.metrics = merge(self._found.metrics, self._rollout.pop_metrics())
        if work:
            self._begin_continuous(step, version, work)
        return probes, len(new)

    def _begin_continuous(self, step: int, version: int, work: Sequence[Work]) -> None:
        """Begin to sample work in a thread, until it is interrupted."""
        per_step = self._plan.prompts_per_step
        ended: deque[RolloutGroup] = deque()
        interruption = Interruption()

        def sample(phase: Phase) -> _Found:
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
            return _Found(unfinished=unfinished)

        self._running = _Running(
            version,
            _by_id(work),
            self._prompts.state(),
            SamplingCall(step, sample),
            interruption,
            ended,
            max_failed=0 if self._has_failed else per_step - 1,
        )


@dataclass(slots=True, eq=False)
class _Running:
    """What is sampled in a thread: for the next step, or all the time until the next weight sync.

    version: the policy version of the weights that sample. begun: the work that the call began
    with, by prompt id; a group that is taken from ended is removed here too. prompts: the state of
    the prompt stream when the call began. A call for the next step returns its groups together at
    its end, and does not use the fields that follow.
    ended: groups that have ended and are scored. max_failed: the number of prompts that may fail
    although no other one has ended. num_ended: the number of groups that were taken from ended.
    """

    version: int
    begun: dict[str, Work]
    prompts: Mapping[str, Any]
    call: SamplingCall[_Found]
    interruption: Interruption = field(default_factory=Interruption)
    ended: deque[RolloutGroup] = field(default_factory=deque)
    max_failed: int = 0
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


_NO_COUNTS: Metrics = dict.fromkeys((_FAILED, _DROPPED_GROUPS, _DROPPED_TOKENS), Sum(0.0))


@contextmanager
def awake(rollout: RolloutEngine, weights: WeightsHandle, *, version: int, phase: Phase) -> Iterator[None]:
    """Keep a rollout engine awake with these weights. The sync is timed as the phase "weights"."""
    with ExitStack() as stack:
        with phase("weights"):
            stack.enter_context(rollout.awake(weights, version=version))
        yield


def _with_unique_id(prompt: Prompt, drawn: set[str]) -> Prompt:
    """Return the prompt with an id that is not in drawn, and add the id to drawn.

    A step that crosses the end of an epoch can draw a prompt twice; the stream, which counts by
    epoch, cannot see it.
    """
    occurrence = 1
    while prompt.prompt_id in drawn:
        occurrence += 1
        prompt = with_repeat_id(prompt, occurrence)
    drawn.add(prompt.prompt_id)
    return prompt


def _describe_shortage(num_found: int, num_groups: int, tried: str, metrics: Metrics) -> str:
    found = f"online filtering found {num_found} of {num_groups} groups in {tried} (trainer.max_try_make_batch)"
    if "filter/low_fraction" not in metrics:
        return f"{found}: the rollout engine completed none of them"
    low, high = (metrics[f"filter/{name}_fraction"].value for name in ("low", "high"))
    return (
        f"{found}: {low:.0%} of those sampled were at or below algorithm.filter_low, {high:.0%} at or above filter_high"
    )


def _by_id(work: Sequence[Work]) -> dict[str, Work]:
    return {each.prompt.prompt_id: each for each in work}


def _all(group: RolloutGroup) -> list[Completion]:
    """Return the completions of a group, the greedy one included."""
    rollouts = group.rollouts if group.baseline is None else (*group.rollouts, group.baseline)
    return [rollout.completion for rollout in rollouts]


def _oldest_of(group: RolloutGroup, version: int) -> int:
    """Return the version of the oldest token of a group; version: of the newest weights."""
    return find_oldest_version(_all(group), version)
