"""Checkpoints that are whole or absent, whenever the process is killed.

    root/
      checkpoint_tracker.json     last and best step, for people and other tools; nothing here trusts it
      global_step_5/
        actor/                    what the train engine wrote: weights/, optimizer/, state.json
        progress.json             where the loop stood, and the validation score of these weights
        manifest.json             size and SHA-256 of every file above
      .saving_global_step_10/     being written, or left behind by a run that died; removed at the next save
      set_aside/                  checkpoints later than the step that a run went back to

A save is written aside, flushed, hashed, renamed into place, pointed at, and only then are old ones removed; all but
the taking of copies can happen behind the run's back. The folders are the truth: what is newest or best is read from
them. Knows files, hashes and JSON; refuses to know what a tensor is. One run writes into a root at a time: the lock of
its run folder sees to that.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from trigon.errors import CheckpointError

TRACKER = "checkpoint_tracker.json"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"

_STEP = re.compile(r"global_step_(\d+)")
_SAVING = ".saving_"
_REMOVING = ".removing_"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were found to be those that were saved.

    step: training steps taken. folder: root/global_step_N. progress: what the loop gave to save, after a round trip
    through JSON. score: the validation reward of these very weights, None if they were not validated.
    """

    step: int
    folder: Path
    progress: Mapping[str, Any]
    score: float | None

    @property
    def actor(self) -> Path:
        """The folder that the train engine wrote."""
        return self.folder / "actor"


Finish = Callable[[], None]
"""The rest of a save, for which nothing that training changes is needed any more. May run in another thread."""

Write = Callable[[Path], Finish | None]
"""Fills the (existing, empty) actor folder, or copies what belongs there and returns a Finish that will."""


