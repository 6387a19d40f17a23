"""What the driver hears of workers, and says of those that fail, with real Ray processes that do as they are told.

They are started once and serve one test after the other, in the order of this file; the last one kills.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trigon.distributed.cluster import Layout, Placed, cluster, workers
from trigon.distributed.engines import WorkersRolloutEngine
from trigon.distributed.serialization import encode_completions
from trigon.distributed.worker import Worker, WorkerEngines, actor_of
from trigon.distributed.worker_group import WorkerGroup
from trigon.errors import CheckpointError, EngineError, TrigonError, WorkerError
from trigon.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.alone

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=20, ignore_eos=False, seed=7)


@pytest.fixture(scope="module")
def placed() -> Iterator[list[Placed]]:
    with cluster(nodes=1, workers_per_node=2):

        class Echo:
            """A rollout engine that repeats prompts, waiting for each until there is a file of this name."""

            def __init__(self, folder: Path) -> None:
                self.folder = folder

            def generate(self, prompts, sampling, *, step, on_progress=None, on_group=None):
                rows = []
                for index, prompt in enumerate(prompts):
                    while not (self.folder / prompt.prompt_id).exists():
                        time.sleep(0.05)
                    ids = (*prompt.token_ids, step)
                    is_lost = prompt.prompt_id == "lost"
                    rows.append([] if is_lost else [Completion(ids, (-0.5,) * len(ids), "stop", "é", 3)] * sampling.n)
                    if on_progress is not None:
                        on_progress(sampling.n)
                    if on_group is not None:
                        on_group(index, rows[-1])
                return rows

        class Odd(Worker):
            """A worker that fails as it is told, or samples what it is asked."""

            def sample_with(self, folder: Path, ranks_each: int) -> None:
                self._engines = WorkerEngines(None, None, Echo(folder), None, replica_rank=self._rank % ranks_each)

            def rank(self) -> int:
                return int(os.environ["RANK"])

            def fail(self, how: str, until: Path) -> None:
                match how, self._rank:
                    case "ours", 1:
                        raise CheckpointError("there is no weights/")
                    case "theirs", 1:
                        raise KeyError("surprise")
                    case "hang", 1:
                        self.wait_for(until)
                    case "notice", 0:
                        raise RuntimeError("connection closed by peer")
                    case "notice", 1:
                        time.sleep(1.0)
                        os.kill(os.getpid(), signal.SIGKILL)

            def wait_for(self, path: Path) -> None:
                while not path.exists():
                    time.sleep(0.1)

        with workers(Layout(nodes=1, workers_per_node=2, device="cpu"), actor_of(Odd)) as started:
            yield started
        assert not any(Path(f"/proc/{worker.pid}").exists() for worker in started)


def fail(placed: list[Placed], how: str, *, until: Path = Path("/"), deadline_seconds: float = 60.0) -> TrigonError:
    """Let workers fail, and return what the driver makes of it."""
    with pytest.raises(TrigonError) as caught:
        WorkerGroup(placed, "cpu", deadline_seconds).call_all(
            lambda actor, _: actor.fail.remote(how, until), phase="update"
        )
    return caught.value


def test_ranks_know_who_they_are(placed):
    assert WorkerGroup(placed, "cpu", 60.0).call_all(lambda actor, _: actor.rank.remote(), phase="rank") == [0, 1]


def asked(*names: str) -> list[Prompt]:
    return [
        Prompt(name, (number, 2, 3), None, text="", ground_truth="", row={}, image_refs=())
        for number, name in enumerate(names, 1)
    ]


@pytest.mark.parametrize("ranks_each", [1, 2])
def test_groups_are_heard_of_while_others_are_still_sampled(placed, tmp_path, ranks_each):
    worker_group = WorkerGroup(placed, "cpu", 60.0)
    worker_group.call_all(lambda actor, _: actor.sample_with.remote(tmp_path, ranks_each), phase="open")
    engine = WorkersRolloutEngine(worker_group, tensor_parallel_size=ranks_each)
    prompts = asked("first", "second", "lost", "late", "last", "very last")
    for name in ("first", "second", "lost"):
        (tmp_path / name).touch()
    heard, progress = {}, []

    def on_group(index, row):
        assert index not in heard
        heard[index] = row
        if {0, 1, 2} <= heard.keys():  # what is waited for is not sampled before it is heard that the others are
            for name in ("late", "last", "very last"):
                (tmp_path / name).touch()

    rows = engine.generate(prompts, SAMPLING, step=7, on_progress=progress.append, on_group=on_group)
    assert [[completion.token_ids for completion in row] for row in rows] == [
        [] if number == 3 else [(number, 2, 3, 7)] * 2 for number in range(1, 7)
    ]
    assert heard == dict(enumerate(rows))
    assert sum(progress) == 12
    # Each group has travelled once, and costs the same however it is put together with others.
    received = worker_group.traffic.pop_metrics()["moved/received_bytes"].value
    assert received == sum(len(encode_completions([row])) for row in rows)
    # Who asks for a generation that has not begun is not told of the one before.
    later = worker_group.call_all(lambda actor, _: actor.heartbeat.remote(generation=2), phase="look")
    assert [(heartbeat.samples, heartbeat.groups) for heartbeat in later] == [(0, ())] * 2
    again = engine.generate(prompts[:3], SAMPLING, step=8)
    assert [[completion.token_ids[-1] for completion in row] for row in again] == [[8, 8], [8, 8], []]


def test_who_does_not_want_to_hear_any_more_ends_the_call(placed, tmp_path):
    worker_group = WorkerGroup(placed, "cpu", 60.0)
    worker_group.call_all(lambda actor, _: actor.sample_with.remote(tmp_path, 1), phase="open")
    (tmp_path / "first").touch()

    def refuse(index, row):
        raise EngineError(f"enough of {index}")

    engine = WorkersRolloutEngine(worker_group, tensor_parallel_size=1)
    with pytest.raises(EngineError, match="enough of 0"):
        engine.generate(asked("first", "second", "third"), SAMPLING, step=1, on_group=refuse)
    for name in ("second", "third"):
        (tmp_path / name).touch()  # or they would wait for ever
    rows = engine.generate(asked("third", "second"), SAMPLING, step=2)
    assert [[completion.token_ids for completion in row] for row in rows] == [[(1, 2, 3, 2)] * 2, [(2, 2, 3, 2)] * 2]


def test_an_error_of_ours_keeps_its_type_and_gets_the_rank(placed):
    error = fail(placed, "ours")
    assert type(error) is CheckpointError
    host = f"{placed[1].host} (process {placed[1].pid})"
    assert str(error) == f"rank 1 on {host}, in update: there is no weights/"


def test_an_error_that_nobody_expected_comes_with_its_traceback(placed):
    error = fail(placed, "theirs")
    assert type(error) is WorkerError
    assert str(error).startswith("rank 1 on ")
    assert "in fail" in str(error)
    assert "KeyError: 'surprise'" in str(error)


def test_a_hang_ends_at_the_deadline_with_the_stack_of_who_hangs(placed, tmp_path):
    started = time.monotonic()
    said = str(fail(placed, "hang", until=tmp_path / "released", deadline_seconds=3.0))
    (tmp_path / "released").touch()
    assert time.monotonic() - started < 30
    assert said.startswith("update was not done after 3 s (trainer.worker_timeout_seconds); ranks [1] of 2 hang:")
    assert "in wait_for\n" in said


def test_who_died_is_named_not_who_noticed_first(placed):
    error = fail(placed, "notice")
    assert type(error) is WorkerError
    assert str(error).startswith("rank 1 on ")
    assert "in update: the process died" in str(error)
    assert "Failing with it: rank 0" in str(error)
