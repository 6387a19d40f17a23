"""Saves and exports in processes that are killed at each call that changes a file, in turn.

Run as a module, in a process that has the library of faulty_disk.py:

    python -m support.crash_points save|background|export|merge|once MODEL FOLDER WORK

Each attempt is a forked process, killed before its k-th call: the state is that after each call in
turn. If the call is a write, it is also killed after half of it. Then the machine loses power at
the same place: what was written and not flushed is gone. After each attempt the folder is checked.
Prints what was done, as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.engines import make_engine, make_rollouts, to_train
from support.faulty_disk import FaultyDisk, check_order, lose_unsynced
from trigon.checkpoint.export import export_checkpoint
from trigon.checkpoint.store import CheckpointStore, open_checkpoint
from trigon.models.load import copy_side_files
from trigon.training.local import LocalTrainEngine
from trigon.training.state import ShardedFiles, save_tensors

KINDS = ("after a call", "half a write", "without power")


class Attempts:
    """Makes attempts at each place. disk: counts the calls below its folder."""

    def __init__(self, disk: FaultyDisk, top: Path) -> None:
        self._disk = disk
        self._before = top / "before"
        self._now = top / "now"
        self.counts = dict.fromkeys(KINDS, 0)
        self.outcomes: dict[str, int] = {}

    def run(self, act: Callable[[Path], None], check: Callable[[Path, str], str], *, every: int = 1) -> dict[str, Any]:
        """Kill act at each place, and check what is left. check: also gets a name of the place."""
        self._attempt(act, 0)
        calls = self._disk.calls()
        kinds = {name: sum(call[0] == name for call in calls) for name in sorted({call[0] for call in calls})}
        published = check_order(calls)
        assert check(self._now, "not killed") == "new"
        for number in range(1, len(calls) + 1, every):
            for kind in KINDS:
                if kind == "half a write" and calls[number - 1][0] != "write":
                    continue
                place = f"{kind}, killed at call {number} of {len(calls)}: {calls[number - 1]}"
                self._attempt(act, number, torn=kind == "half a write")
                if kind == "without power":
                    lose_unsynced(self._disk.calls()[: number - 1])
                outcome = check(self._now, place)
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
                self.counts[kind] += 1
        return {"calls": kinds, "published": published, "attempts": self.counts, "outcomes": self.outcomes}

    def _attempt(self, act: Callable[[Path], None], number: int, *, torn: bool = False) -> None:
        shutil.rmtree(self._now, ignore_errors=True)
        shutil.copytree(self._before, self._now, copy_function=os.link)
        sys.stdout.flush()
        self._disk.kill_at(number, torn=torn)
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                act(self._now)
                os._exit(0)
            except BaseException:  # noqa: BLE001  (the parent process reports it)
                traceback.print_exc()
                os._exit(1)
        statuses = [os.waitpid(child, 0)[1]]
        with suppress(ChildProcessError):  # until there is none
            while True:
                statuses.append(os.waitpid(-1, 0)[1])
        self._disk.stop()
        assert signal.SIGKILL in statuses if number else not any(statuses), (number, statuses)


def save(engine: LocalTrainEngine, model: Path, root: Path, step: int, *, background: bool = False) -> None:
    """Save a step of a real engine, in which a weight is the step, as a run does."""
    with torch.no_grad():
        marked(engine).fill_(step)

    def write(actor: Path) -> Callable[[], None]:
        copy_side_files(model, actor / "huggingface")
        return engine.save_state(actor, model_only=False)

    store = CheckpointStore(root, keep=1, background=background, warn=fail)
    # The first step is the best, so that one save has to keep two checkpoints, and removes another.
    store.save(step, write=write, progress={"step": step}, score=1.0 / step)
    store.wait()


def marked(engine: LocalTrainEngine) -> torch.Tensor:
    """Return the weight whose value is the step."""
    return engine.policy.model.model.norm.weight


def fail(text: str) -> None:
    """Fail: there is nothing to warn of."""
    raise AssertionError(text)


def check_run(engine: LocalTrainEngine, model: Path, root: Path, place: str) -> str:
    """Check the checkpoints of steps 1 (best) and 2, or 1 and 3, and that the run continues."""
    store = CheckpointStore(root, keep=1, warn=lambda text: fail(f"{place}: {text}"))
    latest, best = store.latest(), store.best()
    assert latest is not None, place
    assert latest.step in (2, 3), (place, latest)
    assert best is not None, place
    assert best.step == 1, (place, best)
    assert latest.progress == {"step": latest.step}, place
    [name] = [each for each in ShardedFiles(latest.actor / "weights").tensors if each.endswith("model.norm.weight")]
    weight = ShardedFiles(latest.actor / "weights").read(name)
    assert bool((weight == latest.step).all()), (place, weight)
    store.rewind(latest.step)
    save(engine, model, root, latest.step + 1)
    left = sorted(each.name for each in root.iterdir())
    assert left == ["checkpoint_tracker.json", "global_step_1", f"global_step_{latest.step + 1}"], (place, left)
    return "new" if latest.step == 3 else "old"


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file in a folder; of none if it does not exist."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_export(old: dict[str, str], new: dict[str, str], top: Path, place: str) -> str:
    """Check that the export is the old one, the new one or absent, and can be made again."""
    found = contents(top / "model")
    outcome = "new" if found == new else "old" if found == old else "absent"
    assert found in (new, old, {}), (place, sorted(found))
    export(top)
    assert contents(top / "model") == new, place
    left = sorted(each.name for each in top.iterdir())
    assert left == ["model", "run"], (place, left)
    return outcome


def export(top: Path, step: int = 2) -> None:
    """Export a step's checkpoint, in place of an earlier export."""
    export_checkpoint(top / "run" / f"global_step_{step}", top / "model", dtype=None, logits=False)


