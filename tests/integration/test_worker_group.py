"""WorkerGroup and WorkersRolloutEngine over real Ray processes: progress and error reports.

The workers are started once and serve the tests in the order of this file; the tests at its end
kill one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from support.clusters import start_workers
from support.processes import descendants
from support.sockets import listeners
from trigon.distributed.cluster import Layout, WorkerHandle, open_cluster
from trigon.distributed.engines import WorkersTrainEngine
from trigon.distributed.messages import pack
from trigon.distributed.rollout_engine import LearnerReplicas, WorkersRolloutEngine
from trigon.distributed.worker import Worker, WorkerEngines, ray_actor_class
from trigon.distributed.worker_group import WorkerGroup
from trigon.environments.pool import EnvironmentPool
from trigon.environments.source import EnvironmentSettings, find_environment
from trigon.errors import CheckpointError, EngineError, LostWorkerError, PeerError, TrigonError, WorkerError
from trigon.metrics import Sum
from trigon.system.stopping import SameCommand
from trigon.types import (
    Completion,
    EncodedMedia,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    TokenLogprobs,
    TrainGroup,
    TrainSequence,
)

pytestmark = pytest.mark.extended

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)


class EchoEngine:
    """A rollout engine that repeats each prompt once a file with the prompt's name exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version: int | None = None

    @contextmanager
    def awake(self, weights, *, version):
        self.version = version
        yield
        self.version = None

    def generate(self, prompts, sampling, *, until=None, on_progress=None, on_group=None):
        rows = []
        for index, prompt in enumerate(prompts):
            while not (self.folder / prompt.prompt_id).exists():
                time.sleep(0.05)
            ids = (*prompt.token_ids, prompt.draw)
            is_lost = prompt.prompt_id == "lost"
            rows.append([] if is_lost else [Completion(ids, (-0.5,) * len(ids), "stop", "é", 3)] * sampling.n)
            if on_progress is not None:
                on_progress(sampling.n)
            if on_group is not None:
                on_group(index, rows[-1])
        return rows


class StubTrainer:
    """A trainer without weights, which computes with the bytes of the prompts' files."""

    def weights(self):
        return iter(())

    def logprobs(self, groups):
        return [
            [torch.tensor([float(sum(map(sum, group.prompt.vision.encoded)))]) for _ in group.rollouts]
            for group in groups
        ]

    def step(self, groups, outputs):
        for index in outputs:
            number = torch.tensor([float(sum(map(sum, groups[index].prompt.vision.encoded)))])
            outputs[index] = [TokenLogprobs(number, -number, None)]
        return {"files": Sum(float(sum(sum(map(sum, group.prompt.vision.encoded)) for group in groups)))}


class TestWorker(Worker):
    """A worker that fails on request, or samples with an EchoEngine."""

    __test__ = False

    def open_echo_engine(self, folder: Path, replica_size: int) -> None:
        replica_rank = self._rank % replica_size
        self._engines = WorkerEngines(StubTrainer(), None, EchoEngine(folder), None, replica_rank=replica_rank)

    def awake_version(self) -> int | None:
        return self._require_engines.rollout.version

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def double(self, number: int, offset: int) -> int:
        return 2 * number + offset

    def fail(self, how: str, until: Path) -> None:
        match how, self._rank:
            case "trigon error", 1:
                raise CheckpointError("there is no weights/")
            case "peer's error", 0:
                raise PeerError("rank 1: there is no weights/")
            case "peer's error", 1:
                time.sleep(0.5)
                raise CheckpointError("there is no weights/")
            case "other error", 1:
                raise KeyError("surprise")
            case "hang", 1:
                self.wait_for(until)
            case "peer dies", 0:
                raise RuntimeError("connection closed by peer")
            case "peer dies", 1:
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)

    def hang_in_c(self) -> None:
        """Hang with the interpreter lock, so that no thread of this process runs Python code."""
        mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    def begin_episode(self, folder: Path) -> None:
        pool = EnvironmentPool(EnvironmentSettings(environment=find_environment(f"{folder}/slow.py:Slow")))
        self._engines = WorkerEngines(None, None, None, None, replica_rank=0, environments=pool)
        pool.start(0, {"folder": str(folder)})
        while not pool.poll(1.0):
            pass

    def wait_for(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.1)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerHandle]]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file
    with open_cluster(nodes=1, workers_per_node=3) as run_name:  # one is for a test that starts its own
        layout = Layout(nodes=1, workers_per_node=2, device="cpu")
        with start_workers(layout, ray_actor_class(TestWorker), run_name) as started:
            yield started
        assert not any(Path(f"/proc/{worker.pid}").exists() for worker in started)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def worker_group(workers: list[WorkerHandle]) -> WorkerGroup:
    same_command = SameCommand(Path("/runs/x"), finds_last=False)
    return WorkerGroup(workers, "cpu", deadline_seconds=60.0, same_command=same_command)


