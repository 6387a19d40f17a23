"""Where the batch of a step comes from: sampled in the step, or beside the step before it.

stream_source.py samples further ahead.

With version v the weights after v steps, the batch of step t is sampled with version t - 1 in line,
and with version t - 2 one step ahead, in a thread. Both are functions of the weights and the
prompts alone, so that a run that resumes has the same batches.

    in line         | sample 1 | learn 1 | sample 2 | learn 2 | sample 3 | ...
    one ahead       | sample 1 | learn 1            | learn 2            | ...
                               | sample 2 (with v0) | sample 3 (with v1) | ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from trigon.ahead_state import batch_state
from trigon.batch import Batch, Sampler
from trigon.carried import CarriedGroup, describe_staleness, ended_in_step
from trigon.data.stream import PromptStream
from trigon.errors import LostSamplersError
from trigon.metrics import Metrics, Sum, merge
from trigon.parity import Probe
from trigon.pool_clock import PoolClock
from trigon.run import AheadBatch, Run
from trigon.sampling_thread import SamplingThread
from trigon.types import RolloutGroup

POLL_SECONDS = 0.1
"""How often the loop looks for progress while it waits for a batch."""


class BatchSource(Protocol):
    """Yields the batches of a run's steps, one after the other."""

    def next(
        self, step: int, *, kept: Sequence[RolloutGroup], carried: Sequence[CarriedGroup] = ()
    ) -> tuple[Batch, list[Probe]]:
        """Return the batch of a step, and completions for the parity check of its weights.

        kept, carried: complete and unfinished groups of the step before.
        Raises: what sampling and scoring raise; and StepLeft.
        """
        ...

    def pop_metrics(self) -> Metrics:
        """Return what was counted while the last batch was sampled, and is not in its metrics."""
        ...

    def wait(self) -> None:
        """Wait until nothing is sampled any more: for a validation, or for state_after."""
        ...

    def wait_to_save(self) -> None:
        """Wait until state_after loses nothing, where that does not take long."""
        ...

    def state_before(self) -> dict[str, Any]:
        """Return the entries of a checkpoint from which the last step that began is made again."""
        ...

    def state_after(self) -> dict[str, Any]:
        """Return the entries of a checkpoint from which the next step is made."""
        ...


@contextmanager
def awake(run: Run, *, version: int) -> Iterator[None]:
    """Keep the rollout engine awake with the trainer's weights.

    The weight sync is timed as the phase "weights".
    """
    with ExitStack() as stack:
        with run.report.phase("weights"):
            stack.enter_context(run.rollout.awake(run.trainer.weights(), version=version))
        yield


def training_prompts(run: Run) -> PromptStream:
    """Return the prompts of a run that makes steps."""
    assert run.prompts is not None, "a step needs training prompts"
    return run.prompts


def open_sampler(run: Run) -> Sampler:
    """Return what collects a step's groups."""
    return Sampler(
        training_prompts(run),
        run.rollout,
        run.rewards,
        run.sampling,
        run.report,
        with_baselines=run.advantage_settings.estimator == "remax",
        total_steps=run.plan.total_steps,
        oversampling=run.oversampling,
    )


class InLineSource:
    """Samples the batch of a step in the step. Implements BatchSource."""

    def __init__(self, run: Run) -> None:
        """Begin at the position of the run's prompts."""
        self._run = run
        self._sampler = open_sampler(run)
        self._clock = PoolClock()
        self._before: dict[str, Any] = {}
        self._staleness: Metrics = {}

    def next(
        self, step: int, *, kept: Sequence[RolloutGroup], carried: Sequence[CarriedGroup] = ()
    ) -> tuple[Batch, list[Probe]]:
        """See BatchSource."""
        run = self._run
        self._before = training_prompts(run).state()
        with awake(run, version=run.policy_version(step - 1)):
            with self._clock.sampling(), self._clock.waiting():
                batch = self._sampler.collect_batch(
                    run.plan.prompts_per_step, group_filter=run.group_filter, kept=kept, step=step, carried=carried
                )
            sampled = ended_in_step(batch.groups[len(kept) :], carried)
            probes = run.parity.probe(
                sampled,
                run.rollout,
                run.sampling,
                prompt=batch.groups[0].prompt,
                step=step,
                version=run.policy_version(step - 1),
            )
        self._staleness = describe_staleness(batch.groups, version=run.policy_version(step - 1))
        return batch, probes

    def pop_metrics(self) -> Metrics:
        """See BatchSource."""
        run = self._run
        staleness = self._staleness if run.has_pools or run.oversampling is not None else {}
        idle = self._clock.pop_metrics() if run.has_pools else {}
        return {**run.rollout.pop_metrics(), **training_prompts(run).metrics(), **staleness, **idle}

    def wait(self) -> None:
        """See BatchSource. Nothing is sampled between steps."""

    def wait_to_save(self) -> None:
        """See BatchSource. Nothing is sampled between steps."""

    def state_before(self) -> dict[str, Any]:
        """See BatchSource."""
        return {"prompts": self._before}

    def state_after(self) -> dict[str, Any]:
        """See BatchSource."""
        return {"prompts": training_prompts(self._run).state()}


