"""Checkpoints that are complete or absent, whenever the process is killed.

    root/
      checkpoint_tracker.json   last and best step, for users and other tools; Trigon never reads it
      global_step_5/
        actor/                  what the train engine wrote: weights/, optimizer/, state.json
        progress.json           the training loop's state, and the validation score of these weights
        manifest.json           size and SHA-256 of every file above, which are verified before use
      .saving_global_step_10/   a save that is running or was interrupted; removed at the next save
      set_aside/                checkpoints later than the step from which a run was resumed

A save is written to a temporary folder, flushed, hashed and renamed; then the tracker is written,
and only then are old checkpoints removed. With background=True, everything after the copies were
taken runs in a thread. Which checkpoint is the latest or the best is read from the folders
themselves. One run at a time writes to a root: its run folder holds a lock. No tensors, no engines.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any

from trigon.errors import CheckpointError, DiskError, EngineError
from trigon.system.files import (
    DAMAGED_FILE_SYSTEM,
    describe_fault,
    fault_number,
    free_bytes,
    read_json_object,
    reporting_growth,
    sync_to_disk,
    write_json,
)
from trigon.system.machine import count_usable_cpus

MANIFEST = "manifest.json"
EXPORT_RECORD = "trigon_export.json"
"""Names the exported checkpoint; later exports may replace a folder that has this file."""

EXPORTED = "huggingface_model"
"""Folder of the export within a checkpoint, the default of `trigon export`."""
PROGRESS = "progress.json"
"""The one file that every checkpoint has beside the files of the train engine."""

VALIDATED_BY = "validated_by"
"""Entry of a checkpoint's progress: a digest of what its score depends on besides the weights, such
as the validation data. Scores with different ones are not compared."""

WITH_EXPORTS = ("actor/huggingface", "actor/lora_adapter")
"""Folders to which an export may add files, and of which a run loads nothing."""

_MAX_HASHING_THREADS = 8
_DAMAGED_DISK = (errno.EIO, *DAMAGED_FILE_SYSTEM)

TRACKER = "checkpoint_tracker.json"

_STEP = re.compile(r"global_step_(\d+)")
_SAVING = ".saving_"
_REMOVING = ".removing_"
_INTACT = ". Earlier checkpoints are intact"


OnProgress = Callable[[], object]
"""Called, from any thread, for each file that was written or read."""


def no_progress() -> None:
    """Take a report of progress, and do nothing."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were verified.

    step: training steps taken. folder: root/global_step_N. progress: the state of the training
    loop, after a round trip through JSON. score: the validation reward of these weights, None if
    they were not validated.
    """

    step: int
    folder: Path
    progress: Mapping[str, Any]
    score: float | None

    @property
    def actor(self) -> Path:
        """The folder that the train engine wrote."""
        return self.folder / "actor"

    @property
    def critic(self) -> Path | None:
        """The folder that the critic wrote; None if the run had none."""
        folder = self.folder / "critic"
        return folder if folder.is_dir() else None


Finish = Callable[[], None]
"""The rest of a save, which reads nothing that training changes. May run in another thread."""

Write = Callable[[Path], Finish | None]
"""Fills the (existing, empty) actor folder, at once or by the Finish that it returns."""


class CheckpointStore:
    """The checkpoints of one run.

    keep: how many to leave on disk; below 1, all. The newest and the best are never removed, so
    keep=1 can leave two. background: save returns as soon as copies are taken, and a thread writes,
    hashes and publishes them, one save at a time; the process does not end before it is done.
    warn: called with a message for a damaged checkpoint, a fallback to an earlier one, and a
    folder that could not be removed.
    on_progress: called, from any thread, for each file that was flushed or hashed, and while the
    files of a save grow.
    save_seconds: how long the longest save took, until its checkpoint was complete; None: no save.
    published_step: the step of the last checkpoint that this object has saved completely; 0: none.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        background: bool = False,
        warn: Callable[[str], None] = warnings.warn,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self._root = root
        self._keep = keep
        self._background = background
        self._warn = warn
        self._on_progress = on_progress
        self._pending: tuple[int, Future[None], bool] | None = None  # in the background: step, save, required
        self._save_started = 0.0
        self.save_seconds: float | None = None
        self.published_step = 0

    def save(
        self, step: int, *, write: Write, progress: Mapping[str, Any], score: float | None, required: bool = True
    ) -> None:
        """Save the checkpoint of this step; after a crash at any moment it is complete or absent.

        Args:
            progress: values that JSON can hold; numbers are finite.
            score: validation reward of the weights being saved, None if they were not validated.
                The highest is the best, the earlier one at a tie.
            required: False: a DiskError of this save becomes a warning, since a run loses less if
                it continues and saves again later.
        Raises: DiskError if the disk is full, read-only, gone, ... (existing checkpoints stay);
        CheckpointError if the step exists already, or if the previous save failed in the
        background.
        """
        self.wait()
        try:
            self._save(step, write, progress, score, required)
        except DiskError as error:
            if required:
                raise
            self._warn_not_saved(step, error)

    def _save(self, step: int, write: Write, progress: Mapping[str, Any], score: float | None, required: bool) -> None:
        final = self._root / f"global_step_{step}"
        if final.exists():
            raise CheckpointError(f"{final} exists already; rewind to an earlier step to write it again")
        self._save_started = time.monotonic()
        temporary = self._root / f"{_SAVING}{final.name}"
        state = {"step": step, "val_reward_score": score if score is not None and isfinite(score) else None}
        with removed_on_failure(temporary, f"{final} could not be saved", _INTACT):
            self._root.mkdir(parents=True, exist_ok=True)
            for prefix in (_SAVING, _REMOVING):
                for stale in self._root.glob(f"{prefix}*"):
                    self._remove(stale)
            self.check_space(max((total_bytes(folder) for folder in self._complete_folders().values()), default=0))
            (temporary / "actor").mkdir(parents=True)
            finish = write(temporary / "actor")
            _write_json(temporary / PROGRESS, {**state, "progress": progress})
        hashing = start_hashing_threads()
        if self._background:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = step, thread.submit(self._publish, temporary, final, finish, hashing), required
            thread.shutdown(wait=False)  # ends the thread after this save
        else:
            self._publish(temporary, final, finish, hashing)

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises: CheckpointError, once, if it failed, unless by the disk and was not required.
        """
        if self._pending is None:
            return
        step, saving, required = self._pending
        error = saving.exception()
        self._pending = None
        if isinstance(error, DiskError) and not required:
            self._warn_not_saved(step, error)
        elif isinstance(error, CheckpointError):
            raise error
        elif error is not None:
            raise CheckpointError(f"the checkpoint of step {step} could not be saved: {error!r}") from error

    @property
    def is_saving(self) -> bool:
        """Whether a save in the background is in progress."""
        return self._pending is not None and not self._pending[1].done()

    def check(self) -> None:
        """Raise what wait would raise if the save in the background has ended; does not block."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    @contextmanager
    def wait_on_exit(self) -> Iterator[None]:
        """Wait for a save in the background when the context ends, normally or by an error.

        If both fail, the error of the context is raised and the error of the save becomes a
        warning.
        """
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except CheckpointError as error:
                self._warn(str(error))
            raise
        self.wait()

    def latest(self, *, resumable: bool = True) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there is no checkpoint at all.

        Damaged ones are skipped with a warning.
        Args: resumable: whether a run continues from it; False if only its weights are read.
        Raises: CheckpointError if all are damaged, or if resumable and the newest undamaged one
        has no optimizer state.
        """
        self.wait()
        return self._open_first_undamaged(sorted(self._folders(), reverse=True), resumable=resumable)

    def best(self) -> Checkpoint | None:
        """Return the undamaged checkpoint of the highest score, or None if none has a score.

        Scores that were measured otherwise than the newest one do not count (VALIDATED_BY). Only
        the weights of the checkpoint are read. Raises: as latest.
        """
        self.wait()
        return self._open_first_undamaged([step for _, step in self._ranked_by_score()], resumable=False)

    def newest_complete(self, *, before: int | None = None) -> Path | None:
        """Return the folder of the newest checkpoint whose files all exist; none is read.

        before: only of earlier steps than this one.
        """
        steps = {step: folder for step, folder in self._complete_folders().items() if before is None or step < before}
        return steps[max(steps)] if steps else None

    def rewind(self, step: int) -> None:
        """Move every checkpoint later than this step, damaged or not, to root/set_aside.

        Otherwise checkpoints of the earlier run would mix with checkpoints of the run that is
        resumed at this step, and a later resume could take the wrong one.
        """
        self.wait()
        for folder in [folder for later, folder in sorted(self._folders().items()) if later > step]:
            moved_folder = self._root / "set_aside"
            moved_folder.mkdir(exist_ok=True)
            sync_to_disk(self._root)
            names = itertools.chain([folder.name], (f"{folder.name}.{number}" for number in itertools.count(2)))
            target = next(moved_folder / name for name in names if not (moved_folder / name).exists())
            os.rename(folder, target)
            sync_to_disk(moved_folder)  # before it is absent from the root
            self._warn(
                f"{folder} is later than step {step}, where this run starts: moved to {target}. It can be deleted"
            )
        if self._root.is_dir():
            sync_to_disk(self._root)
            self._write_tracker()

    def check_space(self, needed_bytes: int) -> None:
        """Raise DiskError if the disk has too little free space for a checkpoint.

        To be called before training with the bytes of weights and optimizer; each save checks for
        the size of the largest checkpoint so far.
        """
        free = free_bytes(self._root)
        if free < needed_bytes:
            raise DiskError(
                f"a checkpoint needs about {needed_bytes:,} bytes, but the disk of {self._root} has {free:,} free. "
                "Make room, lower trainer.save_limit, or set trainer.save_checkpoint_path to another disk"
            )

    def _publish(self, temporary: Path, final: Path, finish: Finish | None, hashing: ThreadPool) -> None:
        """Finish the temporary folder, make it a checkpoint, and end the hashing threads."""
        step = int(final.name.rpartition("_")[2])
        with hashing, removed_on_failure(temporary, f"{final} could not be saved", _INTACT):
            if finish is not None:
                with reporting_growth(temporary, hashing, self._on_progress):
                    finish()
            write_manifest(temporary, hashing, self._on_progress)
            os.rename(temporary, final)
            sync_to_disk(self._root)
        try:
            self._write_tracker()
        except OSError as error:  # Trigon never reads it
            self._warn(f"{self._root / TRACKER} could not be written: {error}; the checkpoint is complete")
        self.save_seconds = max(time.monotonic() - self._save_started, self.save_seconds or 0.0)
        self.published_step = step
        self._remove_old(newest=step)

    def _warn_not_saved(self, step: int, error: DiskError) -> None:
        """Warn that a run continues without the checkpoint of this step."""
        try:
            steps = self._folders()
        except OSError as unreadable:
            last = f"the others cannot be listed ({unreadable})"
        else:
            last = f"the last one is of step {max(steps)}" if steps else "there is none yet"
        self._warn(
            f"THE CHECKPOINT OF STEP {step} IS NOT SAVED: {error}. The run continues, and saves the next one when it "
            f"is due; {last}"
        )

    def _folders(self) -> dict[int, Path]:
        """Return every global_step_N folder, damaged or not, by step."""
        if not self._root.is_dir():
            return {}
        found = ((_STEP.fullmatch(entry.name), entry) for entry in self._root.iterdir() if entry.is_dir())
        return {int(match.group(1)): entry for match, entry in found if match}

    def _complete_folders(self) -> dict[int, Path]:
        """Return the folders whose files all exist with their sizes, by step; nothing is hashed."""
        return {step: folder for step, folder in self._folders().items() if is_complete(folder)}

    def _ranked_by_score(self) -> list[tuple[float, int]]:
        """Return (score, step) of the complete checkpoints that have a score, best first.

        Only those whose scores can be compared with the newest score.
        """
        scored: list[tuple[float, int]] = []
        newest_by: str | None = None
        for step, folder in sorted(self._complete_folders().items(), reverse=True):
            _, progress, score = read_progress(folder)
            if score is None:
                continue
            validated_by = progress.get(VALIDATED_BY)
            newest_by = validated_by if newest_by is None else newest_by
            if validated_by in (None, newest_by):
                scored.append((score, step))
        return sorted(scored, key=lambda pair: (-pair[0], pair[1]))

    def _open_first_undamaged(self, steps: list[int], *, resumable: bool) -> Checkpoint | None:
        if not steps:
            return None
        problems = []
        for step in steps:
            try:
                verify_checkpoint(
                    self._root / f"global_step_{step}", optimizer=resumable, on_progress=self._on_progress
                )
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._warn(f"DAMAGED CHECKPOINT: {problem}. The previous good one, global_step_{step}, is used instead")
            return open_checkpoint(self._root / f"global_step_{step}", resumable=resumable, verify=False)
        raise CheckpointError(
            f"every checkpoint in {self._root} is damaged: {'; '.join(problems)}. Restore one, or start a new run with "
            "trainer.find_last_checkpoint=false"
        )

    def _write_tracker(self) -> None:
        """Write the tracker, from the steps and scores in the folders."""
        ranked = self._ranked_by_score()
        score, best = ranked[0] if ranked else (None, None)
        _write_json(
            self._root / TRACKER,
            {
                "last_global_step": max(self._complete_folders(), default=None),
                "best_global_step": best,
                "best_val_reward_score": score,
            },
        )
        sync_to_disk(self._root)

    def _remove_old(self, *, newest: int) -> None:
        """Remove the oldest complete checkpoints beyond keep, but never the newest or the best."""
        if self._keep < 1:
            return
        try:
            folders = self._complete_folders()
            kept = {newest, *(step for _, step in self._ranked_by_score()[:1])}
        except OSError as error:
            self._warn(f"old checkpoints could not be removed: {error}; the next save tries again")
            return
        for step in sorted(folders, reverse=True):
            if len(kept) < self._keep:
                kept.add(step)
        for step in sorted(set(folders) - kept):
            # Renamed first, so that a crash during the removal leaves no incomplete global_step_N.
            renamed = self._root / f"{_REMOVING}{folders[step].name}"
            try:
                os.rename(folders[step], renamed)
                sync_to_disk(self._root)
            except OSError as error:
                self._warn(f"could not remove the old checkpoint {folders[step]}: {error}")
                continue
            self._remove(renamed)

    def _remove(self, folder: Path) -> None:
        try:
            if folder.is_symlink():  # a checkpoint that the user moved to another disk
                folder.unlink()
            else:
                shutil.rmtree(folder)
        except FileNotFoundError:  # moved or deleted by the user meanwhile
            return
        except OSError as error:  # no reason to stop training
            self._warn(f"could not remove {folder}: {error}; the next save tries again")


def find_checkpoints(root: Path) -> list[Path]:
    """Return the folders of the complete checkpoints in a run folder, by step; none is verified."""
    return [folder for _, folder in sorted(CheckpointStore(root, keep=-1)._complete_folders().items())]


def open_checkpoint(
    folder: Path, *, resumable: bool, verify: bool = True, on_progress: OnProgress = no_progress
) -> Checkpoint:
    """Return the checkpoint in a folder that the user named, after verifying all its files.

    Args:
        folder: named global_step_N, or holding a manifest under another name; or its actor folder,
            which EasyR1's commands name.
        resumable: whether a run continues from it. If not, its optimizer state is neither required
            nor verified.
        verify: False if the hashes were compared already. on_progress: see verify_checkpoint.
    Raises: CheckpointError if it is missing or damaged, if its name says another step than its
    content, or if it lacks what a resume needs.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    parent = folder.resolve().parent
    if folder.resolve().name == "actor" and (parent / MANIFEST).is_file():
        folder = parent
    name = _STEP.fullmatch(folder.resolve().name)
    if name is None and not (folder / MANIFEST).is_file():
        inside = sorted(entry.name for entry in folder.iterdir() if _STEP.fullmatch(entry.name))
        hint = f"; it holds {', '.join(inside)}: name one of them" if inside else ""
        raise CheckpointError(
            f"{folder} is not a checkpoint: its name is not global_step_N and it has no {MANIFEST}{hint}"
        )
    manifest = read_manifest(folder)
    if verify:
        try:
            verify_checkpoint(folder, optimizer=resumable, on_progress=on_progress)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Restore this file, or name another checkpoint") from error
    if resumable and not any(is_optimizer(file) for file in manifest):
        raise CheckpointError(
            f"{folder} holds no optimizer state (it was saved with trainer.save_model_only=true): it can be exported, "
            "not resumed. To train on from its weights, export it, set worker.actor.model.model_path to the export, "
            "and set trainer.find_last_checkpoint=false or another trainer.save_checkpoint_path"
        )
    step, progress, score = read_progress(folder)
    if name is not None and int(name.group(1)) != step:
        raise CheckpointError(f"{folder} holds step {step}: it was renamed; rename it back to global_step_{step}")
    return Checkpoint(step, folder, progress, score)


