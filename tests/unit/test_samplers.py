"""Samplers that are lost, as objects of this process; calls that hang, without Ray's waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trigon.assemble.pools import _PoolStart, place_pools
from trigon.config.schema import Config
from trigon.distributed import worker_group
from trigon.distributed.cluster import WorkerHandle
from trigon.distributed.engines import WorkersTrainEngine, WorkerWeights
from trigon.distributed.messages import unpack
from trigon.distributed.preflight import SAME_EVERYWHERE, NodeReport
from trigon.distributed.rollout_engine import LearnerReplicas, WorkersRolloutEngine
from trigon.distributed.samplers import MAX_REPLACEMENTS, SamplerPool, SamplerReplicas
from trigon.distributed.worker import Heartbeat, Worker
from trigon.distributed.worker_group import ProcessedMedia, WorkerGroup
from trigon.errors import (
    ConfigError,
    EngineError,
    LostSamplersError,
    LostWorkerError,
    RolloutError,
    TrigonError,
    WorkerError,
)
from trigon.rollout.protocol import Interruption, Until, require_local_weights
from trigon.types import Completion, LocalWeights, Prompt, SamplingParams

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
                    options["listener"].receive(Heartbeat(0, 0, 0, tuple(self.groups)))
                    return Done(None, error)
                return Done(None)
            case "heartbeat":
                return Done(Heartbeat(0, 0, 0, tuple(self.groups[arguments[1] :])))
            case "send_weights":
                return Done(0)
            case "listen_for_transfer":
                return Done(("127.0.0.1", 1))
            case "pop_rollout_metrics":
                return Done({})
        return Done(None)


class Starts:
    """Starts replicas, after these errors. See StartReplica."""

    def __init__(self, sample: Sample, errors: Sequence[TrigonError] = ()) -> None:
        self.sample, self.errors, self.num_started = sample, iter(errors), 0

    def start(self, number: int) -> Replica:
        for error in self.errors:
            raise error
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
def open_samplers(
    sample: Sample,
    *,
    size: int,
    errors: Sequence[TrigonError] = (),
    warn: Callable[[str], object] = str,
) -> Iterator[WorkersRolloutEngine]:
    """Open an engine of this many replicas; other ones in their places start after these errors."""
    pool = SamplerPool(Starts(sample, errors), [Replica(number, sample) for number in range(size)], warn=warn)
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


def replicas(rows: list[list[Completion]]) -> list[int]:
    return [row[0].replica for row in rows]


@pytest.mark.parametrize("error", [LostWorkerError("it died"), RolloutError("the engine has failed")])
def test_the_prompts_of_a_lost_replica_are_sampled_by_the_other_one_until_it_is_replaced(error):
    def sample(replica, prompts, sampling, until):
        if replica.number == 1 and replica.start == 0:
            raise error
        return [[ENDED] * sampling.n for _ in prompts]

    with open_samplers(sample, size=2) as engine:
        with engine.awake(WorkerWeights(), version=0):
            for _ in range(2):
                assert replicas(engine.generate(prompts(4), SAMPLING)) == [0, 1, 0, 1]
        assert engine.pop_metrics()["rollout/engine_restarts"].value == 0
        with engine.awake(WorkerWeights(), version=0):
            assert replicas(engine.generate(prompts(4), SAMPLING)) == [0, 1, 0, 1]
        assert engine.pop_metrics()["rollout/engine_restarts"].value == 1


def test_an_error_that_another_replica_would_make_too_ends_the_call_and_no_replica():
    def sample(replica, prompts, sampling, until):
        if len(prompts) > 2:
            raise EngineError("too many prompts")
        return [[ENDED] * sampling.n for _ in prompts]

    with open_samplers(sample, size=2) as engine, engine.awake(WorkerWeights(), version=0):
        with pytest.raises(EngineError, match="too many prompts"):
            engine.generate(prompts(6), SAMPLING)
        assert replicas(engine.generate(prompts(4), SAMPLING)) == [0, 1, 0, 1]
        assert engine.pop_metrics()["rollout/engine_restarts"].value == 0


def test_a_replacement_is_tried_again_whatever_its_error_but_not_for_ever():
    errors = [EngineError("vLLM does not start"), ConfigError("too little memory"), WorkerError("it hangs")]
    assert len(errors) == MAX_REPLACEMENTS
    for number in (MAX_REPLACEMENTS - 1, MAX_REPLACEMENTS):
        warnings: list[str] = []
        with (
            open_samplers(first_start_dies, size=1, errors=errors[:number], warn=warnings.append) as engine,
            engine.awake(WorkerWeights(), version=0),
        ):
            if number == MAX_REPLACEMENTS:
                with pytest.raises(WorkerError, match="it hangs\nSamplers were replaced 3 times since"):
                    engine.generate(prompts(1), SAMPLING)
            else:
                assert not engine.generate(prompts(1), SAMPLING)[0][0].is_unfinished
        reasons = ("it died", "vLLM does not start", "too little memory")
        assert warnings == [f"{reason}. Sampler 0 is replaced, and the run continues" for reason in reasons]


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


def test_the_workers_of_a_replica_whose_node_cannot_be_used_are_ended():
    """Otherwise the next attempt would wait for their place until its time limit."""

    class Start(_PoolStart):
        def start_checked(self, replica):
            report = NodeReport("host", dict.fromkeys(SAME_EVERYWHERE, "1"), "the disk is full")
            return SimpleNamespace(workers=[f"worker of {replica}"]), [report]

    ended = []
    config = Config.model_validate({"worker": {"hybrid_engine": False}})
    reserved = SimpleNamespace(end=ended.append)
    with pytest.raises(ConfigError, match="the disk is full"):
        Start(config, Path(), place_pools(config)[1], "cpu", "run", True, reserved).start(1)
    assert ended == [["worker of 1"]]


def test_an_engine_rejects_weights_of_a_kind_that_it_cannot_read():
    no_workers = WorkerGroup([], "cpu", 60.0)
    weights = WorkersTrainEngine(no_workers, regularized=False).weights()
    with pytest.raises(EngineError, match=r"in this process cannot load WorkerWeights\. Give it the weights\(\)"):
        require_local_weights(weights)
    engine = WorkersRolloutEngine(LearnerReplicas(no_workers, replica_size=1))
    with (
        pytest.raises(EngineError, match=r"of several workers cannot load LocalWeights\. Give it the weights\(\)"),
        engine.awake(LocalWeights(lambda dtype=None: iter(())), version=0),
    ):
        pass


# -- calls that hang, and long ones that do not --


class Clock:
    """Seconds, which pass while the driver waits for Ray. Replaces Ray's waits and the time.

    answering: the only rank that answers. No call ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answering: int) -> None:
        heartbeat = SimpleNamespace(memory_bytes=2**30, max_memory_bytes=2**31)
        self.now, self.answering, self.answers = 0.0, answering, {"heartbeat": heartbeat, "stack": "the stack\n"}
        monkeypatch.setattr(worker_group.ray, "wait", self.wait)
        monkeypatch.setattr(worker_group.ray, "get", lambda reference: self.answers[reference[0]])
        monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, references, *, num_returns, timeout):
        assert num_returns == len(references)
        self.now += timeout
        return [each for each in references if each[0] in self.answers and each[1] == self.answering], []