def failure(workers: list[WorkerHandle], how: str) -> TrigonError:
    """Make workers fail in the phase "update", and return the error that the driver raises."""
    with pytest.raises(TrigonError) as caught:
        WorkerGroup(workers, "cpu", deadline_seconds=60.0).call(
            TestWorker.fail, how, Path("/"), phase="update"
        ).result()
    return caught.value


def test_results_are_in_the_order_of_ranks_and_arguments_the_same_for_all_or_one_for_each(worker_group):
    assert worker_group.call(TestWorker.rank, phase="rank").result() == [0, 1]
    assert worker_group.call(TestWorker.double, 3, 1, phase="double").result() == [7, 7]
    assert worker_group.call(TestWorker.double, 1, per_rank=[3, 5], phase="double").result() == [7, 11]
    with pytest.raises(AssertionError):
        worker_group.call(TestWorker.double, 1, per_rank=[3], phase="double").result()


def make_prompts(*names: str, draw: int = 0) -> list[Prompt]:
    return [
        Prompt(name, (number, 2, 3), None, text="", ground_truth="", row={}, image_refs=(), draw=draw)
        for number, name in enumerate(names, 1)
    ]


@pytest.mark.parametrize("replica_size", [1, 2])
def test_finished_groups_arrive_while_others_are_still_sampled(worker_group, tmp_path, replica_size):
    engine, _ = open_engine(worker_group, tmp_path, replica_size)
    prompts = make_prompts("first", "second", "lost", "late", "last", "very last", draw=7)
    for name in ("first", "second", "lost"):
        (tmp_path / name).touch()
    received, progress = {}, []

    def on_group(index, row):
        assert index not in received
        received[index] = row
        if {0, 1, 2} <= received.keys():  # the other prompts are only sampled after these have arrived
            for name in ("late", "last", "very last"):
                (tmp_path / name).touch()

    rows = engine.generate(prompts, SAMPLING, on_progress=progress.append, on_group=on_group)
    assert [[completion.token_ids for completion in row] for row in rows] == [
        [] if number == 3 else [(number, 2, 3, 7)] * 2 for number in range(1, 7)
    ]
    assert received == dict(enumerate(rows))
    assert engine.num_replicas == 2 // replica_size
    assert [{completion.replica for completion in row} for row in rows] == [
        set() if index == 2 else {index % engine.num_replicas} for index in range(6)
    ]
    assert sum(filter(None, progress)) == 12
    assert 0 not in progress  # that a worker answers is no progress
    # Each group was sent once.
    num_bytes = worker_group.traffic.pop_metrics()["moved/received_bytes"].value
    assert num_bytes <= sum(pack(row).num_bytes for row in rows)
    # A heartbeat for a generation that has not begun does not include the previous one.
    heartbeats = worker_group.call(Worker.heartbeat, 2, 0, phase="heartbeat").result()
    assert [(heartbeat.num_samples, heartbeat.groups) for heartbeat in heartbeats] == [(0, ())] * 2
    second_rows = engine.generate([replace(prompt, draw=8) for prompt in prompts[:3]], SAMPLING)
    assert [[completion.token_ids[-1] for completion in row] for row in second_rows] == [[8, 8], [8, 8], []]


def with_file(prompt: Prompt, number: int) -> Prompt:
    file = bytes([number]) * 10_000
    return replace(prompt, vision=EncodedMedia((file,), (f"hash {number}",)))


