"""The manifest of a checkpoint folder: the size and SHA-256 of every file in it.

A folder without a manifest was never completed. Checkpoints are verified against their manifests
before they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from trigon.cpus import count_usable_cpus
from trigon.errors import CheckpointError
from trigon.json_files import write_json

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
"""The one file, beside those of the train engine, that every checkpoint has."""

_MAX_HASHING_THREADS = 8


def start_hashing_threads() -> ThreadPool:
    """Start the threads that write_manifest uses; leaving the pool's context ends them."""
    return ThreadPool(min(_MAX_HASHING_THREADS, count_usable_cpus()))


def write_manifest(folder: Path, threads: ThreadPool) -> None:
    """Flush all files and folders of a checkpoint to the disk, and write its manifest.

    threads: started before, since none can be started once the main thread has ended (Python 3.12),
    and a save in the background may still be running then. (A ThreadPoolExecutor would accept no
    work then, with any Python.)
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert any(folder / "actor" in path.parents for path in files), "the train engine wrote nothing"
    for path in files:
        sync_to_disk(path)
    names = (path.relative_to(folder).as_posix() for path in files)
    _write(folder, dict(zip(names, _hash_files(files, threads), strict=True)))
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_to_disk(inner)


def verify_files(folder: Path, *, include: Callable[[str], bool] = lambda name: True) -> None:
    """Raise CheckpointError unless all files of the manifest have their sizes and hashes.

    include: takes the path of a file within the folder and returns whether to verify it; hashing
    reads it entirely.
    """
    entries = {name: entry for name, entry in read_manifest(folder).items() if include(name)}
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, but {entry['bytes']:,} were saved")
    paths = [folder / name for name in entries]
    with start_hashing_threads() as threads:
        hashes = _hash_files(paths, threads)
    for path, actual, saved in zip(paths, hashes, entries.values(), strict=True):
        if actual["sha256"] != saved["sha256"]:
            raise CheckpointError(f"{path} has other contents than were saved (SHA-256 differs)")


def has_all_files(folder: Path) -> bool:
    """Return whether all files of a readable manifest exist with their sizes; nothing is hashed."""
    try:
        files = read_manifest(folder)
    except CheckpointError:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
    )


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
        files = json.loads(path.read_bytes())["files"]
        is_valid = all(isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str) for entry in files.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid or PROGRESS not in files:
        raise CheckpointError(f"{path} cannot be read as a manifest; restore it, or use another checkpoint")
    return dict(files)


def total_bytes(folder: Path) -> int:
    """Return the size of all files of the manifest. Raises: as read_manifest."""
    return sum(entry["bytes"] for entry in read_manifest(folder).values())


@contextmanager
def replacing_files(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Allow these files to be replaced in the context, and hash them again at its end.

    names: paths within the folder.
    A crash inside the context leaves a checkpoint that verifies, without entries for these files.
    """
    entries = read_manifest(folder)
    _write(folder, {name: entry for name, entry in entries.items() if name not in names})
    yield
    _write(folder, entries | {name: _hash_file(folder / name) for name in names})
    sync_to_disk(folder)


def sync_to_disk(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    write_json(folder / MANIFEST, {"files": entries}, indent=1, allow_nan=False, sync=True)


def _hash_file(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _hash_files(paths: Sequence[Path], threads: ThreadPool) -> list[dict[str, Any]]:
    return threads.map(_hash_file, paths, chunksize=1)