class AheadSource:
    """Samples the batch of a step while the step before it is made. Implements BatchSource.

    The first batch is sampled in its step, with version 0 as the second one; so is a batch whose
    samplers were all lost, with the newest weights.
    """

    def __init__(self, run: Run, ahead: AheadBatch | None) -> None:
        """Begin at the position of the run's prompts. ahead: the first batch, if it is sampled."""
        self._run = run
        self._clock = PoolClock()
        self._ready = ahead
        self._flight: _Flight | None = None
        self._step = 0
        self._before: dict[str, Any] = {}  # see state_before
        self._staleness: Metrics = {}

    def next(
        self, step: int, *, kept: Sequence[RolloutGroup], carried: Sequence[CarriedGroup] = ()
    ) -> tuple[Batch, list[Probe]]:
        """See BatchSource. Begins to sample the batch of the next step."""
        run, prompts = self._run, training_prompts(self._run)
        self._step = step
        assert [*kept, *carried] == [], "with a group filter or oversampling nothing is sampled ahead"
        ahead = self._take(step)
        self._before = {"prompts": prompts.state()} if ahead is None else _entries(ahead)
        with awake(run, version=run.policy_version(step - 1)):
            batch = self._sample(step) if ahead is None else ahead.batch
            # A batch that was sampled ahead is older than the weights that were sent just now, so
            # each replica samples a few tokens with them.
            with run.report.phase("parity"):
                probes = run.parity.probe(
                    batch.groups if ahead is None else (),
                    run.rollout,
                    run.sampling,
                    prompt=batch.groups[0].prompt,
                    step=step,
                    version=run.policy_version(step - 1),
                )
        if step < run.plan.total_steps:
            self._flight = _Flight(run, step + 1, self._clock)
        self._staleness = describe_staleness(batch.groups, version=run.policy_version(step - 1))
        return batch, probes

    def pop_metrics(self) -> Metrics:
        """See BatchSource. The counts of a batch that was sampled ahead are in its metrics.

        Those after the last one, of weights and of the parity check, are in no batch.
        """
        counts = self._run.rollout.pop_metrics() if self._flight is None else {}
        return {**counts, **self._staleness, **self._clock.pop_metrics()}

    def wait(self) -> None:
        """See BatchSource. An error of the batch is raised by next()."""
        flight = self._flight
        if flight is None or flight.is_done:
            return
        with self._clock.waiting(), self._run.report.phase("wait") as advance:
            while not flight.wait(POLL_SECONDS):
                advance(0 if flight.pop_progress() else None)

    def wait_to_save(self) -> None:
        """See BatchSource. Waits for the batch."""
        self.wait()

    def state_before(self) -> dict[str, Any]:
        """See BatchSource."""
        flight = self._flight
        return self.state_after() if flight is not None and flight.step == self._step else self._before

    def state_after(self) -> dict[str, Any]:
        """See BatchSource. Without a batch that is not finished; see wait."""
        flight = self._flight
        if flight is None:
            return {"prompts": training_prompts(self._run).state()}
        if flight.result is None:
            error = flight.error
            state = "is not sampled yet" if error is None else f"has failed ({_first_line(error)})"
            self._run.report.warn(
                f"the checkpoint is saved without the batch of step {flight.step}, which {state}: a run that resumes "
                "from it samples the batch with newer weights, and has other numbers than this one"
            )
            return {"prompts": flight.before}
        return _entries(flight.result)

    def close(self) -> None:
        """Give up what is sampled."""
        if self._flight is not None:
            self._flight.give_up()

    def _take(self, step: int) -> AheadBatch | None:
        """Return the batch of this step if it was sampled ahead."""
        ready, self._ready = self._ready, None
        flight = self._flight
        if flight is None:
            return ready
        assert flight.step == step
        self.wait()
        self._flight = None
        if isinstance(flight.error, LostSamplersError):
            self._run.report.warn(
                f"{flight.error}: the batch of step {step} is sampled again, with the weights of step {step - 1}, so "
                "that this run has other numbers than one without the loss"
            )
            training_prompts(self._run).load_state(flight.before)
            return None
        if flight.error is not None:
            raise flight.error
        return flight.result

    def _sample(self, step: int) -> Batch:
        with self._clock.waiting(), self._clock.sampling():
            return _collect(self._run, open_sampler(self._run), step)


class _Flight(SamplingThread[AheadBatch]):
    """A batch that is sampled in a thread, with the weights that the rollout engine has.

    before: the state of the prompt stream before it.
    """

    def __init__(self, run: Run, step: int, clock: PoolClock) -> None:
        super().__init__(run, step)
        self.before: Mapping[str, Any] = training_prompts(run).state()
        self._run = run
        self._clock = clock
        self.start(self._sample)

    def _sample(self) -> AheadBatch:
        with self._clock.sampling():
            started = time.perf_counter()
            batch = _collect(self._run, replace(open_sampler(self._run), report=self.report), self.step)
            seconds = {"perf/sampling_seconds": Sum(time.perf_counter() - started)}
            after = training_prompts(self._run).state()
        return AheadBatch(replace(batch, metrics=merge(batch.metrics, seconds)), self.before, after)


def _collect(run: Run, sampler: Sampler, step: int) -> Batch:
    """Return a batch, with the counts of the rollout engine and of the prompts in its metrics."""
    batch = sampler.collect_batch(run.plan.prompts_per_step, group_filter=None, kept=(), step=step)
    counts = merge(batch.metrics, run.rollout.pop_metrics(), training_prompts(run).metrics())
    return replace(batch, metrics=counts)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _entries(ahead: AheadBatch) -> dict[str, Any]:
    """Return the entries of a checkpoint before a step whose batch is sampled."""
    return {"prompts": ahead.before, "ahead": batch_state(ahead.batch, ahead.after)}
