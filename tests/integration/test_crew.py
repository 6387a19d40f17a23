"""What the driver says of workers that fail, with real Ray processes that do nothing but fail.

They are started once and fail one test after the other, in the order of this file; the last one kills.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trigon.distributed.cluster import Layout, Placed, cluster, workers
from trigon.distributed.crew import Crew
from trigon.distributed.worker import Worker, actor_of
from trigon.errors import CheckpointError, TrigonError, WorkerError

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def placed() -> Iterator[list[Placed]]:
    with cluster(nodes=1, workers_per_node=2):

        class Odd(Worker):
            """A worker that fails as it is told."""

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
        Crew(placed, "cpu", deadline_seconds).all(lambda actor, _: actor.fail.remote(how, until), phase="update")
    return caught.value


def test_ranks_know_who_they_are(placed):
    assert Crew(placed, "cpu", 60.0).all(lambda actor, _: actor.rank.remote(), phase="rank") == [0, 1]


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
