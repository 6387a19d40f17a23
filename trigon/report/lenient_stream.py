"""A text stream that does not end a run when it cannot be written.

Output that is redirected to a file fails when the disk is full, a pipe when its reader has ended,
and a terminal when it is closed.
"""

from __future__ import annotations

from typing import Any, TextIO


class LenientStream:
    """Passes text to a stream. What cannot be written is dropped, and counted when that ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = 0

    def write(self, text: str) -> int:
        """Write text, after a note of what was dropped before; return its number of characters."""
        note = f"({self._dropped:,} writes to this output failed)\n" if self._dropped else ""
        try:
            self._stream.write(note + text)
        except OSError:
            self._dropped += 1
        else:
            self._dropped = 0
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError:
            self._dropped += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
