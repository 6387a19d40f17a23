"""The manifest of a checkpoint folder: the size and SHA-256 of every file in it.

A folder without a manifest was never completed. Checkpoints are verified against their manifests
before they are used.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any

from trigon.errors import CheckpointError
from trigon.system.files import DAMAGED_FILE_SYSTEM, read_json_object, sync_to_disk, write_json
from trigon.system.machine import count_usable_cpus

MANIFEST = "manifest.json"
EXPORT_RECORD = "trigon_export.json"
"""Names the exported checkpoint; later exports may replace a folder that has this file."""

EXPORTED = "huggingface_model"
"""Folder of the export within a checkpoint, the default of `trigon export`."""
PROGRESS = "progress.json"
"""The one file, beside those of the train engine, that every checkpoint has."""

WITH_EXPORTS = ("actor/huggingface", "actor/lora_adapter")
"""Folders to which an export may add files, and of which a run loads nothing."""

_MAX_HASHING_THREADS = 8
_DAMAGED_DISK = (errno.EIO, *DAMAGED_FILE_SYSTEM)


OnProgress = Callable[[], object]
"""Called, from any thread, for each file that was written or read."""


def no_progress() -> None:
    """Be told of progress, and do nothing."""


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


def has_all_files(folder: Path) -> bool:
    """Return whether all files of a readable manifest exist with their sizes; nothing is hashed."""
    try:
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"]
            for name, entry in read_manifest(folder).items()
        )
    except (CheckpointError, OSError):
        return False


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
    write_json(folder / MANIFEST, {"files": entries}, indent=1, allow_nan=False, sync=True)


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
