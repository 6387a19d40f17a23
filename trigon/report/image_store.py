"""The images of a run's prompts, as files in its folder: each distinct image once.

    root/images/<SHA-256 of the dataset's image file>.png

Small files are stored as they are, others reduced; see file_for_display.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from trigon.data.images import file_for_display
from trigon.report.rollouts import IMAGES

MAX_BYTES = 128 * 2**10
"""Files up to this size are stored unchanged."""


class ImageStore:
    """Stores images below a run folder. add() may be called from several threads.

    max_side: width and height in pixels to which larger files are reduced.
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
