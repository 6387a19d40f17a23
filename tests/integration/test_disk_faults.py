"""A real run whose disk fails: training continues where that loses less, with one sentence."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest

from support.faulty_disk import CHANGES, CREATE, OPEN, SYNC, WRITE, FaultyDisk
from support.processes import descendants
from support.runs import NO_VALIDATION, lines, log_of, make_run, num_lines, start, wait_for
from trigon.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.faults

OPTIONS = (
    "worker.rollout.name=transformers",
    "trainer.save_freq=1",
    *NO_VALIDATION,
    "data.max_response_length=4",
)

FAULTS = [
    (errno.EDQUOT, WRITE, "the quota of this user is used up"),
    (errno.ESTALE, CHANGES | OPEN, "the file server no longer knows the file"),
    (errno.EIO, SYNC, "the disk reports an error"),
    (errno.EROFS, CREATE, "the file system is read-only"),
    (errno.EMFILE, CREATE | OPEN, "this process has too many open files"),
]

SHARD_FAULTS = [
    (errno.ENOSPC, WRITE, "the disk is full"),
    (errno.EIO, WRITE, "the disk reports an error"),
    (errno.EIO, SYNC, "the disk reports an error"),
]


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    """Return the control of the disk of tmp_path / "run"."""
    (tmp_path / "work").mkdir()
    return FaultyDisk(tmp_path / "run", tmp_path / "work")


@pytest.mark.extended
def test_a_run_continues_while_its_disk_fails_and_when_its_folder_is_moved_and_ends_with_1_if_a_last_save_fails(
    made, disk, tmp_path
):
    folder = tmp_path / "run"
    process = start(made, folder, *OPTIONS, steps=400, environment=disk.environment())
    try:
        wait_for(lambda: (folder / "global_step_1").exists(), process, folder)
        for number, kinds, words in FAULTS:
            seen = len(log_of(folder).read_text())

            def news(seen=seen):
                return log_of(folder).read_text()[seen:].replace("\n", " ")

            before = {path.name for path in folder.glob("global_step_*")}
            disk.fail(number, kinds)
            wait_for(lambda: "IS NOT SAVED" in news() and "lines of metrics.jsonl cannot" in news(), process, folder)
            assert words in news()
            assert "Earlier checkpoints are intact" in news()
            assert before <= {path.name for path in folder.glob("global_step_*")} or number == errno.EIO
            disk.stop()
            steps = num_lines(folder)
            wait_for(lambda: "lines of metrics.jsonl are written again" in news(), process, folder)
            wait_for(lambda steps=steps: num_lines(folder) > steps + 1, process, folder)
        os.rename(folder, tmp_path / "moved")
        wait_for(lambda: "WAS MOVED OR DELETED" in log_of(folder).read_text(), process, folder)
        wait_for(lambda: num_lines(folder) >= 2 and any(folder.glob("global_step_*")), process, folder)
        disk.fail(errno.EDQUOT, WRITE)
        seen = len(log_of(folder).read_text())
        process.terminate()
        assert process.wait(timeout=120) == 1, "the state of the last step is lost"
    finally:
        disk.stop()
        process.kill()
        process.wait()
    log = log_of(folder).read_text()
    assert "Traceback" not in log
    assert "DiskError: " in log[seen:]
    assert "could not be saved: the quota of this user is used up" in log[seen:].replace("\n", " ")
    steps = [line["step"] for line in (*lines(tmp_path / "moved"), *lines(folder))]
    assert steps == list(range(1, len(steps) + 1)), "no line is lost, since the process lived"
    assert (folder / "config.yaml").read_text() == (tmp_path / "moved" / "config.yaml").read_text()


@pytest.mark.long
@pytest.mark.alone  # starts two workers
def test_a_worker_that_cannot_write_its_shard_costs_a_checkpoint_and_not_the_run(made, disk, tmp_path):
    folder = tmp_path / "run"
    options = (*OPTIONS, "trainer.n_gpus_per_node=2", "trainer.save_limit=-1")
    process = start(made, folder, *options, steps=1000, environment=disk.environment())
    try:
        wait_for(lambda: (folder / "global_step_1").exists(), process, folder)
        workers = [pid for pid, command in descendants(process.pid).items() if command.startswith("ray::Worker")]
        assert len(workers) == 2
        for worker, (number, kinds, words) in zip((*workers, workers[0]), SHARD_FAULTS, strict=True):
            seen = len(log_of(folder).read_text())

            def news(seen=seen):
                return " ".join(log_of(folder).read_text()[seen:].split())

            disk.fail(number, kinds, process=worker)
            wait_for(lambda: "IS NOT SAVED" in news() and "The run continues" in news(), process, folder)
            disk.stop()
            assert_sentence(news(), folder, words, worker)
            [before] = map(int, re.findall(r"continues.*?; the last one is of step (\d+)", news()))
            wait_for(lambda before=before: latest_step(folder) > before, process, folder)
        seen = len(log_of(folder).read_text())
        disk.fail(errno.ENOSPC, WRITE, process=workers[1])
        process.terminate()
        assert process.wait(timeout=120) == 1, "the state of the last step is lost"
    finally:
        disk.stop()
        process.kill()
        process.wait()
    log = log_of(folder).read_text()
    assert "DiskError: " in log[seen:]
    assert_sentence(" ".join(log[seen:].split()), folder, "the disk is full", workers[1])
    assert "Traceback" not in log
    assert not list(folder.glob(".saving_*"))
    latest = CheckpointStore(folder, keep=-1, warn=pytest.fail).latest()
    assert latest is not None
    make_run(made, folder, *OPTIONS, steps=latest.step + 2)
    assert f"resuming after step {latest.step}" in log_of(folder).read_text()
    assert [line["step"] for line in lines(folder)] == list(range(1, latest.step + 3))


def assert_sentence(text: str, folder: Path, words: str, worker: int) -> None:
    """Assert that a text says whose shard could not be written, where, and why."""
    found = re.search(r"(global_step_\d+) could not be saved: (.*?)\. Earlier checkpoints are intact", text)
    assert found is not None, text
    assert found[2].startswith(words)
    place = f"on {socket.gethostname()} (process {worker}), in save (writing): {folder}/.saving_{found[1]}/actor/"
    assert re.search(rf"\(rank [01] {re.escape(place)}", found[2]), found[2]


def latest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint whose files all exist."""
    newest = CheckpointStore(folder, keep=-1).newest_complete()
    assert newest is not None
    return int(newest.name.removeprefix("global_step_"))
