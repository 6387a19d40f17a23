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
resumes has the same ones (step_buffer.py). Above 1 they depend on time (continuous_buffer.py).
Oversampling and online filtering are settings of all of these. This module has what both share:
the groups that are held, a step's batch of them, checkpoints. Does not know which engine samples,
or where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.stream import PromptStream, with_repeat_id
from trigon.errors import DataError, EngineError
from trigon.metrics import Metrics, Sum, merge
from trigon.rewards.pool import RewardPool
from trigon.rollout.filtering import label_groups
from trigon.rollout.parity import ParityCheck, Probe
from trigon.rollout.protocol import RolloutEngine, Work
from trigon.rollout.sampling_call import PoolClock, SamplingCall
from trigon.rollout.saved import groups_state, load_groups, load_metrics, load_work, metrics_state, work_state
from trigon.rollout.statistics import count_sampled, describe_staleness, find_oldest_version
from trigon.types import Completion, Phase, Prompt, RolloutGroup, SamplingParams, WeightsHandle

POLL_SECONDS = 0.1
"""How often the loop looks for progress while it waits for groups."""

Reason = Literal["low", "high", "unscored", "surplus"]
"""Why no step learns from a group: see GroupClass; surplus: there were more than a step needs."""

FilteredGroup = tuple[RolloutGroup, Reason]

NUM_SKIPPED = "rollout/num_skipped"
DROPPED_GROUPS, DROPPED_TOKENS = "staleness/dropped_groups", "staleness/dropped_tokens"


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
class Found:
    """What was sampled: by one call, by the last step that began, or what the buffer holds.

    groups: the groups that are ready, in the order in which steps learn from them. unfinished: the
    work that is left. Of a buffer, the other fields are since its last batch:
    filtered: the groups that were filtered out, without their images. metrics: counts, and what
    describes the groups. num_tokens: number of sampled tokens, those of filtered groups and of
    unfinished work included. shortage: why there are fewer groups than were requested; "" if there
    are enough.
    """

    groups: list[RolloutGroup] = field(default_factory=list)
    unfinished: list[Work] = field(default_factory=list)
    filtered: list[FilteredGroup] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    num_tokens: int = 0
    shortage: str = ""

    def add(self, other: Found) -> None:
        """Add what was sampled later."""
        self.groups += other.groups
        self.unfinished += other.unfinished
        self.filtered += other.filtered
        self.metrics = merge(self.metrics, other.metrics)
        self.num_tokens += other.num_tokens
        self.shortage = other.shortage

    def count(self, name: str, number: float) -> None:
        self.metrics = merge(self.metrics, {name: Sum(float(number))})

    def filter_out(self, group: RolloutGroup, label: Reason) -> None:
        # The images would stay in memory until the step is recorded.
        self.filtered.append((replace(group, prompt=replace(group.prompt, vision=None)), label))


@dataclass(slots=True, eq=False)
class Running:
    """What is sampled in a thread, beside the steps.

    begun: the work that the call began with, by prompt id. prompts: the state of the prompt stream
    when the call began.
    """

    call: SamplingCall[Found]
    begun: dict[str, Work]
    prompts: Mapping[str, Any]


Position = tuple[Mapping[str, Any], Found]
"""What a checkpoint is made of: the state of the prompt stream, and what the buffer holds."""


