"""Private folders: modes, removal on exit, and removal of those of killed processes only."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.processes import wait_until
from trigon.system.temporary import SHARED_MEMORY, private_folder, remove_dead_folders

HOLDER = """
import sys, time
from pathlib import Path
from trigon.system.temporary import SHARED_MEMORY, private_folder
with private_folder(Path(sys.argv[1])) as folder:
    (folder / "session" / "logs").mkdir(parents=True)
    (folder / "session" / "logs" / "raylet.out").write_text("text")
    (SHARED_MEMORY / f"{folder.name}-segment").write_text("tokens")
    print(folder, flush=True)
    time.sleep(600)
"""

pytestmark = pytest.mark.faults


def hold(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a private folder, and return both."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(base)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        return process, Path(output.readline().strip())


def make_dead(base: Path) -> Path:
    """Return the folder of a process that was killed, which has a segment of shared memory."""
    process, folder = hold(base)
    process.kill()
    process.wait()
    return folder


def segments_of(folder: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{folder.name}*"))


def test_a_folder_is_private_and_gone_afterwards_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), private_folder(tmp_path) as folder:  # noqa: PT012
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "sub").mkdir()
        (SHARED_MEMORY / f"{folder.name}-1").touch()
        remove_dead_folders(tmp_path)  # it lives, also for this process
        assert (folder / "sub").exists()
        assert segments_of(folder)
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert segments_of(folder) == []


def test_the_next_start_removes_the_folder_of_a_killed_process_and_not_that_of_a_living_one(tmp_path):
    (living, of_living), of_killed = hold(tmp_path), make_dead(tmp_path)
    try:
        assert (of_killed / "session" / "logs" / "raylet.out").exists()
        assert segments_of(of_killed)
        with private_folder(tmp_path) as own:
            assert {path.name for path in tmp_path.iterdir()} == {own.name, of_living.name}
            assert segments_of(of_killed) == []
            assert segments_of(of_living)
        assert (of_living / "session" / "logs" / "raylet.out").exists()
    finally:
        living.kill()
        living.wait()
    remove_dead_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert segments_of(of_living) == []


def test_a_removal_that_was_killed_is_finished(tmp_path):
    folder = make_dead(tmp_path)
    half = folder.rename(folder.with_name(f"{folder.name}.removed"))
    (half / "lock").unlink()  # rmtree may remove it before the rest
    remove_dead_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert segments_of(folder) == []


def test_a_folder_of_another_machine_stays(tmp_path):
    folder = make_dead(tmp_path)
    written = (folder / "lock").read_text().split("\n")
    (folder / "lock").write_text("another-machine\nanother-boot")
    remove_dead_folders(tmp_path)
    assert folder.exists()
    # The same kernel, as of another container; the same machine, started again.
    for text in (f"another-container\n{written[1]}", f"{written[0]}\nanother-boot"):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "lock").write_text(text)
        remove_dead_folders(tmp_path)
        assert not folder.exists()


def test_a_folder_that_was_just_made_has_time_to_be_locked(tmp_path):
    for name in ("unlocked", "emptylok"):
        folder = tmp_path / f"trigon-{os.geteuid()}-{name}"
        folder.mkdir(mode=0o700)
        if "empty" in name:
            (folder / "lock").touch()
        remove_dead_folders(tmp_path)
        assert folder.exists()
        two_hours_ago = time.time() - 7200
        os.utime(folder, (two_hours_ago, two_hours_ago))
        remove_dead_folders(tmp_path)
        assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "mode", "content"),
    [
        ("-experiments", 0o700, None),
        ("-experiments", 0o700, "lock"),
        ("-Datasets", 0o700, None),
        ("-datasets.old", 0o700, None),
        ("-a", 0o700, None),
        ("-datasets", 0o755, None),
        ("-datasets", 0o700, "a.jsonl"),
        ("-datasets.removed", 0o755, None),
        ("1-datasets", 0o700, None),  # the name of another user's
        ("-testlink", None, "lock"),
        ("-testfile", None, None),
    ],
)
def test_what_is_no_folder_of_a_dead_process_stays_however_it_is_named(tmp_path, name, mode, content):
    path, target = tmp_path / f"trigon-{os.geteuid()}{name}", tmp_path / "target"
    target.mkdir(mode=mode or 0o700)
    if content is not None:
        (target / content).touch()
    os.utime(target, (0, 0))
    match name:
        case "-testlink":
            path.symlink_to(target)
        case "-testfile":
            path.touch()
        case _:
            target.rename(path)
    remove_dead_folders(tmp_path)
    assert path.exists()
    assert content is None or (path / content).exists()


def test_a_folder_of_another_user_or_that_others_can_enter_stays(tmp_path):
    folder = make_dead(tmp_path)
    folder.chmod(0o755)
    remove_dead_folders(tmp_path)
    folder.chmod(0o700)
    if os.geteuid() == 0:  # only root can make a folder of another user
        os.chown(folder, 12345, 12345)
        remove_dead_folders(tmp_path)
        os.chown(folder, 0, 0)
    assert (folder / "lock").exists()
    remove_dead_folders(tmp_path)
    assert not folder.exists()


def test_processes_that_start_at_the_same_time_do_not_remove_each_other(tmp_path):
    def use(number: int) -> bool:
        with private_folder(tmp_path) as folder:
            (folder / "file").write_text(str(number))
            time.sleep(0.001)
            return (folder / "file").read_text() == str(number)

    for _ in range(5):  # as a removal leaves them that was killed
        (tmp_path / f"trigon-{os.geteuid()}-{secrets.token_hex(4)}.removed").mkdir(mode=0o700)
    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(use, range(400)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_into_which_a_dying_process_still_writes_is_removed(tmp_path):
    writer = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
end = time.monotonic() + 1
while time.monotonic() < end:
    try:
        (folder / str(time.monotonic_ns())).touch()
    except FileNotFoundError:
        pass
"""
    folder = make_dead(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", writer, str(folder)])
    wait_until(lambda: len(list(folder.iterdir())) > 10)
    remove_dead_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []
    process.wait()
    assert list(tmp_path.iterdir()) == []
