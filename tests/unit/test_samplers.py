"""Samplers of a rollout engine that may be lost, as workers in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from trigon.distributed.engines import WorkerWeights
from trigon.distributed.messages import unpack
from trigon.distributed.rollout_engine import WorkersRolloutEngine
from trigon.distributed.samplers import MAX_REPLACEMENTS, SamplerPool, SamplerReplicas
from trigon.distributed.worker import Heartbeat
from trigon.distributed.worker_group import ProcessedMedia
from trigon.errors import LostSamplersError, LostWorkerError, TrigonError, WorkerError
from trigon.rollout.protocol import Interruption, Until
from trigon.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.faults

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)
ENDED = Completion((1, 2), (-0.5,) * 2, "stop", "", 0)
BEGUN = Completion((1,), (-0.5,), "unfinished", "", 0)
Sample = Callable[["Replica", list[Prompt], SamplingParams, Until | None], list[list[Completion]]]


class Done:
    """A call that has ended. See Call."""

    _pending = ()

    def __init__(self, value: object, error: TrigonError | None = None) -> None:
        self.value, self.error = value, error

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing."""

    def result(self) -> list[object]:
        if self.error is not None:
            raise self.error
        return [self.value]


class Replica:
    """A worker group of one worker in this process. number: of the replica. start: of all."""

    def __init__(self, number: int, sample: Sample, start: int = 0) -> None:
        self.number, self.sample, self.start = number, sample, start
        self.workers = [SimpleNamespace(rank=0)]
        self.is_closed = False
        self.deadline_seconds = 60.0
        self.processed = ProcessedMedia()
        self.traffic = SimpleNamespace(pop_metrics=dict)
        self.groups: list[tuple[int, list[Completion]]] = []

    def part(self, first: int, end: int) -> Replica:
        return self

    def put(self, message, *, phase):
        return message

    def receive(self, message, *, phase):
        return message

    def call(self, method, *arguments, per_rank=(None,), phase, **options) -> Done:
        match method.__name__:
            case "generate":
                (prompts, until), (sampling, _) = unpack(per_rank[0]), arguments
                self.groups = []
                try:
                    self.groups = list(enumerate(self.sample(self, prompts, sampling, until)))
                except TrigonError as error:  # after the groups that it has ended
                    options["listener"].receive(0, Heartbeat(0, 0, "", 0, tuple(self.groups)))
                    return Done(None, error)
                return Done(None)
            case "heartbeat":
                return Done(Heartbeat(0, 0, "", 0, tuple(self.groups[per_rank[0].skip_groups :])))
            case "send_weights":
                return Done(0)
            case "listen_for_transfer":
                return Done(("127.0.0.1", 1))
            case "pop_rollout_metrics":
                return Done({})
        return Done(None)