@pytest.mark.parametrize("replica_size", [1, 2])
def test_a_file_is_sent_once_to_each_worker_that_needs_it(worker_group, tmp_path, replica_size):
    """Real messages to real workers; moved/*_bytes counts them."""
    engine, trainer = open_engine(worker_group, tmp_path, replica_size)
    prompts = [with_file(prompt, number) for number, prompt in enumerate(make_prompts("first", "second", "a", "b"), 1)]
    for prompt in prompts:
        (tmp_path / prompt.prompt_id).touch()

    def num_files_sent() -> dict[str, int]:
        """Return the number of files in the messages of each phase, of 10,000 bytes each."""
        metrics = worker_group.traffic.pop_metrics()
        return {key: round(metric.value / 10_000) for key, metric in metrics.items() if metric.value > 5_000}

    rollouts = [
        RolloutGroup(prompt, tuple(Rollout(completion, Score(0.0, {}, "ok", "")) for completion in row))
        for prompt, row in zip(prompts, engine.generate(prompts, SAMPLING), strict=True)
    ]
    assert num_files_sent() == {"moved/sent_bytes": 4, "moved/rollout_bytes": 4}
    engine.generate(prompts, SAMPLING)
    assert num_files_sent() == {}

    # Groups are dealt in another way than prompts: a rank may need files of another rank.
    expected = [[torch.tensor([10_000.0 * number])] * SAMPLING.n for number in range(1, 5)]
    assert trainer.logprobs(rollouts) == expected
    first = num_files_sent()
    assert first.get("moved/logprobs_bytes", 0) <= (4 if replica_size == 1 else 0)
    assert trainer.logprobs(rollouts) == expected
    assert num_files_sent() == {}
    values = torch.ones(4)
    sequence = TrainSequence((1, 2, 3, 4), values, values, values, None, None)
    outputs = dict.fromkeys((1, 3))
    metrics = trainer.step([TrainGroup(prompt, (sequence,)) for prompt in prompts], outputs)
    assert metrics["files"].value == 10_000.0 * (1 + 2 + 3 + 4)
    for index, number in ((1, 2.0), (3, 4.0)):  # of the group with this index, whichever rank has it
        [output] = outputs.pop(index)
        assert (output.logprobs.tolist(), output.entropy.tolist()) == ([10_000.0 * number], [-10_000.0 * number])
    assert not outputs
    twice = [replace(prompt, prompt_id=f"{prompt.prompt_id} again") for prompt in prompts]
    for prompt in twice:
        (tmp_path / prompt.prompt_id).touch()
    engine.generate(twice, SAMPLING)  # other prompts with the same files
    assert num_files_sent() == {}


def open_engine(
    worker_group: WorkerGroup, folder: Path, replica_size: int = 1
) -> tuple[WorkersRolloutEngine, WorkersTrainEngine]:
    worker_group.call(TestWorker.open_echo_engine, folder, replica_size, phase="open").result()
    return (
        WorkersRolloutEngine(LearnerReplicas(worker_group, replica_size=replica_size)),
        WorkersTrainEngine(worker_group, regularized=False),
    )


def test_workers_sleep_after_the_context_also_if_an_error_ends_it_while_others_sample(worker_group, tmp_path):
    engine, trainer = open_engine(worker_group, tmp_path)

    def versions() -> list[int | None]:
        return worker_group.call(TestWorker.awake_version, phase="version").result()

    with engine.awake(trainer.weights(), version=5):
        assert versions() == [5, 5]
    assert versions() == [None, None]

    def on_group(index, row):
        raise EngineError(f"stopped at {index}")

    (tmp_path / "first").touch()
    with pytest.raises(EngineError, match="stopped at 0"), engine.awake(trainer.weights(), version=6):
        engine.generate(make_prompts("first", "second", "third"), SAMPLING, on_group=on_group)
    for name in ("second", "third"):  # until now, both workers were sampling
        (tmp_path / name).touch()
    assert versions() == [None, None]
    rows = engine.generate(make_prompts("third", "second", draw=2), SAMPLING)
    assert [[completion.token_ids for completion in row] for row in rows] == [[(1, 2, 3, 2)] * 2, [(2, 2, 3, 2)] * 2]


@pytest.mark.parametrize(
    ("how", "kind", "facts"),
    [
        ("trigon error", CheckpointError, ("there is no weights/",)),
        ("peer's error", CheckpointError, ("there is no weights/",)),
        ("other error", WorkerError, ("in fail", "KeyError: 'surprise'")),
    ],
)
def test_an_error_has_the_rank_whose_it_is_and_its_own_type_or_its_traceback(workers, how, kind, facts):
    error = failure(workers, how)
    assert type(error) is kind
    assert str(error).startswith(f"rank 1 on {workers[1].host} (process {workers[1].pid}), in update: ")
    assert all(fact in str(error) for fact in facts)


