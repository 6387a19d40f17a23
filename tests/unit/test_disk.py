"""Full, read-only and vanished disks, caused for real: by mounts, limits and permissions."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trigon.checkpoint.store import CheckpointStore
from trigon.errors import CheckpointError, ConfigError, DataError, DiskError
from trigon.report.console import LenientStream
from trigon.report.run_folder import RunFolder, RunWriter
from trigon.system.files import describe_fault, fault_number
from trigon.tools.cli import main as command

pytestmark = pytest.mark.faults


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount an empty file system in memory. Skips where that is not allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a mounted folder read-only, by a second mount of it: files are open in the first."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """Lower a limit of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def writer(num_bytes: int = 1000, num_files: int = 1):
    def write(actor: Path) -> None:
        for number in range(num_files):
            (actor / f"{number}.bin").write_bytes(bytes(num_bytes))

    return write


@pytest.fixture
def messages() -> list[str]:
    return []


def save(store: CheckpointStore, step: int, *, required: bool = False, **sizes: int) -> None:
    store.save(step, write=writer(**sizes), progress={}, score=None, required=required)
    store.wait()


def check_that_saving_continues(store, messages, words, **sizes) -> None:
    """Let step 2 fail, and assert that the checkpoint of step 1 is intact and nothing is left."""
    save(store, 2, **sizes)
    [message] = messages
    assert message.startswith("THE CHECKPOINT OF STEP 2 IS NOT SAVED: ")
    assert words in message
    assert message.endswith("saves the next one when it is due; the last one is of step 1")
    with pytest.raises(DiskError, match=r"could not be saved|a checkpoint needs"):
        save(store, 3, required=True, **sizes)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ("size=1m", {"num_bytes": 2 * 2**20}, "the disk is full, with"),
        ("size=8m,nr_inodes=20", {"num_bytes": 1, "num_files": 30}, "the file system has no inode left"),
    ],
)
def test_a_full_disk_is_a_warning_and_the_next_save_succeeds(tmp_path, messages, background, options, sizes, words):
    with mounted(tmp_path / "disk", options) as disk:
        store = CheckpointStore(disk / "run", keep=1, background=background, warn=messages.append)
        save(store, 1)
        check_that_saving_continues(store, messages, words, **sizes)
        assert sorted(os.listdir(disk / "run")) == ["checkpoint_tracker.json", "global_step_1"]
        assert store.latest(resumable=False).step == 1
        save(store, 4)
        assert sorted(os.listdir(disk / "run")) == ["checkpoint_tracker.json", "global_step_4"]


def test_a_file_system_that_becomes_read_only_is_a_warning(tmp_path, messages):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        store = CheckpointStore(disk / "run", keep=1, warn=messages.append)
        save(store, 1)
        with RunFolder(disk / "run") as folder:
            log = RunWriter(folder, warn=messages.append)
            log.metrics(1, {"a": 1.0})
            with read_only(disk):
                log.metrics(2, {"a": 2.0})
                log.metrics(3, {"a": 3.0})
                assert "lines of metrics.jsonl cannot be written: the file system is read-only" in messages.pop()
                check_that_saving_continues(store, messages, "the file system is read-only")
            log.metrics(4, {"a": 4.0})
            assert messages.pop() == "lines of metrics.jsonl are written again"
            assert [line.step for line in folder.read_metrics()] == [1, 2, 3, 4]
        save(store, 4)
        assert store.latest(resumable=False).step == 4


@pytest.mark.parametrize(
    ("limit", "words"),
    [(resource.RLIMIT_FSIZE, "a file would be larger than allowed"), (resource.RLIMIT_NOFILE, "too many open files")],
)
def test_a_limit_of_the_process_is_a_warning(tmp_path, messages, limit, words):
    store = CheckpointStore(tmp_path / "run", keep=1, warn=messages.append)
    save(store, 1)
    free = os.dup(0)  # the first descriptor that is not in use
    os.close(free)
    soft = 5000 if limit == resource.RLIMIT_FSIZE else free
    with limited(limit, soft):
        save(store, 2, num_bytes=10_000)
    [message] = messages
    assert words in message
    save(store, 3)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint_tracker.json", "global_step_3"]


def test_a_folder_without_permission_is_a_warning(tmp_path, messages):
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    store = CheckpointStore(tmp_path / "run", keep=1, warn=messages.append)
    save(store, 1)
    (tmp_path / "run").chmod(0o500)
    check_that_saving_continues(store, messages, "it is not permitted")
    (tmp_path / "run").chmod(0o700)


def test_other_errors_of_a_save_that_is_not_required_are_raised(tmp_path, messages):
    def write(actor: Path) -> None:
        raise CheckpointError("rank 1 is gone")

    store = CheckpointStore(tmp_path / "run", keep=1, background=True, warn=messages.append)
    with pytest.raises(CheckpointError, match="rank 1 is gone"):
        store.save(1, write=write, progress={}, score=None, required=False)
    store.save(1, write=lambda actor: lambda: write(actor), progress={}, score=None, required=False)
    with pytest.raises(CheckpointError, match="rank 1 is gone"):
        store.wait()
    assert messages == []


