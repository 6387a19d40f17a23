"""Frames: a JSON object and some files, as bytes between two processes.

    4 bytes  length of the JSON       4 bytes each  length of each file
    4 bytes  number of files          the JSON, then the files

Numbers are big-endian. The other side may be hostile: every length is checked before it is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.system.json_files import parse_json

MAX_FILES = 1024
"""Maximum number of files of a frame."""

MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a frame that this side makes, such as a row with all of its images."""

_PREFIX = struct.Struct("!II")


@dataclass(frozen=True, slots=True)
class Frame:
    """A JSON object, and the files that belong to it."""

    content: dict[str, Any]
    files: tuple[bytes, ...]


def encode_frame(content: Mapping[str, Any], files: Sequence[bytes] = (), *, row: str | None = None) -> bytes:
    """Return a frame as bytes.

    row: a further field of content, "row", as JSON; None: there is none.
    Raises: TypeError or ValueError if JSON cannot represent content.
    """
    fields = json.dumps(content)
    text = (fields if row is None else f'{fields[:-1]}, "row": {row}}}').encode()
    lengths = struct.pack(f"!{len(files)}I", *(len(file) for file in files))
    return b"".join([_PREFIX.pack(len(text), len(files)), lengths, text, *files])


class FrameReader:
    """Makes frames of bytes as they arrive."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are now complete. Raises: ValueError if the bytes are none."""
        self._received += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        received = self._received
        if len(received) < _PREFIX.size:
            return None
        text_bytes, num_files = _PREFIX.unpack_from(received)
        start = _PREFIX.size + 4 * num_files
        if num_files > MAX_FILES or text_bytes > self._max_bytes:
            raise ValueError("it is not a frame, or too long")
        if len(received) < start:
            return None
        lengths = struct.unpack_from(f"!{num_files}I", received, _PREFIX.size)
        end = start + text_bytes + sum(lengths)
        if end > self._max_bytes:
            raise ValueError(f"it has {end:,} bytes; at most {self._max_bytes:,} are possible")
        if len(received) < end:
            return None
        content = parse_json(bytes(received[start : start + text_bytes]))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__} instead of an object")
        files, position = [], start + text_bytes
        for length in lengths:
            files.append(bytes(received[position : position + length]))
            position += length
        del received[:end]
        return Frame(content, tuple(files))
