"""The engine of samplers over real Ray processes and real transfers, with fake engines: failures.

One learner, and two replicas of two ranks. Each test leaves all replicas alive.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from ray import cloudpickle

from trigon.distributed.cluster import Layout, check_total, open_cluster, reserve
from trigon.distributed.engines import WorkerWeights
from trigon.distributed.rollout_engine import WorkersRolloutEngine
from trigon.distributed.samplers import SamplerPool, SamplerReplicas
from trigon.distributed.weight_transfer import TransferMember
from trigon.distributed.worker import Worker, WorkerEngines, ray_actor_class
from trigon.distributed.worker_group import Call, WorkerGroup
from trigon.errors import (
    ConfigError,
    LostWorkerError,
    RewardError,
    RolloutError,
)
from trigon.rollout.episodes import newest_draw
from trigon.rollout.protocol import Interruption, Until
from trigon.training.parallel import SingleProcess
from trigon.types import Completion, LocalWeights, Prompt, SamplingParams

pytestmark = pytest.mark.extended

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)
NUM_TENSORS = 4


class CountingTrainer:
    """A trainer whose weights are the number of updates, each tensor with another shape."""

    def __init__(self) -> None:
        self.updates = 0

    def weights(self):
        def read(dtype=None):
            for number in range(NUM_TENSORS):
                yield f"weights.{number}", torch.full((number + 1, 3), float(self.updates), dtype=dtype)

        return LocalWeights(read)


class EchoEngine:
    """A rollout engine that repeats each prompt with its weights, and fails as a file says.

    The file has "<step, 'sync' or 'synced'> <how>" and is removed by the rank that fails: in the
    middle of the weights, or after them. Weights of the version that it has are not read again.
    """

    def __init__(self, faults: Path) -> None:
        self.faults = faults
        self.value: float | None = None
        self.version: int | None = None

    def fail(self, when: str) -> None:
        try:
            planned, how = self.faults.read_text().split(maxsplit=1)
        except FileNotFoundError:
            return
        if planned != when:
            return
        try:
            self.faults.rename(self.faults.with_suffix(".done"))
        except FileNotFoundError:
            return
        match how:
            case "die later":  # when others are done
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "rollout":
                raise RolloutError("the engine has failed")

    @contextmanager
    def awake(self, weights, *, version):
        if version == self.version:
            yield
            return
        self.version = None
        received = {}
        for name, tensor in weights.read(torch.bfloat16):
            received[name] = tensor
            if len(received) == 2:
                self.fail("sync")
        assert len(received) == NUM_TENSORS
        assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}
        [self.value] = {float(value) for tensor in received.values() for value in tensor.flatten()}
        self.fail("synced")
        self.version = version
        yield

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        """With until, end the first prompt at once, and stop as soon as the call is interrupted."""
        rows = []
        for index, prompt in enumerate(prompts if until is None else prompts[:1]):
            if index == 1:
                self.fail(str(newest_draw(prompts)))
            rows.append(
                [Completion((*prompt.token_ids, int(self.value)), (-0.5,) * 2, "stop", "", newest_draw(prompts))]
                * sampling.n
            )
            if on_progress is not None:
                on_progress(sampling.n)
            if on_group is not None:
                on_group(index, rows[-1])
        if until is None:
            return rows
        self.fail(str(newest_draw(prompts)))
        while until.interrupted is None:
            time.sleep(0.01)
        begun = [[tuple(each.token_ids) for each in row] or [()] * sampling.n for row in until.begun[1:]]
        return rows + [
            [
                Completion((*each, int(self.value)), (-0.5,) * (len(each) + 1), "unfinished", "", newest_draw(prompts))
                for each in row
            ]
            for row in begun
        ]

    num_replicas = 1

    def close(self):
        pass

    def pop_metrics(self):
        return {}


class TestWorker(Worker):
    """A worker with fake engines, without torch.distributed."""

    __test__ = False

    def open_fakes(self, faults: Path | None) -> None:
        self._process_group = SingleProcess()
        self._transfer = TransferMember(torch.device("cpu"))
        engine, trainer = (None, CountingTrainer()) if faults is None else (EchoEngine(faults), None)
        self._engines = WorkerEngines(trainer, None, engine, None, replica_rank=self._rank)

    def update(self) -> None:
        self._trainer.updates += 1

    def value(self) -> float | None:
        return self._rollout.value


class Starts:
    """Starts replicas of two ranks. See StartReplica."""

    def __init__(self, reserved, run_name: str, faults: Path) -> None:
        self.reserved, self.run_name, self.faults = reserved, run_name, faults

    def start(self, replica: int) -> WorkerGroup:
        role = f"sampler {replica}"
        places = range(2 * replica, 2 * replica + 2)
        actor_class = ray_actor_class(TestWorker)
        workers = self.reserved.start(places, actor_class, self.run_name, loopback=True, role=role, seconds=300)
        return WorkerGroup(workers, "cpu", 300.0, role=role)

    def end(self, group: WorkerGroup) -> None:
        self.reserved.end(group.workers)

    def give_up(self) -> None:
        self.reserved.give_up()

    def open(self, group: WorkerGroup) -> Call[None]:
        return group.call(TestWorker.open_fakes, self.faults, phase="load")


@contextmanager
def no_phase(name: str, *, total: int | None = None) -> Iterator[Callable[[int | None], None]]:
    yield lambda _: None


class Pools:
    """Both pools with their engine, which the tests share."""

    def __init__(self, learners: WorkerGroup, samplers: SamplerPool, starts: Starts, warnings: list[str]) -> None:
        self.learners, self.samplers, self.starts, self.warnings = learners, samplers, starts, warnings
        self.engine = WorkersRolloutEngine(SamplerReplicas(learners, samplers, loopback=True, phase=no_phase))
        self.version = 0

    def plan_fault(self, when: str, how: str) -> None:
        self.starts.faults.write_text(f"{when} {how}")
        self.warnings.clear()

    def learn(self) -> None:
        self.learners.call(TestWorker.update, phase="update").result()
        self.version += 1

    def values(self) -> list[float]:
        return [
            value
            for replica in self.samplers.alive
            for value in replica.workers.call(TestWorker.value, phase="value").result()
        ]

    def sample(self, *, step: int = 1, num_prompts: int = 5) -> list[tuple[int, int, int]]:
        """Return (prompt, weights, replica) of each prompt; each group is announced once."""
        prompts = [Prompt(f"p{i}", (i,), None, "", "", {}, (), draw=step) for i in range(num_prompts)]
        announced: list[int] = []
        progress: list[int] = []
        rows = self.engine.generate(
            prompts,
            SAMPLING,
            on_group=lambda index, _: announced.append(index),
            on_progress=lambda k: progress.append(k or 0),
        )
        assert sorted(announced) == list(range(num_prompts))
        assert sum(progress) == num_prompts * SAMPLING.n
        return [(*row[0].token_ids, row[0].replica) for row in rows]

    def stream(self, *, step: int, begun: Sequence[Sequence[Completion]], seconds: float) -> list[list[Completion]]:
        """Return the completions of a call that is interrupted after this time."""
        prompts = [Prompt(f"p{i}", (i,), None, "", "", {}, (), draw=step) for i in range(len(begun))]
        announced: list[int] = []
        interruption = Interruption()
        timer = threading.Timer(seconds, interruption.ask, ["stop"])
        timer.start()
        until = Until(len(prompts), 0, tuple(map(tuple, begun)), interruption)
        rows = self.engine.generate(prompts, SAMPLING, until=until, on_group=lambda index, _: announced.append(index))
        timer.join()
        ended = [index for index, row in enumerate(rows) if not any(each.is_unfinished for each in row)]
        assert sorted(announced) == ended
        return rows

    def expected(self, num_prompts: int = 5) -> list[tuple[int, int, int]]:
        return [(index, self.version, index % 2) for index in range(num_prompts)]

    @contextmanager
    def awake(self) -> Iterator[None]:
        with self.engine.awake(WorkerWeights(), version=self.version):
            yield


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the test
    faults = tmp_path_factory.mktemp("faults") / "fault"
    with (
        open_cluster(nodes=1, workers_per_node=5) as run_name,
        reserve(Layout(1, 1, "cpu")) as for_learners,
        reserve(Layout(1, 4, "cpu")) as for_samplers,
    ):
        learners = WorkerGroup(
            for_learners.start([0], ray_actor_class(TestWorker), run_name, loopback=True), "cpu", 300.0
        )
        learners.call(TestWorker.open_fakes, None, phase="load").result()
        starts, warnings = Starts(for_samplers, run_name, faults), []
        samplers = SamplerPool(starts, [starts.start(replica) for replica in range(2)], warn=warnings.append)
        samplers.open(starts.open)
        yield Pools(learners, samplers, starts, warnings)
        samplers.close()


def test_every_rank_of_every_replica_gets_the_weights_and_each_byte_is_sent_once(pools):
    pools.learn()
    with pools.awake():
        assert pools.values() == [1.0] * 4
        assert pools.sample() == pools.expected()
    num_values = sum(3 * (number + 1) for number in range(NUM_TENSORS))
    metrics = pools.engine.pop_metrics()
    assert metrics["moved/weights_sent_bytes"].value == 2 * num_values
    with pools.awake():  # the same version: nothing is sent
        assert pools.sample() == pools.expected()
    assert pools.engine.pop_metrics()["moved/weights_sent_bytes"].value == 0


def test_the_prompts_of_a_replica_that_dies_are_sampled_by_the_other_one(pools):
    pools.learn()
    with pools.awake():
        pools.plan_fault("7", "die")
        assert pools.sample(step=7) == pools.expected()
        assert len(pools.samplers.alive) == 1
        assert pools.sample(step=8) == pools.expected()
    with pools.awake():
        assert len(pools.samplers.alive) == 2
        assert pools.values() == [float(pools.version)] * 4
        assert pools.sample() == pools.expected()
    assert len(pools.warnings) == 1
    assert "is replaced, and the run continues" in pools.warnings[0]
    assert pools.engine.pop_metrics()["rollout/engine_restarts"].value == 1


def test_replicas_that_are_all_lost_are_replaced_while_the_learners_have_the_weights(pools):
    pools.learn()
    with pools.awake():
        pools.samplers.lose(1, LostWorkerError("it died before"))
        pools.plan_fault("9", "die")
        assert pools.sample(step=9) == pools.expected()


def test_calls_that_are_interrupted_return_what_is_begun_and_what_a_lost_replica_had_as_it_was(pools):
    pools.learn()
    with pools.awake():
        pass
    rows = pools.stream(step=20, begun=[()] * 4, seconds=0.5)  # prompts 0 and 2 on replica 0
    weights = int(pools.version)
    assert [row[0].token_ids for row in rows] == [(0, weights), (1, weights), (weights,), (weights,)]
    assert [row[0].replica for row in rows] == [0, 1, 0, 1]
    assert [row[0].is_unfinished for row in rows] == [False, False, True, True]
    again = pools.stream(step=20, begun=[rows[3], rows[3], (), ()], seconds=0.5)
    assert [row[0].replica for row in again] == [1, 1, 0, 0]  # what is begun stays where it is
    assert again[1][0].token_ids == (weights, weights)

    pools.learn()
    with pools.awake():
        pass
    pools.plan_fault("21", "die later")
    begun = [rows[2], (), rows[2], rows[3], (), ()]  # of replica 0 and 1 in turn
    found = pools.stream(step=21, begun=begun, seconds=4.0)
    [alive] = [replica.number for replica in pools.samplers.alive]
    for index, (before, after) in enumerate(zip(begun, found, strict=True)):
        num_before = len(before[0].token_ids) if before else 0
        if index % 2 == alive or index < 2:  # the first of the lost replica had arrived before
            assert len(after[0].token_ids) == (2 if index < 2 else num_before + 1)
        else:
            assert {len(each.token_ids) for each in after} == {num_before}
            assert all(each.is_unfinished for each in after)
    pools.samplers.lose(alive, LostWorkerError("it died"))
    none = pools.stream(step=22, begun=begun[:3], seconds=0.0)  # without a replica
    assert [len(row[0].token_ids) for row in none] == [1, 0, 1]
    with pools.awake():
        assert pools.sample() == pools.expected()


def test_an_error_of_what_gets_the_groups_interrupts_the_replicas(pools):
    pools.learn()
    with pools.awake():
        pass
    announced = []

    def fail_later(index, completions):
        announced.append(index)
        if len(announced) == 2:  # both replicas sample
            raise RewardError("as asked")

    prompts = [Prompt(f"p{i}", (i,), None, "", "", {}, ()) for i in range(4)]
    until = Until(4, interruption=Interruption())
    with pytest.raises(RewardError, match="as asked"):
        pools.engine.generate(prompts, SAMPLING, until=until, on_group=fail_later)
    assert until.interrupted is None
    with pools.awake():  # waits for the calls, which would not end
        assert pools.sample() == pools.expected()


@pytest.mark.long(cases=["rollout"])
@pytest.mark.parametrize("how", ["die", "rollout"])
def test_a_replica_that_is_lost_during_a_weight_sync_is_replaced(pools, how):
    pools.learn()
    pools.plan_fault("sync", how)
    with pools.awake():
        assert pools.values() == [float(pools.version)] * 4
        assert pools.sample() == pools.expected()
    assert pools.warnings


@pytest.mark.long
def test_weights_are_not_sent_again_to_a_replica_that_has_them_when_another_one_is_lost(pools):
    pools.learn()
    pools.plan_fault("synced", "die later")
    pools.engine.pop_metrics()
    with pools.awake():
        assert pools.values() == [float(pools.version)] * 4
        assert pools.sample() == pools.expected()
    assert len(pools.warnings) == 1
    assert pools.engine.pop_metrics()["rollout/engine_restarts"].value == 1
    pools.learn()  # the next weights go to both again
    with pools.awake():
        assert pools.sample() == pools.expected()


@pytest.mark.long
def test_a_replica_that_dies_while_it_is_idle_is_replaced_before_the_next_sampling(pools):
    os.kill(pools.samplers.group(1).workers[1].pid, signal.SIGKILL)
    pools.learn()
    with pools.awake():
        assert pools.sample() == pools.expected()
    os.kill(pools.samplers.group(0).workers[0].pid, signal.SIGKILL)
    pools.warnings.clear()
    pools.engine.pop_metrics()  # as after a step, with a dead replica
    with pools.awake():
        assert pools.sample() == pools.expected()
    assert "sampler 0 rank 0" in pools.warnings[0]


@pytest.mark.long
def test_a_replica_that_dies_before_it_connects_holds_the_others_up_for_seconds_only(pools):
    pools.learn()
    pools.samplers.lose(1, LostWorkerError("it died before"))
    pools.samplers.replace_lost(no_phase)
    killed = pools.samplers.group(1).workers[0].pid
    timer = threading.Timer(0.0, partial(os.kill, killed, signal.SIGKILL))
    timer.start()
    with pools.awake():
        assert pools.values() == [float(pools.version)] * 4
        assert pools.sample() == pools.expected()
    timer.join()


def test_pools_for_which_the_cluster_is_too_small_together_are_refused_at_once(pools):
    available = int(ray.cluster_resources()["CPU"])
    layouts = [Layout(1, available, "cpu"), Layout(1, 1, "cpu")]
    expected = rf"a.nodes=1 x a.gpus={available} and b.nodes=1 x b.gpus=1 ask for {available + 1} workers at the same"
    with pytest.raises(ConfigError, match=expected):
        check_total(layouts, [("a.nodes", "a.gpus"), ("b.nodes", "b.gpus")])
    check_total(layouts[:1], [("a.nodes", "a.gpus")])