def merge(top: Path) -> None:
    """Export into the checkpoint, as EasyR1's command does."""
    export_checkpoint(top / "run" / "global_step_2" / "actor", None, dtype="bf16", logits=False)


def check_merge(new: dict[str, str], top: Path, place: str) -> str:
    """Check that the checkpoint is valid, and that what looks like an export is complete."""
    checkpoint = open_checkpoint(top / "run" / "global_step_2", resumable=True)
    found = contents(checkpoint.actor / "huggingface")
    looks_complete = "trigon_export.json" in found
    assert not looks_complete or found == new, (place, sorted(found))
    merge(top)
    open_checkpoint(top / "run" / "global_step_2", resumable=True)
    assert contents(checkpoint.actor / "huggingface") == new, place
    left = sorted(each.name for each in checkpoint.actor.iterdir())
    assert left == ["huggingface", "optimizer", "state.json", "weights"], (place, left)
    return "new" if looks_complete else "absent"


TENSORS = {f"layer.{n}.weight": torch.arange(24.0).view(6, 4) + n for n in range(3)}


def save_small(root: Path, step: int) -> None:
    """Save a few tensors."""

    def write(actor: Path) -> None:
        for name in ("weights", "optimizer"):
            save_tensors({key: each * step for key, each in TENSORS.items()}, actor / name, group=None)

    CheckpointStore(root, keep=1, warn=fail).save(step, write=write, progress={"step": step}, score=1.0 / step)


def main(scenario: str, model: Path, top: Path, work: Path) -> None:
    """Run a scenario."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes of a killed one can be waited for
    before = top / "before"
    before.mkdir()
    disk = FaultyDisk(top / "now", work)
    attempts = Attempts(disk, top)
    if scenario == "once":
        before.rmdir()
        disk.kill_at(0)
        for step in (1, 2):
            save_small(top / "now", step)
        disk.stop()
        print(json.dumps(disk.calls(), default=str))
        return
    engine = make_engine(model)
    engine.step(to_train(make_rollouts(model, images=False)))
    root = before if scenario in ("save", "background") else before / "run"
    for step in (1, 2):
        save(engine, model, root, step)
    match scenario:
        case "save" | "background":

            def act(root: Path) -> None:
                save(engine, model, root, 3, background=scenario == "background")

            report = attempts.run(act, partial(check_run, engine, model))
        case "export":
            export(before, step=2)
            new = contents(before / "model")
            shutil.rmtree(before / "model")
            export(before, step=1)
            report = attempts.run(export, partial(check_export, contents(before / "model"), new))
        case _:
            shutil.copytree(before, top / "reference")
            merge(top / "reference")
            new = contents(top / "reference" / "run" / "global_step_2" / "actor" / "huggingface")
            report = attempts.run(merge, partial(check_merge, new))
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
