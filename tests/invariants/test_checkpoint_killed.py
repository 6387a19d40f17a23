"""A save that is killed at any time leaves a complete checkpoint.

The next run removes the remains of the save.
"""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.faults]

# A process saves step 3 when steps 1 (the best) and 2 exist, and is killed by SIGKILL at its k-th
# file system operation; k increases until the save finishes. The process is forked, so each attempt
# takes milliseconds.
KILL_AT_EVERY_OPERATION = """
    import json, os, shutil, signal, sys
    from pathlib import Path
    from trigon.checkpoint.store import CheckpointStore

    top = Path(sys.argv[1])
    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

    def write(step):
        def take_copies(actor):
            def finish():
                for name in ("weights/1.safetensors", "weights/2.safetensors", "optimizer/1.safetensors", "state.json"):
                    (actor / name).parent.mkdir(exist_ok=True)
                    (actor / name).write_text(f"{name} of {step}")
            return finish
        return take_copies

    def save(root, step):
        store = CheckpointStore(root, keep=1, background=True, warn=lambda text: None)
        store.save(step, write=write(step), progress={"step": step}, score=1.0 / step)
        store.wait()

    save(top / "before", 1)
    save(top / "before", 2)
    survived, k, after = False, 0, set()
    while not survived:
        k += 1
        root = top / f"killed_at_{k}"
        shutil.copytree(top / "before", root)
        child = os.fork()
        if child == 0:
            remaining = k
            def count(event, args):
                global remaining
                if event in EVENTS:
                    remaining -= 1
                    if remaining == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(count)
            save(root, 3)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        warnings = []
        store = CheckpointStore(root, keep=1, warn=warnings.append)
        newest = store.latest()
        assert newest.step in (2, 3) and not warnings, (k, newest, warnings)
        assert newest.progress == {"step": newest.step}
        assert (newest.actor / "weights/2.safetensors").read_text() == f"weights/2.safetensors of {newest.step}"
        assert store.best().step == 1, k
        after.add(newest.step)
        store.rewind(newest.step)
        for step in range(newest.step + 1, 5):
            save(root, step)
        names = sorted(p.name for p in root.iterdir())
        assert names == ["checkpoint_tracker.json", "global_step_1", "global_step_4"], (k, names)
        assert json.loads((root / "checkpoint_tracker.json").read_text())["last_global_step"] == 4
        shutil.rmtree(root)
    print(json.dumps({"kill_points": k - 1, "resumed_from": sorted(after)}))
"""


def test_a_complete_checkpoint_remains_if_a_save_is_killed_at_any_file_operation(tmp_path):
    """test_crash_points.py kills saves after each system call, and in the foreground too."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILL_AT_EVERY_OPERATION), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["resumed_from"] == [2, 3]
    assert report["kill_points"] > 20