def group_of(num_ranks: int) -> WorkerGroup:
    def actor(rank):
        names = ("generate", "heartbeat", "stack")
        return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *_, name=name: (name, rank)) for name in names})

    handles = [WorkerHandle(rank, "host", 1, actor(rank), is_local=False) for rank in range(num_ranks)]
    return WorkerGroup(handles, "cpu", 60.0)


def test_the_ranks_that_do_not_answer_are_waited_for_together(monkeypatch):
    clock = Clock(monkeypatch, answering=5)
    call = group_of(24).call(Worker.generate, None, 1, per_rank=[None] * 24, phase="update")
    call.wait()
    text = str(call.error)
    assert clock.now < 60 + 10  # the watchdog kills the run a minute after the deadline of the call
    assert text.count("does not respond") == 23
    assert "rank 5 on host (process 1), last seen with 1.0 GiB (at most 2.0 GiB) is in\nthe stack\n" in text


class Finished:
    """Reports a further completion every half minute, for some time. See HeartbeatListener."""

    def __init__(self, clock, until):
        self.clock, self.until, self.num_received = clock, until, 0

    def request(self):
        return 0, 0

    def receive(self, heartbeat):
        num_finished = min(self.clock.now, self.until) // 30
        before, self.num_received = self.num_received, num_finished
        return num_finished > before


@pytest.mark.parametrize("until", [0.0, 600.0])
def test_a_call_that_samples_for_a_long_time_ends_only_without_progress(monkeypatch, until):
    """As with algorithm.max_staleness above 1, where one call may take several steps."""
    clock = Clock(monkeypatch, answering=0)
    listener = Finished(clock, until)
    call = group_of(1).call(Worker.generate, None, 1, per_rank=[None], phase="rollout", listener=listener)
    call.wait()
    assert until + 60 <= clock.now <= until + 70
    assert ("rollout made no progress for 60 s" if until else "was not done after 60 s") in str(call.error)
