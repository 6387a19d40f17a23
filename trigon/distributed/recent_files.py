"""The media files that a worker has received lately, so that they need not be sent again.

The driver keeps one RecentFiles for each worker, and the worker another one. Both add the files of
each message in the order of the messages, so they always hold the same files: the driver knows what
a worker has without asking it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from trigon.types import Completion, EncodedMedia, Prompt, TrainSequence

MAX_BYTES = 2**30
"""Files that a worker keeps. Beyond it, the least recently used are dropped, and sent again."""


class RecentFiles:
    """Files by hash, the least recently used dropped first."""

    def __init__(self, *, keeps_content: bool, max_bytes: int = MAX_BYTES) -> None:
        """Start empty.

        Args:
            keeps_content: whether the files themselves are kept, as in a worker. The driver only
                keeps their sizes.
            max_bytes: the total size of the files; the same in the driver and its workers.
        """
        self._keeps_content = keeps_content
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by hash; least recently used first
        self._contents: dict[str, bytes] = {}
        self._num_bytes = 0

    def __contains__(self, file_hash: object) -> bool:
        """Return whether a file with this hash is held."""
        return file_hash in self._sizes

    def __getitem__(self, file_hash: str) -> bytes:
        """Return a file that is held, of a RecentFiles that keeps contents."""
        return self._contents[file_hash]

    def add(self, parts: Iterable[Prompt | Completion | TrainSequence]) -> None:
        """Add the files of a message's prompts and completions, in the order of their encoding.

        Files that are held already count as used again. To be called after the message has been
        encoded or decoded.
        """
        for part in parts:
            if isinstance(part.vision, EncodedMedia):
                for file_hash, file in zip(part.vision.hashes, part.vision.encoded, strict=True):
                    self._add_file(file_hash, file)
        while self._num_bytes > self._max_bytes:
            dropped, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
            self._contents.pop(dropped, None)

    def _add_file(self, file_hash: str, file: bytes) -> None:
        if file_hash in self._sizes:
            self._sizes.move_to_end(file_hash)
            return
        self._sizes[file_hash] = len(file)
        self._num_bytes += len(file)
        if self._keeps_content:
            self._contents[file_hash] = file