class CheckpointStore:
    """The checkpoints of one run.

    keep: how many to leave on disk; below 1, all. The newest and the best are never removed, so keep=1 can leave two.
    background: whether save returns as soon as copies are taken, and a thread writes, hashes and publishes them: one
    save at a time. The process does not end before it is done. warn: hears of damage, fallbacks and folders that could
    not be removed.
    """

    def __init__(
        self, root: Path, *, keep: int, background: bool = False, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        self._root = root
        self._keep = keep
        self._background = background
        self._warn = warn
        self._in_hand: tuple[int, Future[None]] | None = None  # a step that is being saved

    def save(self, step: int, *, write: Write, progress: Mapping[str, Any], score: float | None) -> None:
        """Save the checkpoint of this step; after a crash at any moment it is whole or absent.

        Args: progress: JSON-able, finite numbers. score: validation reward of the weights being saved, None if they
        were not validated; the highest is best, the earlier at a tie.
        Raises: CheckpointError if the disk is full (what was there before stays), if the step is there already, or if
        the save before this one failed in the background.
        """
        self.wait()
        final = self._root / f"global_step_{step}"
        if final.exists():
            raise CheckpointError(f"{final} exists already; go back to the step before it (rewind) to write it anew")
        self._root.mkdir(parents=True, exist_ok=True)
        for prefix in (_SAVING, _REMOVING):
            for stale in self._root.glob(f"{prefix}*"):
                self._remove(stale)
        kept = self._whole()
        self.check_space(max((_manifest_bytes(folder) for folder in kept.values()), default=0))

        aside = self._root / f"{_SAVING}{final.name}"
        state = {"step": step, "val_reward_score": score if score is not None and isfinite(score) else None}
        with self._no_trace_on_failure(aside, final):
            (aside / "actor").mkdir(parents=True)
            finish = write(aside / "actor")
            _write_json(aside / PROGRESS, {**state, "progress": progress})
        if self._background:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._in_hand = step, thread.submit(self._publish, aside, final, finish)
            thread.shutdown(wait=False)  # once it has nothing more to do
        else:
            self._publish(aside, final, finish)

    def wait(self) -> None:
        """Return once no save is in hand. Raises: CheckpointError, once, if it failed in the background."""
        if self._in_hand is None:
            return
        step, saving = self._in_hand
        error = saving.exception()
        self._in_hand = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"the checkpoint of step {step} could not be saved: {error!r}") from error

    def check(self) -> None:
        """Raise what wait would raise, if that is known already; do not wait."""
        if self._in_hand is not None and self._in_hand[1].done():
            self.wait()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Have no save in hand when the context ends, however it ends. Its own error comes before that of a save."""
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
        """Return the newest sound checkpoint, passing damaged ones over with a warning; None if there is none at all.

        Args: resumable: whether a run is to go on from it, rather than only its weights be read.
        Raises: CheckpointError if all are damaged, or if resumable and the newest sound one holds no optimizer.
        """
        self.wait()
        return self._first_sound(sorted(self._folders(), reverse=True), resumable=resumable)

    def best(self, *, resumable: bool = False) -> Checkpoint | None:
        """Return the sound checkpoint of the highest score, or None if none has a score. Otherwise as latest."""
        self.wait()
        return self._first_sound([step for _, step in self._ranked()], resumable=resumable)

    def rewind(self, step: int) -> None:
        """Set every checkpoint later than this step aside, damaged ones too, so that a run can go on from there.

        Otherwise a second way on from the step would mix with the first, and a later resume would take the wrong one.
        """
        self.wait()
        for later, folder in sorted(self._folders().items()):
            if later <= step:
                continue
            resting_place = self._root / "set_aside"
            resting_place.mkdir(exist_ok=True)
            names = itertools.chain([folder.name], (f"{folder.name}.{again}" for again in itertools.count(2)))
            target = next(resting_place / name for name in names if not (resting_place / name).exists())
            os.rename(folder, target)
            self._warn(
                f"{folder} is later than step {step}, where this run starts: moved to {target}. Delete it at will"
            )
        if self._root.is_dir():
            _fsync(self._root)
            self._point()

    def check_space(self, needed_bytes: int) -> None:
        """Refuse if the disk cannot take a checkpoint of this many bytes.

        Worth asking before training, with the bytes of weights and optimizer; each save asks with the largest so far.
        """
        free = self._free_bytes()
        if free < needed_bytes:
            raise CheckpointError(
                f"a checkpoint needs about {needed_bytes:,} bytes, but the disk of {self._root} has {free:,} free. "
                "Make room, lower trainer.save_limit, or set trainer.save_checkpoint_path to another disk"
            )

    def _publish(self, aside: Path, final: Path, finish: Finish | None) -> None:
        """Make a checkpoint of a folder that was written aside, once finish has written the rest of it."""
        with self._no_trace_on_failure(aside, final):
            if finish is not None:
                finish()
            _seal(aside)
            os.rename(aside, final)
            _fsync(self._root)
            self._point()
        self._prune(newest=int(final.name.rpartition("_")[2]))

    @contextmanager
    def _no_trace_on_failure(self, aside: Path, final: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if is_disk_full(error):
                raise CheckpointError(
                    f"the disk became full while {final} was written ({self._free_bytes():,} bytes free now); earlier "
                    "checkpoints are untouched. Make room, or lower trainer.save_limit, and resume"
                ) from error
            raise

    def _free_bytes(self) -> int:
        existing = next(folder for folder in (self._root, *self._root.absolute().parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def _folders(self) -> dict[int, Path]:
        """Every global_step_N folder, sound or not, by step."""
        if not self._root.is_dir():
            return {}
        found = ((_STEP.fullmatch(entry.name), entry) for entry in self._root.iterdir() if entry.is_dir())
        return {int(match.group(1)): entry for match, entry in found if match}

    def _whole(self) -> dict[int, Path]:
        """The folders whose files are all there at their right sizes: cheap, hashes are not read."""
        return {step: folder for step, folder in self._folders().items() if _is_whole(folder)}

    def _ranked(self) -> list[tuple[float, int]]:
        """(score, step) of the whole checkpoints that have a score, best first."""
        scored = []
        for step, folder in self._whole().items():
            score = _read_progress(folder)[2]
            if score is not None:
                scored.append((score, step))
        return sorted(scored, key=lambda pair: (-pair[0], pair[1]))

    def _first_sound(self, steps: list[int], *, resumable: bool) -> Checkpoint | None:
        if not steps:
            return None
        problems = []
        for step in steps:
            try:
                _verify(self._root / f"global_step_{step}", optimizer=resumable)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                self._warn(f"DAMAGED CHECKPOINT: {problem}. The previous good one, global_step_{step}, is used instead")
            return open_checkpoint(self._root / f"global_step_{step}", resumable=resumable, verify=False)
        raise CheckpointError(
            f"every checkpoint in {self._root} is damaged: {'; '.join(problems)}. Restore one, or start anew with "
            "trainer.find_last_checkpoint=false"
        )

    def _point(self) -> None:
        """Write the tracker. Steps and scores come from the folders, so a late or torn tracker costs nothing."""
        ranked = self._ranked()
        score, best = ranked[0] if ranked else (None, None)
        _write_json(
            self._root / TRACKER,
            {
                "last_global_step": max(self._whole(), default=None),
                "best_global_step": best,
                "best_val_reward_score": score,
            },
        )
        _fsync(self._root)

    def _prune(self, *, newest: int) -> None:
        if self._keep < 1:
            return
        whole = self._whole()
        kept = {newest, *(step for _, step in self._ranked()[:1])}
        for step in sorted(whole, reverse=True):
            if len(kept) < self._keep:
                kept.add(step)
        for step in sorted(set(whole) - kept):
            # Renamed first: a crash half-way through the removal must not leave a folder that looks like a checkpoint.
            doomed = self._root / f"{_REMOVING}{whole[step].name}"
            try:
                os.rename(whole[step], doomed)
            except OSError as error:
                self._warn(f"could not remove the old checkpoint {whole[step]}: {error}")
                continue
            self._remove(doomed)

    def _remove(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except OSError as error:  # a disk that cannot forget is no reason to stop training; the next save tries again
            self._warn(f"could not remove {folder}: {error}; the next save tries again")


def open_checkpoint(folder: Path, *, resumable: bool, verify: bool = True) -> Checkpoint:
    """Return the checkpoint that a user names, once every file was found to be as saved.

    Args: folder: named global_step_N, or holding a manifest under another name. resumable: whether a run is to go on
    from it; if not, its optimizer is neither wanted nor read. verify: False when the hashes were compared already.
    Raises: CheckpointError if it is missing, damaged, of another step than its name says, or lacks what a resume needs.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    name = _STEP.fullmatch(folder.resolve().name)
    if name is None and not (folder / MANIFEST).is_file():
        inside = sorted(entry.name for entry in folder.iterdir() if _STEP.fullmatch(entry.name))
        hint = f"; it holds {', '.join(inside)}: name one of them" if inside else ""
        raise CheckpointError(
            f"{folder} is no checkpoint: its name is not global_step_N and it has no {MANIFEST}{hint}"
        )
    if verify:
        _verify(folder, optimizer=resumable)
    if resumable and not any(_is_optimizer(file) for file in _read_manifest(folder)):
        raise CheckpointError(
            f"{folder} holds no optimizer (it was saved with trainer.save_model_only=true): it can be exported, not "
            "resumed. To train on from its weights, export it, set worker.actor.model.model_path to the export, and "
            "set trainer.find_last_checkpoint=false or another trainer.save_checkpoint_path"
        )
    step, progress, score = _read_progress(folder)
    if name is not None and int(name.group(1)) != step:
        raise CheckpointError(f"{folder} holds step {step}: it was renamed; give it its name global_step_{step} back")
    return Checkpoint(step, folder, progress, score)


