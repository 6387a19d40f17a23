"""A save by a driver and two ranks, one of which is killed at each of its calls, in turn.

Run as a module, in a process that has the library of faulty_disk.py:

    python -m support.crash_ranks MODEL FOLDER WORK MOST_OF_RANK MOST_OF_DRIVER

As in a run with workers, the driver has the checkpoint store, and the ranks, which are processes of
their own with a real engine on gloo, write their shards when they are told to. All of them are
forked for each attempt from a process that has imported everything. MOST_OF_...: how many attempts
to make for a process, spread evenly over its calls. Prints what was done, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from support.crash_points import check_run, fail, marked, save
from support.engines import make_engine, make_rollouts, to_train
from support.faulty_disk import FaultyDisk, check_order, lose_unsynced
from trigon.checkpoint.store import CheckpointStore
from trigon.errors import WorkerError
from trigon.models.load import copy_side_files
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import Sharding

Role = Literal["driver", "rank 0", "rank 1"]
ROLES: tuple[Role, ...] = ("driver", "rank 0", "rank 1")

KINDS = ("it alone", "half a write", "all at once", "without power")
"""Which processes are killed: the one with the call, also in the middle of a write; all, and then
the machine loses power."""

ALONE = KINDS[:2]

ENDED = 3
"""Exit status of a driver that ends since a rank died."""

DEADLINE_SECONDS = 120
SHARDING = Sharding(
    full_shard=True,
    ranks_per_copy=None,
    param_dtype=torch.float32,
    reduce_dtype=torch.float32,
    cpu_offload=False,
)


class Attempts:
    """Makes attempts. top: has before/, the run folder as it is before each, and gets now/."""

    def __init__(self, engine: LocalTrainEngine, model: Path, top: Path, work: Path) -> None:
        self._engine = engine
        self._model = model
        self._before = top / "before"
        self._now = top / "now"
        self._rendezvous = work / "rendezvous"
        self._disk = FaultyDisk(self._now, work)

    def run(self, *, most_of_rank: int, most_of_driver: int) -> dict[str, Any]:
        """Kill each process at its calls, and check what is left."""
        report: dict[str, Any] = {}
        for role in ROLES:
            most = most_of_driver if role == "driver" else most_of_rank
            status = self._attempt(role, 0)
            calls = self._disk.calls_counted()
            published = check_order(self._disk.calls())
            assert status == 0, (role, status)
            assert self._check("nothing was killed") == "new"
            attempts = dict.fromkeys(KINDS, 0)
            outcomes: dict[str, int] = {}
            kinds_of = [[kind for kind in KINDS if kind != "half a write" or call[0] == "write"] for call in calls]
            places = [(number, kind) for number, kinds in enumerate(kinds_of, start=1) for kind in kinds]
            for number, kind in places if len(places) <= most else _spread(kinds_of, most):
                place = f"{role} killed ({kind}) at call {number} of {len(calls)}: {calls[number - 1]}"
                status = self._attempt(role, number, kind)
                assert status == (ENDED if kind in ALONE and role != "driver" else -signal.SIGKILL), (place, status)
                if kind == "without power":
                    lose_unsynced(self._disk.calls_made())
                outcome = self._check(place)
                assert outcome == "old" or role == "driver", place
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                attempts[kind] += 1
            counts = {name: sum(call[0] == name for call in calls) for name in sorted({call[0] for call in calls})}
            report[role] = {"calls": counts, "places": len(places), "attempts": attempts, "outcomes": outcomes}
            assert published == 2, "the checkpoint, and the tracker"
        return report

    def _check(self, place: str) -> str:
        """Check as check_run does, and that the last checkpoint can be loaded."""
        latest = CheckpointStore(self._now, keep=1, warn=fail).latest()
        assert latest is not None, place
        self._engine.load_state(latest.actor)
        return check_run(self._engine, self._model, self._now, place)

    def _attempt(self, role: Role, number: int, kind: str = KINDS[0]) -> int:
        """Save in processes of which one is killed at a call; 0: none.

        Returns: the exit status of the driver, or the negative number of a signal.
        """
        shutil.rmtree(self._now, ignore_errors=True)
        shutil.copytree(self._before, self._now, copy_function=os.link)
        self._rendezvous.unlink(missing_ok=True)
        sys.stdout.flush()
        self._disk.kill_at(number, torn=kind == "half a write", alone=kind in ALONE, process=-1)
        driver = _fork(lambda: self._drive(role))
        os.setpgid(driver, driver)
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            with suppress(ChildProcessError):  # until there is none; ranks of a dead driver are adopted
                while True:
                    assert time.monotonic() < deadline, f"processes are left after {role} was killed at call {number}"
                    process, status = os.waitpid(-1, os.WNOHANG)
                    statuses[process] = status
                    time.sleep(0 if process else 0.002)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver, signal.SIGKILL)
        self._disk.stop()
        return os.waitstatus_to_exitcode(statuses[driver])

    def _drive(self, role: Role) -> int:
        """Save step 3 as the driver of a run does, and return the exit status."""
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is stopped leaves nothing
        ranks = [self._start_rank(rank, role) for rank in range(2)]
        if role == "driver":
            self._disk.count_this()
        store = CheckpointStore(self._now, keep=1, warn=fail)

        def write(actor: Path) -> Callable[[], None]:
            copy_side_files(self._model, actor / "huggingface")
            _call_all(ranks, actor)

            def finish() -> None:
                _call_all(ranks, None)

            return finish

        try:
            _receive_all(ranks)
            store.save(3, write=write, progress={"step": 3}, score=1 / 3)
        except WorkerError:
            return ENDED
        finally:  # as Ray's workers end when a run ends
            for process, _ in ranks:
                os.kill(process, signal.SIGKILL)
        return 0

    def _start_rank(self, rank: int, role: Role) -> tuple[int, Connection]:
        """Start a rank. Returns: its process id, and what it is told by."""
        to_rank, to_driver = Pipe()

        def serve() -> int:
            to_rank.close()
            if role == f"rank {rank}":
                self._disk.count_this()
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._rendezvous}",
                rank=rank,
                world_size=2,
                timeout=timedelta(seconds=DEADLINE_SECONDS),
            )
            engine = make_engine(self._model, sharding=SHARDING)
            engine.load_state(self._now / "global_step_2" / "actor")
            with torch.no_grad():
                marked(engine).fill_(3)
            to_driver.send(None)
            write = None
            while True:
                try:
                    actor = to_driver.recv()
                except EOFError:  # the driver has died
                    return 1
                if write is None:
                    write = engine.save_state(actor, model_only=False)
                else:
                    write()
                to_driver.send(None)

        process = _fork(serve)
        to_driver.close()
        return process, to_rank


def _call_all(ranks: list[tuple[int, Connection]], actor: Path | None) -> None:
    """Let all ranks copy their state for this folder; None: write the copies."""
    for _, connection in ranks:
        connection.send(actor)
    _receive_all(ranks)


def _receive_all(ranks: list[tuple[int, Connection]]) -> None:
    """Wait for all ranks. Raises: WorkerError if one has died."""
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        for connection in wait(list(waiting)):
            rank = waiting.pop(connection)
            try:
                connection.recv()
            except EOFError:
                raise WorkerError(f"rank {rank}: the process died") from None


def _fork(function: Callable[[], int]) -> int:
    """Run a function in a process that ends with what it returns, and return the process id."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(function())
        except BaseException:  # noqa: BLE001  (the parent process learns it by the status)
            traceback.print_exc()
            os._exit(1)
    return child


def _spread(kinds_of: list[list[str]], most: int) -> list[tuple[int, str]]:
    """Return this many attempts, spread evenly over the calls, of all kinds in turn.

    kinds_of: of attempts at each call. Returns: the number of the call, from 1, and the kind.
    """
    chosen = [index * len(kinds_of) // most for index in range(most)]
    return [(index + 1, kinds_of[index][turn % len(kinds_of[index])]) for turn, index in enumerate(chosen)]


def main(model: Path, top: Path, work: Path, most_of_rank: int, most_of_driver: int) -> None:
    """Make all attempts."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes of a killed one can be waited for
    engine = make_engine(model)
    engine.step(to_train(make_rollouts(model, images=False)))
    for step in (1, 2):
        save(engine, model, top / "before", step)
    attempts = Attempts(engine, model, top, work)
    print(json.dumps(attempts.run(most_of_rank=most_of_rank, most_of_driver=most_of_driver)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))