def is_complete(folder: Path) -> bool:
    """Return whether all files are there with their sizes, and progress can be read."""
    try:
        read_progress(folder)
        entries = read_manifest(folder).items()
        return all((folder / name).is_file() and (folder / name).stat().st_size == e["bytes"] for name, e in entries)
    except (CheckpointError, OSError):
        return False


def read_progress(folder: Path) -> tuple[int, Mapping[str, Any], float | None]:
    """Return (step, progress, score) of a checkpoint. Raises: CheckpointError."""
    path = folder / PROGRESS
    try:
        state = read_json_object(path, max_bytes=None)  # its size is in the manifest
        step, progress, score = state["step"], state["progress"], state["val_reward_score"]
        if type(step) is not int or not isinstance(progress, dict):
            raise ValueError("it has no step, or no progress")
        if score is not None and not isfinite(score):
            raise ValueError(f"its score is {score}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it, or use another checkpoint") from error
    return step, progress, score


@contextmanager
def removed_on_failure(
    temporary: Path,
    failure: str,
    advice: str,
    *,
    explained: tuple[type[BaseException], ...] = (DiskError, EngineError),
) -> Iterator[None]:
    """Remove a temporary folder if the context fails, and explain the fault of a disk.

    failure, advice: what the DiskError says before and after the fault. explained: errors that say
    enough, and are raised as they are, also if they quote the error of a disk. After an EngineError
    there are no workers that could continue.
    """
    try:
        yield
    except BaseException as error:
        fault = None if isinstance(error, explained) else fault_number(error)
        # Described first: afterwards the disk may have room.
        description = "" if fault is None else describe_fault(error, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        if fault is not None:
            raise DiskError(f"{failure}: {description}{advice}") from error
        raise


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_json(path, content, indent=1, allow_nan=False, sync=True)


# -- manifests -------------------------------------------------------------------------------------


def start_hashing_threads() -> ThreadPool:
    """Start the threads that write_manifest uses; leaving the pool's context ends them."""
    return ThreadPool(min(_MAX_HASHING_THREADS, count_usable_cpus()))


def write_manifest(folder: Path, threads: ThreadPool, on_progress: OnProgress = no_progress) -> None:
    """Flush all files and folders of a checkpoint to the disk, and write its manifest.

    threads: started before, since none can be started once the main thread has ended (Python 3.12),
    and a save in the background may still be running then. (A ThreadPoolExecutor would accept no
    work then, with any Python.)
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert any(folder / "actor" in path.parents for path in files), "the train engine wrote nothing"
    names = [path.relative_to(folder).as_posix() for path in files]
    _write(folder, dict(zip(names, _hash_files(files, threads, on_progress, flush=True), strict=True)))
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(inner)


def verify_checkpoint(folder: Path, *, optimizer: bool, on_progress: OnProgress = no_progress) -> None:
    """Raise CheckpointError unless all files of the manifest have their sizes and hashes.

    A file that engines would load and the manifest does not have is an error too: tensors are read
    from all files of a folder. optimizer: whether to verify the files of the optimizer.
    """
    try:
        entries = {name: entry for name, entry in read_manifest(folder).items() if optimizer or not is_optimizer(name)}
        engines = [name for name in ("actor", "critic") if (folder / name).is_dir()]
        found = [file for name in engines for file in _files_below(folder, name)]
        found += [path.name for path in folder.glob("*.safetensors")]
        added = [name for name in found if name not in entries and (optimizer or not is_optimizer(name))]
        if added:
            raise CheckpointError(
                f"{folder / added[0]} was not saved with the checkpoint, and could be loaded with it; move it away "
                f"({len(added)} such {'file' if len(added) == 1 else 'files'})"
            )
        paths = [folder / name for name in entries]
        for path, entry in zip(paths, entries.values(), strict=True):
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, but {entry['bytes']:,} were saved")
        with start_hashing_threads() as threads:
            hashes = _hash_files(paths, threads, on_progress)
    except OSError as error:
        if error.errno not in _DAMAGED_DISK:
            raise
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    for path, actual, saved in zip(paths, hashes, entries.values(), strict=True):
        if actual["sha256"] != saved["sha256"]:
            raise CheckpointError(f"{path} has other contents than were saved (SHA-256 differs)")


def is_optimizer(name: str) -> bool:
    """Return whether a file of a checkpoint is of the optimizer. name: within the folder."""
    return name.startswith(("actor/optimizer", "critic/optimizer"))  # a folder, or the one file of a small engine


def _files_below(folder: Path, inner: str) -> Iterator[str]:
    """Yield the paths within folder of all files below inner that a run could load.

    Links are followed. What begins with a dot is skipped, since file systems and desktops leave
    such files, except a safetensors file, which would be read.
    """
    visited: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder / inner, onerror=_raise, followlinks=True):
        status = os.stat(parent)
        within = Path(parent).relative_to(folder).as_posix()
        if (status.st_dev, status.st_ino) in visited or within in WITH_EXPORTS:  # a link may lead back
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") or name.endswith(".safetensors"):
                yield f"{within}/{name}"


def _raise(error: OSError) -> None:
    raise error


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {path within the folder: {"bytes": int, "sha256": str}}.

    Raises: CheckpointError if there is no manifest, or if it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.rglob("*.pt")):
            raise CheckpointError(f"{folder} holds pickled .pt files of EasyR1 or verl: merge it with their own merger")
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never completed; use another checkpoint")
    try:
        files = read_json_object(path)["files"]
        is_valid = PROGRESS in files and all(map(_is_entry, files, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{path} cannot be read as a manifest; restore it, or use another checkpoint")
    return dict(files)


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether this can be a line of a manifest: its file is inside the folder."""
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
    return is_inside and type(entry["bytes"]) is int and type(entry["sha256"]) is str


def total_bytes(folder: Path) -> int:
    """Return the size of all files of the manifest. Raises: as read_manifest."""
    return sum(entry["bytes"] for entry in read_manifest(folder).values())


@contextmanager
def replacing_files(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Allow these files to be replaced in the context, and hash them again at its end.

    names: paths within the folder; the caller flushes the files that replace them.
    A crash inside the context leaves a checkpoint that verifies, without entries for these files.
    """
    entries = read_manifest(folder)
    _write(folder, {name: entry for name, entry in entries.items() if name not in names})
    sync_to_disk(folder)  # before a file is replaced
    yield
    for parent in {(folder / name).parent for name in names}:
        sync_to_disk(parent)
    _write(folder, entries | {name: _hash_file(folder / name) for name in names})
    sync_to_disk(folder)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below a folder, and itself, to the disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        sync_to_disk(path)


def _write(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    _write_json(folder / MANIFEST, {"files": entries})


def _hash_file(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _hash_files(
    paths: Sequence[Path], threads: ThreadPool, on_progress: OnProgress, *, flush: bool = False
) -> list[dict[str, Any]]:
    """Return the manifest entries of files. flush: write each to the disk first."""

    def hash_file(path: Path) -> dict[str, Any]:
        if flush:
            sync_to_disk(path)
            on_progress()
        entry = _hash_file(path)
        on_progress()
        return entry

    return threads.map(hash_file, paths, chunksize=1)


def exported_step(folder: Path) -> int | None:
    """Return the step of an export, or None if the folder is none."""
    try:
        record = read_json_object(folder / EXPORT_RECORD)
        return int(record["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