def test_a_call_that_hangs_ends_at_its_deadline_with_the_stack_of_the_worker(workers, worker_group, tmp_path):
    with pytest.raises(WorkerError, match=r"^joining was not done after 2 s; ranks \[1\] of 2 hang:") as caught:
        worker_group.call(
            TestWorker.fail, "hang", tmp_path / "released", phase="joining", max_deadline_seconds=2.0
        ).result()
    (tmp_path / "released").touch()
    assert "in wait_for\n" in str(caught.value)


@pytest.mark.faults
def test_no_server_of_ray_answers_without_the_token(workers):
    grpc = pytest.importorskip("grpc")
    services = {
        "gcs_server": "NodeInfoGcsService/GetAllNodeInfo",
        "raylet": "NodeManagerService/GetNodeStats",
        "raylet, objects": "ObjectManagerService/Push",
        "driver and workers": "CoreWorkerService/PushTask",
    }
    found = listeners([os.getpid(), *descendants(os.getpid())])
    assert all(each.is_local for each in found)
    codes: dict[int, dict[str, str]] = {}
    for port in {each.port for each in found}:
        codes[port] = {}
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, method in services.items():
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=20)
                codes[port][name] = caught.value.code().name
    # Two servers speak HTTP: of metrics, and of runtime environments.
    servers = [each for each in codes.values() if not set(each.values()) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}]
    assert len(servers) >= 6, codes  # one of gcs_server, two of the raylet, the driver, two workers
    for each in servers:
        # It does not know the services of the others.
        assert sorted(each.values()) == ["UNAUTHENTICATED"] + 3 * ["UNIMPLEMENTED"], codes
    assert {name for each in servers for name in each if each[name] == "UNAUTHENTICATED"} == services.keys()


SLOW = """
import time
from pathlib import Path

class Slow:
    def reset(self, row):
        self.folder = row["folder"]

    def step(self, action):
        return "", False

    def close(self):
        time.sleep(0.3)
        Path(self.folder, "closed").touch()
"""


@pytest.mark.faults
def test_environments_are_closed_before_their_worker_is_killed(workers, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with start_workers(Layout(1, 1, "cpu"), ray_actor_class(TestWorker), "trigon-test") as others:
        group = WorkerGroup(others, "cpu", deadline_seconds=60.0)
        group.call(TestWorker.begin_episode, tmp_path, phase="rollout").result()
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()


@pytest.mark.faults
def test_the_rank_that_died_is_named_rather_than_the_rank_that_failed_first(worker_group, workers, tmp_path):
    engine, trainer = open_engine(worker_group, tmp_path)
    # Within awake(): that the dead worker cannot be put to sleep does not replace the first error.
    with pytest.raises(WorkerError) as caught, engine.awake(trainer.weights(), version=5):
        worker_group.call(TestWorker.fail, "peer dies", Path("/"), phase="update").result()
    error = caught.value
    assert type(error) is LostWorkerError
    assert str(error).startswith("rank 1 on ")
    assert "in update: the process died" in str(error)
    assert "Also failed: rank 0" in str(error)
    continuation = "the same command with trainer.load_checkpoint_path=/runs/x/global_step_... continues from the last"
    assert f"All other workers were stopped; {continuation} checkpoint" in str(error)
    survivor = WorkerGroup(workers[:1], "cpu", deadline_seconds=60.0)
    assert survivor.call(TestWorker.awake_version, phase="version").result() == [None]


@pytest.mark.faults
def test_the_stacks_of_a_worker_that_hangs_in_c_code_are_in_a_file(workers, tmp_path):
    file = tmp_path / "hang_stacks.txt"
    survivor = WorkerGroup(workers[:1], "cpu", deadline_seconds=3.0, stacks_file=file)
    with pytest.raises(WorkerError) as caught:
        survivor.call(TestWorker.hang_in_c, phase="update").result()
    assert "update was not done after 3 s (trainer.worker_timeout_seconds); ranks [0] of 1" in str(caught.value)
    assert "does not respond: its process is stopped, or blocked outside of Python" in str(caught.value)
    assert f"The stacks of all processes on this machine are in {file}" in str(caught.value)
    _, _, stacks = file.read_text().partition(f"== process {workers[0].pid}: ray::")
    assert "in hang_in_c" in stacks.partition("== process")[0]
    assert "in _write_stacks" in file.read_text()  # the driver