class RolloutBuffer(ABC):
    """Gives each step a batch of scored groups. StepBuffer and ContinuousBuffer sample them."""

    _running: Running | None = None  # what is sampled now, beside the steps

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
        self._found = Found()

    # -- steps --

    @abstractmethod
    def next(self, step: int, weights: WeightsHandle, *, version: int) -> Batch:
        """Return the groups of a step, oldest first.

        There are fewer than plan.prompts_per_step only if online filtering found no more groups in
        its rounds, or if the engine failed to sample the others.
        weights: the newest weights, whose policy version is version.
        Raises: what sampling and scoring raise, and what the report's phases raise; DataError if
        online filtering has found no group.
        """

    @abstractmethod
    def pop_metrics(self) -> Metrics:
        """Return what was counted since the last call, and is not in the metrics of a batch."""

    @abstractmethod
    def pause(self) -> None:
        """Wait until nothing is sampled any more, for a validation. next() raises errors."""

    def pause_to_save(self) -> None:
        """Wait until a checkpoint loses nothing, where that does not take long."""
        self.pause()

    def close(self) -> None:
        """Give up what is sampled."""
        if self._running is not None:
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
        prompts, found = self._position() if made else self._position_before()
        return {
            "prompts": prompts,
            "buffer": {
                "ready": groups_state(found.groups),
                "work": work_state(found.unfinished),
                "filtered": groups_state([group for group, _ in found.filtered]),
                "reasons": [reason for _, reason in found.filtered],
                "metrics": metrics_state(found.metrics),
                "num_tokens": found.num_tokens,
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
        ready, again = load_groups(buffer["ready"], self._prompts, sampling, warn=warn)
        work = again + load_work(buffer["work"], self._prompts, sampling, warn=warn)
        metrics, num_tokens = load_metrics(buffer["metrics"]), buffer["num_tokens"]
        found = self._found = Found(ready, work, metrics=metrics, num_tokens=num_tokens)
        filtered, _ = load_groups(buffer["filtered"], self._prompts, sampling, warn=warn)
        reasons = dict(zip((group["prompt_id"] for group in buffer["filtered"]), buffer["reasons"], strict=True))
        for group in filtered:
            found.filter_out(group, reasons[group.prompt.prompt_id])
        num_old = self._drop_old(version)
        if num_old:
            warn(
                f"{num_old} groups that the saved run had sampled ahead are sampled again: they are older than this "
                "run learns from (algorithm.max_staleness, worker.rollout.oversampling, algorithm.filter_surplus)"
            )

    @abstractmethod
    def _position_before(self) -> Position:
        """Return what a checkpoint is made of if the step that began last was not made."""

    @abstractmethod
    def _settle(self) -> Running | None:
        """Take over what the last call has sampled; return it if it still runs, or has failed."""

    def _position(self, taken: Found | None = None) -> Position:
        """Return what a checkpoint is made of. What is sampled now is in it as it was before.

        taken: by a step that is made again; None: by none.
        """
        running = self._settle()
        held = Found() if running is None else Found(unfinished=[*running.begun.values()])
        for each in (taken, self._found):
            if each is not None:
                held.add(each)
        return (self._prompts.state() if running is None else running.prompts), held

    # -- what is shared by both ways to sample --

    def _take(self, step: int, groups: list[RolloutGroup], described: Metrics, *, version: int) -> Batch:
        """Return a batch of these groups, which are ready.

        described: metrics of the batch besides the counts so far.
        """
        config, found = self._config, self._found
        taken = set(map(id, groups))
        left = [group for group in found.groups if id(group) not in taken]
        if not config.worker.hybrid_engine or config.worker.rollout.oversampling > 0:
            described = merge(described, describe_staleness(groups, version=version))
        found.metrics = merge(described, found.metrics)
        if self._sampling.with_baseline:
            missing = sum(group.baseline is None or group.baseline.score.outcome != "ok" for group in groups)
            found.count("reward_function/num_missing_baselines", missing)
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
        self._found = Found(left, found.unfinished)
        return Batch(groups, [], found.metrics, found.num_tokens)

    def _drop_old(self, version: int) -> int:
        """Begin groups again that have become too old; count them, and return their number."""
        found, oldest_allowed = self._found, version - self._config.oldest_age
        ready = [group for group in found.groups if oldest_of(group, version) < oldest_allowed]
        begun = [each for each in found.unfinished if find_oldest_version(each.completions, version) < oldest_allowed]
        dropped = {*map(id, ready), *map(id, begun)}
        found.groups = [group for group in found.groups if id(group) not in dropped]
        found.unfinished = [each for each in found.unfinished if id(each) not in dropped]
        found.unfinished += [Work(group.prompt) for group in ready] + [Work(each.prompt) for each in begun]
        completions = [rollout.completion for group in ready for rollout in group.rollouts]
        completions += [completion for each in begun for completion in each.completions]
        if self._config.algorithm.samples_continuously:
            found.count(DROPPED_GROUPS, len(dropped))
            found.count(DROPPED_TOKENS, count_sampled(completions))
        return len(dropped)

    def _kept(self, groups: Sequence[RolloutGroup], found: Found) -> list[RolloutGroup]:
        """Return the groups that pass the filter; the others are counted and recorded."""
        if not self._config.algorithm.online_filtering or not groups:
            return list(groups)
        labels, fractions = label_groups(groups, self._config.algorithm)
        found.metrics = merge(found.metrics, fractions)
        for group, label in zip(groups, labels, strict=True):
            if label != "kept":
                found.filter_out(group, label)
        return [group for group, label in zip(groups, labels, strict=True) if label == "kept"]

    def _draw(self, step: int, num_prompts: int, known: set[str], phase: Phase) -> list[Work]:
        """Return new work for a step. known: ids of its prompts so far; the new ones are added."""
        with phase("data"):
            return [
                Work(replace(_with_unique_id(prompt, known), draw=step)) for prompt in self._prompts.take(num_prompts)
            ]

    @property
    def _known_ids(self) -> set[str]:
        """The ids of what is held, and of what was filtered out since the last batch.

        Under such an id a prompt that is drawn again would be sampled with the same seeds.
        """
        held = [*self._found.groups, *(group for group, _ in self._found.filtered)]
        return {group.prompt.prompt_id for group in held} | set(by_id(self._found.unfinished))

    def _wait_for(self, call: SamplingCall[Any], until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a call is done, or something else holds, which is asked now and then."""
        if call.is_done:
            return
        with self._clock.waiting(), self._report.phase("wait") as advance:
            while not call.wait(POLL_SECONDS):
                if until():
                    return
                advance(0 if call.pop_progress() else None)


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


def describe_shortage(num_found: int, num_groups: int, tried: str, metrics: Metrics) -> str:
    """Return why online filtering has found too few groups. tried: in what it has found them."""
    found = f"online filtering found {num_found} of {num_groups} groups in {tried} (trainer.max_try_make_batch)"
    if "filter/low_fraction" not in metrics:
        return f"{found}: the rollout engine completed none of them"
    low, high = (metrics[f"filter/{name}_fraction"].value for name in ("low", "high"))
    return (
        f"{found}: {low:.0%} of those sampled were at or below algorithm.filter_low, {high:.0%} at or above filter_high"
    )


def completions_of(group: RolloutGroup) -> list[Completion]:
    """Return the completions of a group, the greedy one included."""
    rollouts = group.rollouts if group.baseline is None else (*group.rollouts, group.baseline)
    return [rollout.completion for rollout in rollouts]


def oldest_of(group: RolloutGroup, version: int) -> int:
    """Return the version of the oldest token of a group; version: of the newest weights."""
    return find_oldest_version(completions_of(group), version)


def by_id(work: Sequence[Work]) -> dict[str, Work]:
    """Return work by the ids of its prompts."""
    return {each.prompt.prompt_id: each for each in work}