@contextmanager
def unsealed(folder: Path, files: tuple[str, ...]) -> Iterator[None]:
    """Let these files of a checkpoint (paths within it) be replaced in the context, and hash them anew at its end.

    A crash inside leaves a checkpoint that is sound, with these files unhashed.
    """
    entries = _read_manifest(folder)
    _write_json(folder / MANIFEST, {"files": {name: entry for name, entry in entries.items() if name not in files}})
    yield
    entries |= {name: _hashed(folder / name) for name in files}
    _write_json(folder / MANIFEST, {"files": entries})
    _fsync(folder)


def _seal(folder: Path) -> None:
    """Flush every file and folder to the disk and write the manifest of what is there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert any(folder / "actor" in path.parents for path in files), "the train engine wrote nothing"
    for path in files:
        _fsync(path)
    names = (path.relative_to(folder).as_posix() for path in files)
    entries = dict(zip(names, _all_hashed(files), strict=True))
    _write_json(folder / MANIFEST, {"files": entries})
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _fsync(inner)


def _verify(folder: Path, *, optimizer: bool) -> None:
    """Raise CheckpointError unless every file of the manifest is as saved. optimizer: whether its files count too."""
    entries = {name: entry for name, entry in _read_manifest(folder).items() if optimizer or not _is_optimizer(name)}
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, but {entry['bytes']:,} were saved")
    paths = [folder / name for name in entries]
    for path, now, entry in zip(paths, _all_hashed(paths), entries.values(), strict=True):
        if now["sha256"] != entry["sha256"]:
            raise CheckpointError(f"{path} has other contents than were saved (SHA-256 differs)")


def _is_whole(folder: Path) -> bool:
    try:
        files = _read_manifest(folder)
        _read_progress(folder)
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == e["bytes"] for name, e in files.items())


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.rglob("*.pt")):
            raise CheckpointError(f"{folder} holds pickled .pt files of EasyR1 or verl: merge it with their own merger")
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never completed")
    try:
        files = json.loads(path.read_bytes())["files"]
        ok = all(isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str) for entry in files.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        ok = False
    if not ok or PROGRESS not in files:
        raise CheckpointError(f"{path} cannot be read as a manifest")
    return dict(files)


def _read_progress(folder: Path) -> tuple[int, Mapping[str, Any], float | None]:
    path = folder / PROGRESS
    try:
        state = json.loads(path.read_bytes())
        return state["step"], state["progress"], state["val_reward_score"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _manifest_bytes(folder: Path) -> int:
    return sum(entry["bytes"] for entry in _read_manifest(folder).values())


def _is_optimizer(name: str) -> bool:
    return name.startswith("actor/optimizer")  # a folder, or the one file of a small engine


def is_disk_full(error: BaseException) -> bool:
    """Tell whether something failed because a disk or a quota is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors, and whoever passes on what happened to another rank, have the number only in their text.
    return any(mark in str(error) for number in _FULL for mark in (f"os error {number})", f"[Errno {number}]"))


def _hashed(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _all_hashed(paths: Sequence[Path]) -> list[dict[str, Any]]:
    # No ThreadPoolExecutor: it takes no work once the main thread has ended, and a save in hand is finished even then.
    with ThreadPool(8) as pool:
        return pool.map(_hashed, paths, chunksize=1)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put JSON at path: after a crash it holds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _fsync(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