# Reports


def test_half_a_line_is_removed_when_the_disk_becomes_full_in_it(tmp_path, messages):
    with mounted(tmp_path / "disk", "size=64k") as disk, RunFolder(disk / "run") as folder:
        log = RunWriter(folder, warn=messages.append)
        log.metrics(1, {"a": 1.0})
        free = os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free))
        many = {f"metric {number}": 0.5 for number in range(1000)}
        log.metrics(2, many)
        assert (folder.path / "metrics.jsonl").read_bytes().count(b"\n") == 1
        assert (folder.path / "metrics.jsonl").read_bytes().endswith(b"\n")
        [message] = messages
        assert "the disk is full" in message
        assert message.endswith("They wait in memory; the run continues and tries again in each step")
        (disk / "filler").unlink()
        log.metrics(3, {"a": 3.0})
        assert [line.step for line in folder.read_metrics()] == [1, 2, 3]


def test_lines_that_wait_are_written_before_a_checkpoint_and_those_that_never_are_counted(tmp_path, messages):
    with mounted(tmp_path / "disk", "size=64k") as disk, RunFolder(disk / "run") as folder:
        log = RunWriter(folder, warn=messages.append)
        with read_only(disk):
            log.metrics(1, {"a": 1.0})
            log.flush()
        log.flush()
        assert [line.step for line in folder.read_metrics()] == [1]
        assert messages[1:] == ["lines of metrics.jsonl are written again"]
        with read_only(disk):
            log.metrics(2, {"a": 1.0})
            log.metrics(3, {"a": 1.0})
            log.close()
    assert messages[3:] == [f"could not be written and are not in {folder.path}: 2 lines of metrics.jsonl"]


def test_a_folder_that_is_deleted_is_made_again(tmp_path, messages):
    with RunFolder(tmp_path / "run") as folder:
        log = RunWriter(folder, warn=messages.append)
        folder.write_config("trainer: {}\n")
        log.metrics(1, {"a": 1.0})
        os.rename(tmp_path / "run", tmp_path / "moved")
        log.metrics(2, {"a": 2.0})
        [message] = messages
        assert message.startswith(f"THE RUN FOLDER {folder.path} WAS MOVED OR DELETED. It was made again")
        assert (folder.path / "config.yaml").read_text() == "trainer: {}\n"
        assert [line.step for line in folder.read_metrics()] == [2]
        with pytest.raises(ConfigError, match="is being written by another run"):
            RunFolder(tmp_path / "run")
        (tmp_path / "run" / "run.lock").unlink()
        log.metrics(3, {"a": 3.0})
        assert "is locked again" in messages[1]


def test_a_run_ends_if_another_one_has_taken_the_place_of_its_moved_folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        log = RunWriter(folder, warn=print)
        os.rename(tmp_path / "run", tmp_path / "moved")
        script = (
            "import sys, time; from pathlib import Path; from trigon.report.run_folder import RunFolder;"
            f"folder = RunFolder(Path({str(tmp_path / 'run')!r})); print('locked', flush=True); sys.stdin.read()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="is being written by another run"):
            log.metrics(1, {"a": 1.0})
        other.communicate()


# Output and words


def test_output_that_fails_is_dropped_and_counted():
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = Full()
    lenient = LenientStream(stream)
    lenient.write("lost\n")
    lenient.write("lost\n")
    lenient.flush()
    stream.full = False
    lenient.write("kept\n")
    lenient.write("kept\n")
    assert stream.getvalue() == "(2 writes to this output failed)\nkept\nkept\n"
    assert lenient.encoding == stream.encoding


def test_a_full_standard_output_is_no_traceback_and_no_other_exit_status():
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trigon", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert done.returncode == 0
    assert done.stderr.strip() == "standard output could not be written: [Errno 28] No space left on device"


@pytest.mark.parametrize(("number", "shown"), [(errno.ESTALE, True), (errno.ENOENT, False), (errno.EINVAL, False)])
def test_a_fault_of_a_disk_ends_a_command_with_a_sentence(monkeypatch, capsys, number, shown):
    class Failing:
        @staticmethod
        def main(arguments):
            raise OSError(number, os.strerror(number), "/data/x")

    monkeypatch.setattr(command.importlib, "import_module", lambda name: Failing)
    if not shown:
        with pytest.raises(OSError, match="/data/x"):
            command.main(["plot"])
        return
    assert command.main(["plot"]) == 1
    message = capsys.readouterr().err
    assert "the file server no longer knows the file (Stale file handle: /data/x). Mount" in message


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (CheckpointError("rank 1: OSError: [Errno 116] Stale file handle"), errno.ESTALE),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), errno.EDQUOT),
        (OSError(errno.EINVAL, "invalid"), None),
        (DataError("[Errno 9]"), None),
        (ValueError("28"), None),
    ],
)
def test_faults_are_found_in_errors_and_in_their_texts(tmp_path, error, number):
    assert fault_number(error) == number
    if number is not None:
        assert os.strerror(number) in describe_fault(error, tmp_path)
