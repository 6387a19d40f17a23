"""Writes what a run reports into its folder while the run continues: metrics, rollouts, images.

The rollouts files of a step are written by a thread, in order. At most MAX_PENDING files wait; then
the run waits for the disk. What cannot be written, as on a full disk, does not end the run: a fault
is reported when it begins and when it ends, and each step tries again. Lines of metrics.jsonl wait
in memory meanwhile; rollouts and images are lost. At the end the run says what is missing.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trigon.data.images import file_for_display
from trigon.errors import BadRow
from trigon.report.rollouts import IMAGES, RolloutRow, Split
from trigon.report.run import METRICS
from trigon.report.run_folder import RunFolder
from trigon.system.files import describe_fault, fault_number

ReadImages = Callable[[str], Sequence[bytes]]
"""Returns the images of a prompt, by its id, as encoded files. Called from several threads."""

MAX_PENDING = 4
IMAGE_THREADS = 4

MAX_WAITING_LINES = 10_000
"""Lines of metrics.jsonl that may wait; beyond them the first are lost."""

MAX_BYTES = 128 * 2**10
"""Image files up to this size are stored unchanged."""

_LINES = f"lines of {METRICS}"


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
        try:
            self._write_lines()
        except OSError as error:
            excess = max(len(self._waiting) - MAX_WAITING_LINES, 0)
            for _ in range(excess):
                self._waiting.popleft()
            self._count_lost(_LINES, excess, error, consequence="They wait in memory")
        else:
            self._note_written(_LINES)

    def rollouts(self, step: int, split: Split, rows: Sequence[RolloutRow], read_images: ReadImages) -> None:
        """Write a rollouts file in the background.

        rows: without image files, and with empty texts of tokens. read_images: of their prompts.
        Raises: what made an earlier file impossible to write, unless it is an OSError.
        """
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write_rollouts, step, split, rows, read_images))

    def flush(self) -> None:
        """Wait until all rollouts are written. Raises: as rollouts."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Write what is pending, end the threads, and warn of all that is lost."""
        try:
            self.flush()
            try:
                self._write_lines()
            except OSError as error:
                self._count_lost(_LINES, len(self._waiting), error)
            if self._lost:
                numbers = ", ".join(f"{number:,} {kind}" for kind, number in sorted(self._lost.items()))
                self._warn(f"could not be written and are not in {self._folder.path}: {numbers}")
        finally:
            self._thread.shutdown()
            self._image_threads.shutdown()

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
        """Return a row with its image files, those of its turns, and the texts of its tokens."""
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
        """Count what could not be written, and warn when a fault begins. kind: in the plural."""
        with self._lock:
            begins = kind not in self._failing
            self._failing.add(kind)
            self._lost += Counter({kind: number})
        if begins:
            reason = str(error) if fault_number(error) is None else describe_fault(error, self._folder.path)
            self._warn(f"{kind} cannot be written: {reason}. {consequence}; the run goes on, and each step tries again")

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
            content, suffix = file_for_display(encoded, max_bytes=MAX_BYTES, max_side=self._max_side, where=where)
            self._folder.mkdir(exist_ok=True)
            name = f"{digest}{suffix}"
            # Two threads may write the same file: each replaces it by the same content.
            temporary = self._folder / f".{name}.{os.urandom(4).hex()}"
            try:
                temporary.write_bytes(content)
                os.replace(temporary, self._folder / name)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            names[digest] = name
        return f"{IMAGES}/{names[digest]}"

    def has(self, names: Sequence[str]) -> bool:
        """Return whether these paths below the run folder still exist."""
        return all((self._folder.parent / name).exists() for name in names)

    def _names(self) -> dict[str, str]:
        """Return the names of the stored files by hash.

        They are listed when the first image is added, not before: a run that starts from the
        beginning moves those of an earlier one away.
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
