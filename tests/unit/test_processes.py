"""The processes below one, from a made /proc and from the real one; the command of a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trigon.system.processes import count_resident_bytes, descendants, python_command

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")


def make_process(proc: Path, pid: int, parent: int, *, name: str = "python", pages: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194560\n")
    (folder / "statm").write_text(f"{10 * pages} {pages} 1 1 0 1 0\n")


def test_a_tree_by_hand(tmp_path):
    make_process(tmp_path, 1, 0)
    make_process(tmp_path, 10, 1, pages=3)
    make_process(tmp_path, 11, 10, name="a) S 1 (b", pages=4)  # a name may look like the fields after it
    make_process(tmp_path, 12, 10)
    make_process(tmp_path, 13, 11)
    make_process(tmp_path, 20, 1)
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "30").mkdir()  # it has ended meanwhile
    for tops, without, expected in [((10,), (), [11, 12, 13]), ((10,), [11], [12]), ((11, 20), (), [13])]:
        assert descendants(*tops, without=without, proc=tmp_path) == expected
    for tops in ((13,), (), (999,)):
        assert descendants(*tops, proc=tmp_path) == []
    page = os.sysconf("SC_PAGE_SIZE")
    assert count_resident_bytes([10, 11, 30, 999], proc=tmp_path) == 7 * page
    assert descendants(1, proc=tmp_path / "missing") == []


@needs_proc
def test_a_real_child_and_its_child_are_found_and_measured():
    script = (
        "import subprocess, sys, os\n"
        "kept = bytearray(os.urandom(1)) * (64 << 20)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True); input(); child.communicate(b'\\n')"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        grandchild = int(process.stdout.readline())
        assert {process.pid, grandchild} <= set(descendants(os.getpid()))
        assert descendants(process.pid) == [grandchild]
        assert count_resident_bytes([process.pid]) >= 64 << 20
        process.communicate("\n")
    assert count_resident_bytes([process.pid]) == 0


def test_a_child_does_not_import_from_the_working_folder(tmp_path):
    (tmp_path / "trigon").mkdir()
    for name in ("types.py", "random.py", "json.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    code = "import types, random, json; from trigon import __version__; print(sys.argv[1:], sys.path)"
    done = subprocess.run(python_command(code, "a", "b=c\nd"), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "['a', 'b=c\\nd'] " + f"{sys.path}\n", done.stderr
