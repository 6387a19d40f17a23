"""Writes the folder of a run, except its checkpoints: configuration, metrics, rollouts, images.

    root/
      config.yaml                       the resolved configuration of the last start
      earlier_configs/001.yaml ...      configurations of earlier starts, where they differ
      starts.jsonl                      one line per start: where it resumed, and what had changed
      local_sources.json                paths of the model, data, code and templates on the machine
      auto_micro_batch.json             measured token budgets, with trainer.auto_micro_batch
      hang_stacks.txt                   stacks of all processes, if the run hung
      skipped_rows.jsonl                rows of the datasets that are not used, if there are any
      metrics.jsonl                     one line per step: {"step": 12, "metrics": {...}}
      rollouts/step_000012.jsonl        the rollouts that step 12 learned from, one per line
      rollouts/filtered_000012.jsonl    those sampled for it that no step learns from, if any
      rollouts/validation_000012.jsonl  the validation rollouts after step 12
      images/<SHA-256>.png              images of the prompts, with trainer.save_images
      mlflow.json, wandb.json           the id of the run in MLflow and W&B, with these loggers
      mlflow/                           MLflow's files, with this logger and no tracking server
      run.lock                          locked while a run writes to the folder
      set_aside/report/ ...             reports of an earlier run that began at step 0 too
      global_step_12/ ...               checkpoints; see trigon/checkpoint/store.py

A number that is not finite is written as null, since JSON has no nan.

What a run reports while it continues goes through RunWriter. The rollouts files of a step are
written by a thread, in order. At most MAX_PENDING files wait; then the run waits for the disk. What
cannot be written, as on a full disk, does not end the run: a fault is reported when it begins and
when it ends, and each step tries again. Lines of metrics.jsonl wait in memory meanwhile; rollouts
and images are lost. At the end the run says what is missing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import socket
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trigon.data.images import file_for_display
from trigon.errors import BadRow, CheckpointError, ConfigError
from trigon.report.rollouts import IMAGES, RolloutRow, Split, file_name, find_rollouts, row_to_line, to_json_line
from trigon.report.run import CONFIG, LOCK, METRICS, SOURCES, StepMetrics, parse_step, read_metrics
from trigon.system.files import (
    describe_fault,
    fault_number,
    read_json_object,
    replace_file,
    sync_to_disk,
    write_json,
)
from trigon.system.terminal import sanitize

EARLIER_CONFIGS = "earlier_configs"
STARTS = "starts.jsonl"
BUDGETS = "auto_micro_batch.json"
SKIPPED_ROWS = "skipped_rows.jsonl"

ReadImages = Callable[[str], Sequence[bytes]]
"""Returns the images of a prompt, by its id, as encoded files. Called from several threads."""

MAX_PENDING = 4
IMAGE_THREADS = 4

MAX_WAITING_LINES = 10_000
"""Lines of metrics.jsonl that may wait; beyond them the first are lost."""

MAX_IMAGE_BYTES = 128 * 2**10
"""Image files up to this size are stored unchanged."""

_LINES = f"lines of {METRICS}"


class RunFolder:
    """The folder of a run, locked until close().

    Raises: ConfigError if another run has locked it, if it cannot be written, or if the locale has
    no encoding for its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_encoding(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is not writable")
            self._lock = _lock(path / LOCK)
        except OSError as error:
            raise ConfigError(
                f"the run folder {path} cannot be written: {error.strerror or error}. Set "
                "trainer.save_checkpoint_path to a folder that can, or change its permissions"
            ) from error
        self._skipped_rows: list[bytes] = []
        self._described: dict[str, bytes] = {}  # files to be written again if the folder is
        for name in (METRICS, STARTS):
            _remove_incomplete_line(path / name)

    def write_config(self, text: str) -> None:
        """Write config.yaml: text is the resolved configuration as YAML."""
        self._described[CONFIG] = text.encode()
        replace_file(self.path / CONFIG, self._described[CONFIG])

    def record_start(self, config: str, content: Mapping[str, Any]) -> None:
        """Write config.yaml, and add a line to starts.jsonl: the time, and content.

        Another config.yaml that is there is copied into earlier_configs first.
        """
        path, earlier = self.path / CONFIG, self.path / EARLIER_CONFIGS
        if path.exists() and (before := path.read_bytes()) != config.encode():
            earlier.mkdir(exist_ok=True)
            copies = sorted(earlier.glob("*.yaml"))
            # A start that died between the copy and the replacement has made the copy already.
            if not copies or copies[-1].read_bytes() != before:
                replace_file(earlier / f"{len(copies) + 1:03d}.yaml", before)
        self.write_config(config)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _append(self.path / STARTS, to_json_line({"time": now, **content}))

    def write_local_sources(self, paths: Mapping[str, str]) -> None:
        """Write local_sources.json: see RunRecord.local_sources."""
        write_json(self.path / SOURCES, paths, sync=True)
        self._described[SOURCES] = (self.path / SOURCES).read_bytes()

    def write_budgets(self, content: Mapping[str, Any]) -> None:
        """Write auto_micro_batch.json."""
        write_json(self.path / BUDGETS, content, sync=True)

    def read_budgets(self) -> dict[str, Any] | None:
        """Return the content of auto_micro_batch.json, or None if there is no such file.

        Raises: CheckpointError if it is not a JSON object.
        """
        path = self.path / BUDGETS
        if not path.exists():
            return None
        try:
            return read_json_object(path)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not valid JSON ({error}); remove it to measure the budgets again"
            ) from error

    def write_skipped_rows(self, dataset: str, rows: Sequence[tuple[int, str, str]]) -> Path:
        """Add rows of a dataset to skipped_rows.jsonl, and return the file.

        The first call replaces the file of an earlier start; where no row is skipped there is none.
        dataset: as in data.train_files. rows: (index, reason, message) of each.
        """
        self._skipped_rows += [
            to_json_line({"dataset": dataset, "row": row, "reason": reason, "message": message})
            for row, reason, message in rows
        ]
        path = self.path / SKIPPED_ROWS
        if self._skipped_rows:
            replace_file(path, b"".join(self._skipped_rows))
        else:
            path.unlink(missing_ok=True)
        return path

    def restore(self) -> str | None:
        """Make the folder again if it was moved or deleted since the run has written to it.

        Returns: a warning, or None if it is where it was. Raises: ConfigError if another run writes
        to it by now; OSError.
        """
        try:
            # By the file's identity: its text may have changed, and so may the name of this host.
            if os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK)):
                return None
        except FileNotFoundError:
            pass
        # A save in the background may have made the folder, without these files.
        is_new = not all((self.path / name).exists() for name in (*self._described, "."))
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.path / LOCK)
        os.close(self._lock)
        self._lock = lock
        for name, content in self._described.items():
            replace_file(self.path / name, content)
        if is_new:
            return (
                f"THE RUN FOLDER {self.path} WAS MOVED OR DELETED. It was made again, and the run continues in it, "
                "without its earlier checkpoints, metrics and rollouts"
            )
        return f"{self.path / LOCK} was removed or replaced while the run writes to this folder; it is locked again"

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step, and flush it to the disk.

        Raises: OSError; then no part of the line is in the file.
        """
        line = to_json_line({"step": step, "metrics": {key: metrics[key] for key in sorted(metrics)}})
        _append(self.path / METRICS, line)

    def read_metrics(self) -> list[StepMetrics]:
        """Return the metrics of all steps so far; see read_metrics."""
        return read_metrics(self.path)

    def write_rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow]) -> Path:
        """Write the rollouts of a step and return the file. It is replaced atomically."""
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        path = folder / file_name(step, split)
        replace_file(path, b"".join(map(row_to_line, rows)))
        return path

    def rewind(self, step: int) -> Path | None:
        """Remove metrics and rollouts after this step, from which a run resumes.

        A resumed run thereby leaves the same files as one that was not interrupted. At step 0 the
        run starts from the beginning, and an earlier run's files are moved instead.
        Returns: the folder to which files were moved, or None.
        """
        if step == 0:
            return self._move_reports()
        path = self.path / METRICS
        if path.exists():
            lines = [line for line in path.read_bytes().split(b"\n") if line]
            replace_file(path, b"".join(line + b"\n" for line in lines if parse_step(line, path).step <= step))
        for file in find_rollouts(self.path):
            if file.step > step:
                file.path.unlink()
        return None

    def _move_reports(self) -> Path | None:
        reports = [self.path / name for name in (METRICS, "rollouts", IMAGES) if (self.path / name).exists()]
        if not reports:
            return None
        names = itertools.chain(["report"], (f"report.{again}" for again in itertools.count(2)))
        target = next(t for t in (self.path / "set_aside" / name for name in names) if not t.exists())
        target.mkdir(parents=True)
        for entry in reports:
            os.rename(entry, target / entry.name)
        return target

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunWriter:
    """Writes into the folder of a run until it is closed.

    images: None: prompts are recorded without images. token_texts: decodes token by token; needed
    for rows with tokens. warn: called with a message, from any thread.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        images: ImageStore | None = None,
        token_texts: Callable[[Sequence[int]], Sequence[str]] | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._images = images
        self._token_texts = token_texts
        self._warn = warn
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self._pending: deque[Future[None]] = deque()
        self._image_files: dict[tuple[bool, str], tuple[str, ...]] = {}  # by (validation, prompt id)
        self._lock = threading.Lock()
        self._lost: Counter[str] = Counter()
        self._failing: set[str] = set()

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, after those that wait.

        Raises: ConfigError if the run folder was moved, and another run has taken its place.
        """
        self._waiting.append((step, metrics))
        self._try_lines()

    def rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow], read_images: ReadImages) -> None:
        """Write a rollouts file in the background.

        rows: rows without image files, and with empty texts of tokens. read_images: reads the
        images of their prompts.
        Raises: what made an earlier file impossible to write, unless it is an OSError.
        """
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write_rollouts, step, split, rows, read_images))

    def flush(self) -> None:
        """Wait until all rollouts are written, and try again to write the lines that wait.

        Raises: as rollouts and metrics.
        """
        while self._pending:
            self._pending.popleft().result()
        if self._waiting:
            self._try_lines()

    def close(self) -> None:
        """Write what is pending, end the threads, and warn of all that is lost."""
        try:
            self.flush()
            self._lost += Counter({_LINES: len(self._waiting)})
            if self._lost:
                numbers = ", ".join(f"{number:,} {kind}" for kind, number in sorted(self._lost.items()))
                self._warn(f"could not be written and are not in {self._folder.path}: {numbers}")
        finally:
            self._thread.shutdown()
            self._image_threads.shutdown()

    def _try_lines(self) -> None:
        """Write the lines that wait, or warn that they still wait."""
        try:
            self._write_lines()
        except OSError as error:
            excess = max(len(self._waiting) - MAX_WAITING_LINES, 0)
            for _ in range(excess):
                self._waiting.popleft()
            self._count_lost(_LINES, excess, error, consequence="They wait in memory")
        else:
            self._note_written(_LINES)

    def _write_lines(self) -> None:
        if self._waiting and (moved := self._folder.restore()) is not None:
            self._warn(moved)
        while self._waiting:
            self._folder.append_metrics(*self._waiting[0])
            self._waiting.popleft()

    def _write_rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow], read_images: ReadImages) -> None:
        prompt_ids = list(dict.fromkeys(row.prompt_id for row in rows if row.images))
        stored = self._image_threads.map(lambda each: self._store_of_prompt(each, split, read_images), prompt_ids)
        files = dict(zip(prompt_ids, stored, strict=True))
        complete = [self._complete(row, files.get(row.prompt_id, ())) for row in rows]
        try:
            self._folder.write_rollouts(step, split, complete)
        except OSError as error:
            self._count_lost("rollouts", len(complete), error)
        else:
            self._note_written("rollouts")

    def _complete(self, row: RolloutRow, image_files: tuple[str, ...]) -> RolloutRow:
        """Return a row with image files, also of its turns, and with the texts of its tokens."""
        tokens = row.tokens
        if tokens is not None:
            assert self._token_texts is not None, "rows with tokens need a tokenizer"
            tokens = replace(tokens, texts=list(self._token_texts(tokens.ids)))
        where = f"an observation of {row.prompt_id}"
        turns = tuple(
            replace(turn, image_files=self._store("images of observations", turn.images, where) or (), images=())
            for turn in row.turns
        )
        return replace(row, tokens=tokens, image_files=image_files, turns=turns)

    def _store_of_prompt(self, prompt_id: str, split: Split, read_images: ReadImages) -> tuple[str, ...]:
        if self._images is None:
            return ()
        key = (split == "validation", prompt_id)  # the ids of the two may be equal
        if key not in self._image_files or not self._images.has(self._image_files[key]):
            files: tuple[str, ...] | None = ()
            try:
                files = self._store("images of prompts", read_images(prompt_id), f"an image of {prompt_id}")
            except (BadRow, OSError) as error:
                self._warn(f"the images of {prompt_id} are not recorded: {error}")
            if files is None:
                return ()
            self._image_files[key] = files
        return self._image_files[key]

    def _store(self, kind: str, images: Sequence[bytes], where: str) -> tuple[str, ...] | None:
        """Store images unless they are there, and return their files; None if that fails."""
        if self._images is None or not images:
            return ()
        try:
            files = tuple(self._images.add(encoded, where=where) for encoded in images)
        except OSError as error:
            self._count_lost(kind, len(images), error)
            return None
        self._note_written(kind)
        return files

    def _count_lost(self, kind: str, number: int, error: OSError, *, consequence: str = "They are lost") -> None:
        """Count what could not be written, and warn when a fault begins.

        kind: its name in the plural.
        """
        with self._lock:
            begins = kind not in self._failing
            self._failing.add(kind)
            self._lost += Counter({kind: number})
        if begins:
            reason = str(error) if fault_number(error) is None else describe_fault(error, self._folder.path)
            self._warn(
                f"{kind} cannot be written: {reason}. {consequence}; the run continues and tries again in each step"
            )

    def _note_written(self, kind: str) -> None:
        with self._lock:
            ends = kind in self._failing
            self._failing.discard(kind)
        if ends:
            self._warn(f"{kind} are written again")


class ImageStore:
    """The images of a run's prompts, as files in its folder: each distinct image once.

        root/images/<SHA-256 of the dataset's image file>.png

    Small files are stored as they are, others reduced to at most max_side pixels in width and
    height; see file_for_display. add() may be called from several threads.
    """

    def __init__(self, run_folder: Path, *, max_side: int) -> None:
        self._folder = run_folder / IMAGES
        self._max_side = max_side
        self._listed: dict[str, str] | None = None
        self._lock = threading.Lock()

    def add(self, encoded: bytes, *, where: str) -> str:
        """Store an image unless it is there, and return its path below the run folder.

        encoded: the image file of the dataset. where: its name in errors.
        Raises: UnusableRow if it cannot be decoded; OSError if the file cannot be written.
        """
        digest = hashlib.sha256(encoded).hexdigest()
        names = self._names()
        if digest not in names or not (self._folder / names[digest]).exists():
            content, suffix = file_for_display(encoded, max_bytes=MAX_IMAGE_BYTES, max_side=self._max_side, where=where)
            self._folder.mkdir(exist_ok=True)
            name = f"{digest}{suffix}"
            with self._lock:
                replace_file(self._folder / name, content, sync=False)
            names[digest] = name
        return f"{IMAGES}/{names[digest]}"

    def has(self, names: Sequence[str]) -> bool:
        """Return whether these paths below the run folder still exist."""
        return all((self._folder.parent / name).exists() for name in names)

    def _names(self) -> dict[str, str]:
        """Return the names of the stored files by hash.

        They are listed when the first image is added, not before: a run that starts from the
        beginning moves the files of an earlier run away.
        """
        with self._lock:
            if self._listed is None:
                self._listed = {
                    # A file is empty where the machine, not only the process, stopped.
                    Path(entry.name).stem: entry.name
                    for entry in (os.scandir(self._folder) if self._folder.is_dir() else ())
                    if not entry.name.startswith(".") and entry.stat().st_size > 0
                }
            return self._listed


def _check_encoding(path: Path) -> None:
    """Raise ConfigError for a name that is not ASCII in a locale that is not UTF-8.

    Python cannot encode such a name, or has read its bytes as lone surrogates, which no file of a
    run can hold.
    """
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or str(path).isascii():
        return
    try:
        os.fsencode(path)
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the run folder {str(path)!a} has characters that file names in this locale cannot have, whose "
            f"encoding is {encoding}; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8) before the start, or choose an ASCII name"
        ) from error


def _lock(path: Path) -> int:
    """Lock the file at path, and return its descriptor.

    The lock is held until the descriptor is closed or the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # without the bits of the umask
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"{path.parent} is being written by another run ({holder}). Wait for it, stop it, or choose another "
            "trainer.experiment_name or trainer.save_checkpoint_path"
        ) from error
    except OSError as error:  # some network file systems have no locks
        text = f"{path} cannot be locked ({error}): make sure that no other run uses this folder"
        warnings.warn(sanitize(text, max_characters=5000), stacklevel=3)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a crash, so that no line is appended to it."""
    if path.exists():
        content = path.read_bytes()
        num_bytes = content.rfind(b"\n") + 1
        if num_bytes < len(content):
            os.truncate(path, num_bytes)


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file, and flush it to the disk; if that fails, none of it is there."""
    with path.open("ab", buffering=0) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):  # a disk that is nearly full takes a part
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError:
            file.truncate(num_bytes)
            raise
    if num_bytes == 0:
        sync_to_disk(path.parent)