class Starts:
    """Starts replicas. See StartReplica."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.num_started = sample, 0

    def start(self, number: int) -> Replica:
        self.num_started += 1
        return Replica(number, self.sample, self.num_started)

    def end(self, group: Replica) -> None:
        """Do nothing."""

    def give_up(self) -> None:
        """Do nothing."""


@contextmanager
def no_phase(name: str, *, total: int | None = None) -> Iterator[Callable[[int | None], None]]:
    yield lambda _: None


@contextmanager
def open_samplers(sample: Sample, *, size: int) -> Iterator[WorkersRolloutEngine]:
    starts = Starts(sample)
    pool = SamplerPool(starts, [Replica(number, sample) for number in range(size)], warn=lambda text: None)
    yield WorkersRolloutEngine(SamplerReplicas(Replica(-1, sample), pool, loopback=True, phase=no_phase))
    pool.close()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"train:{number}", (1,), None, "", "", {}, ()) for number in range(count)]


def first_start_dies(replica, prompts, sampling, until):
    """Sample as many groups as until asks for; replicas that were not started again die."""
    if replica.start == 0 and not sampling.one_turn:
        raise LostWorkerError("it died")
    count = len(prompts) if until is None else until.num_groups
    return [[ENDED if index < count else BEGUN] * sampling.n for index in range(len(prompts))]


@pytest.mark.parametrize("size", [1, 2])
def test_an_oversampled_batch_whose_samplers_are_all_lost_is_sampled_again(size):
    with open_samplers(first_start_dies, size=size) as engine:
        with engine.awake(WorkerWeights(), version=0):
            rows = engine.generate(prompts(5), SAMPLING, until=Until(4))
        assert sum(not row[0].is_unfinished for row in rows) == 4


def test_an_oversampled_batch_ahead_whose_samplers_are_all_lost_is_an_error():
    with open_samplers(first_start_dies, size=1) as engine:
        with engine.awake(WorkerWeights(), version=0):
            pass
        for _ in range(2):  # the second time without any replica
            with pytest.raises(LostSamplersError):
                engine.generate(prompts(5), SAMPLING, until=Until(4))
        interrupted = Until(5, interruption=Interruption())
        rows = engine.generate(prompts(5), SAMPLING, until=interrupted)
        assert all(each.is_unfinished and not each.token_ids for row in rows for each in row)


def test_the_share_of_a_replica_that_alone_had_groups_to_end_is_sampled_by_another_one():
    def sample(replica, prompts, sampling, until):
        if replica.number == 0:
            raise LostWorkerError("it died")
        return [[ENDED if index < until.num_groups else BEGUN] * sampling.n for index in range(len(prompts))]

    with open_samplers(sample, size=2) as engine, engine.awake(WorkerWeights(), version=0):
        rows = engine.generate(prompts(2), SAMPLING, until=Until(1))
    assert [row[0].is_unfinished for row in rows] == [False, True]


@pytest.mark.parametrize("size", [1, 2])
def test_samplers_that_fail_whenever_they_sample_end_the_run_although_they_sample_probes(size):
    def sample(replica, prompts, sampling, until):
        if prompts and not sampling.one_turn:
            raise LostWorkerError("it died")
        return [[ENDED] * sampling.n for _ in prompts]

    with open_samplers(sample, size=size) as engine:
        for number in range(MAX_REPLACEMENTS + 1):
            with engine.awake(WorkerWeights(), version=number):
                engine.generate(prompts(size), replace(SAMPLING, one_turn=True))  # the probe of a parity check
            engine.generate(prompts(1), SAMPLING, until=Until(1, interruption=Interruption()))
        with (
            pytest.raises(WorkerError, match="were replaced 3 times since"),
            engine.awake(WorkerWeights(), version=MAX_REPLACEMENTS + 1),
        ):
            pass


@pytest.mark.parametrize("always", [True, False])
def test_samplers_that_end_groups_and_then_die_are_replaced_as_long_as_the_groups_are_new(always):
    """Each of them ends a group; always: each of them the same one."""

    def sample(replica, prompts, sampling, until):
        replica.groups = [(0 if always else replica.start, [ENDED] * sampling.n)]
        raise LostWorkerError("it died")

    size = MAX_REPLACEMENTS + 3
    with open_samplers(sample, size=1) as engine:
        if always:
            with (
                pytest.raises(WorkerError, match="were replaced 3 times since"),
                engine.awake(WorkerWeights(), version=0),
            ):
                engine.generate(prompts(size), SAMPLING)
            return
        for step in range(size):  # the end of each call loses the sampler
            with engine.awake(WorkerWeights(), version=step):
                pass
            until = Until(size, interruption=Interruption())
            rows = engine.generate(prompts(size), SAMPLING, until=until)
            assert [index for index, row in enumerate(rows) if not row[0].is_unfinished] == [step]


def test_a_run_that_ends_does_not_wait_for_a_sampler_that_is_starting():
    is_starting, is_ended = threading.Event(), threading.Event()

    class SlowStarts(Starts):
        def start(self, number):
            is_starting.set()
            assert is_ended.wait(30), "the run waited for the start"
            raise WorkerError("its process was killed")

        def give_up(self):
            is_ended.set()

    @contextmanager
    def interrupted(name, *, total=None):
        def advance(k):
            assert is_starting.wait(30)
            raise KeyboardInterrupt

        yield advance

    pool = SamplerPool(SlowStarts(first_start_dies), [Replica(0, first_start_dies)], warn=lambda text: None)
    pool.lose(0, LostWorkerError("it died"))
    with pytest.raises(KeyboardInterrupt):
        pool.replace_lost(interrupted)
    pool.close()
    assert is_ended.is_set()
