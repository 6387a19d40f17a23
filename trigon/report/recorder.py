"""Writes the rollouts of a run, and the images of their prompts, while the run goes on.

The files of a step are written by a thread, in order. At most MAX_PENDING files wait; then the run
waits for the disk. What cannot be written is lost, and counted (log_faults.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from trigon.errors import BadRow
from trigon.report.image_store import ImageStore
from trigon.report.log_faults import LogFaults
from trigon.report.rollouts import RolloutRow, Split, TurnRecord
from trigon.report.run_folder import RunFolder

ReadImages = Callable[[str], Sequence[bytes]]
"""Returns the images of a prompt, by its id, as encoded files. Called from several threads."""

MAX_PENDING = 4
IMAGE_THREADS = 4


class RolloutRecorder:
    """Writes rollouts from a thread.

    images: None: prompts are recorded without images. token_texts: decodes token by token; needed
    for rows with tokens. faults: told what cannot be written, from the thread. warn: called with a
    message if the images of a prompt cannot be read; from the thread.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        images: ImageStore | None,
        token_texts: Callable[[Sequence[int]], Sequence[str]] | None,
        faults: LogFaults,
        warn: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._images = images
        self._token_texts = token_texts
        self._faults = faults
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="images")
        self._pending: deque[Future[None]] = deque()
        self._image_files: dict[tuple[bool, str], tuple[str, ...]] = {}  # by (validation, prompt id)

    def write(self, step: int, split: Split, rows: Sequence[RolloutRow], read_images: ReadImages) -> None:
        """Write a rollouts file in the background.

        rows: without image files, and with empty texts of tokens. read_images: of their prompts.
        Raises: what made an earlier file impossible to write, unless it is an OSError.
        """
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, step, split, rows, read_images))

    def flush(self) -> None:
        """Wait until all files are written. Raises: as write."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Write what is pending, and end the threads. Raises: as flush."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._image_threads.shutdown()

    def _write(self, step: int, split: Split, rows: Sequence[RolloutRow], read_images: ReadImages) -> None:
        files: dict[str, tuple[str, ...]] = {}
        if self._images is not None:
            prompt_ids = list(dict.fromkeys(row.prompt_id for row in rows if row.images))
            stored = self._image_threads.map(
                lambda prompt_id: self._stored_images(prompt_id, split, read_images), prompt_ids
            )
            files = dict(zip(prompt_ids, stored, strict=True))
        complete = [
            replace(self._with_texts(row), image_files=files.get(row.prompt_id, ()), turns=self._stored_turns(row))
            for row in rows
        ]
        try:
            self._folder.write_rollouts(step, split, complete)
        except OSError as error:
            self._faults.lost("rollouts", len(complete), error)
        else:
            self._faults.written("rollouts")

    def _stored_images(self, prompt_id: str, split: Split, read_images: ReadImages) -> tuple[str, ...]:
        assert self._images is not None
        key = (split == "validation", prompt_id)  # the ids of the two may be equal
        if key not in self._image_files or not self._images.has(self._image_files[key]):
            try:
                self._image_files[key] = tuple(
                    self._images.add(encoded, where=f"image {index} of {prompt_id}")
                    for index, encoded in enumerate(read_images(prompt_id))
                )
            except BadRow as error:
                self._warn(f"the images of {prompt_id} are not recorded: {error}")
                self._image_files[key] = ()
            except OSError as error:
                self._faults.lost("images of prompts", 1, error)
                return ()
            else:
                self._faults.written("images of prompts")
        return self._image_files[key]

    def _stored_turns(self, row: RolloutRow) -> tuple[TurnRecord, ...]:
        """Return the turns of a row, with the files of their images if they are to be stored."""
        return tuple(
            replace(turn, image_files=self._stored_files(turn.images, f"an observation of {row.prompt_id}"), images=())
            for turn in row.turns
        )

    def _stored_files(self, images: Sequence[bytes], where: str) -> tuple[str, ...]:
        if self._images is None or not images:
            return ()
        try:
            files = tuple(self._images.add(encoded, where=where) for encoded in images)
        except OSError as error:
            self._faults.lost("images of observations", len(images), error)
            return ()
        self._faults.written("images of observations")
        return files

    def _with_texts(self, row: RolloutRow) -> RolloutRow:
        if row.tokens is None:
            return row
        assert self._token_texts is not None, "rows with tokens need a tokenizer"
        return replace(row, tokens=replace(row.tokens, texts=tuple(self._token_texts(row.tokens.ids))))
