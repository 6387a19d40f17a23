"""Frames: a JSON object and some files, as bytes between two processes, and channels for them.

    4 bytes  length of the JSON       4 bytes each  length of each file
    4 bytes  number of files          the JSON, then the files

Numbers are big-endian. The other side may be hostile: every length is checked before it is used.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trigon.system.files import parse_json

MAX_FILES = 1024
"""Maximum number of files of a frame."""

MAX_FRAME_BYTES = 1 << 32
"""Maximum size of a frame of the driver, such as a row with all of its images."""

_PREFIX = struct.Struct("!II")


@dataclass(frozen=True, slots=True)
class Frame:
    """A JSON object, and the files that belong to it."""

    content: dict[str, Any]
    files: tuple[bytes, ...]


def encode_frame(content: Mapping[str, Any], files: Sequence[bytes] = (), **fields: str) -> bytes:
    """Return a frame as bytes.

    content: not empty. fields: further fields of it, whose values are JSON already.
    Raises: TypeError or ValueError if JSON cannot represent content.
    """
    written = "".join(f', "{name}": {value}' for name, value in fields.items())
    text = f"{json.dumps(content)[:-1]}{written}}}".encode()
    lengths = struct.pack(f"!{len(files)}I", *(len(file) for file in files))
    return b"".join([_PREFIX.pack(len(text), len(files)), lengths, text, *files])


def read_frames(connection: socket.socket) -> Iterator[Frame]:
    """Yield the frames that arrive at a blocking socket, until the other side closes it."""
    reader = FrameReader(max_bytes=MAX_FRAME_BYTES)
    # It ends with ConnectionResetError if the other side had not read all when it closed.
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 18):
            yield from reader.feed(data)


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


class Channel:
    """One end of a connection by which frames are exchanged, without waiting for the other end.

    is_open: whether frames can still arrive. can_send: whether the other end still takes some.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int) -> None:
        """Use a connection. max_bytes: the maximum size of a frame that the other end may send."""
        connection.setblocking(False)
        self.connection = connection
        self.is_open = self.can_send = True
        self._reader = FrameReader(max_bytes=max_bytes)
        self._unsent: deque[tuple[memoryview, tuple[socket.socket, ...]]] = deque()

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._unsent)

    def send(self, frame: bytes, *given: socket.socket) -> None:
        """Send a frame: now what the connection takes, the rest by flush().

        given: sockets that the other end receives with the frame. They are closed here.
        """
        self._unsent.append((memoryview(frame), given))
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes; can_send says whether the other end has closed it."""
        try:
            while self._unsent:
                data, given = self._unsent[0]
                num_sent = socket.send_fds(self.connection, [data[: 1 << 18]], [each.fileno() for each in given])
                _close_all(given)
                self._unsent[0] = data[num_sent:], ()
                if num_sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.can_send = False
            self._drop_unsent()

    def receive(self) -> list[Frame]:
        """Return the first frames that have arrived, if any, and set is_open.

        Raises: ValueError if the other end has sent something else.
        """
        frames: list[Frame] = []
        while self.is_open and not frames:
            try:
                data = self.connection.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = data != b""
            frames = self._reader.feed(data)
        return frames

    def close(self) -> None:
        """Close this end."""
        self.is_open = self.can_send = False
        self._drop_unsent()
        self.connection.close()

    def _drop_unsent(self) -> None:
        for _, given in self._unsent:
            _close_all(given)
        self._unsent.clear()


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()
