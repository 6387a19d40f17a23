"""One episode as its pool knows it: what was sent to its process, and what that still owes."""

from __future__ import annotations

import socket
from typing import Literal

from trigon.environments.frames import Frame, FrameReader

Owed = Literal["", "reset", "step"]


class RunningEpisode:
    """An episode, with the connection to its process once that has been forked.

    number: of the caller. key: of the fork server; numbers may be used again, keys are not.
    opening: frames for the process when it is forked. again: the same frames until it has been
    forked, for another fork server. owed: the call whose outcome the caller waits
    for; "": none. deadline: when it must have come or, with is_ending, when the process must have
    ended. error: why the episode has failed, in one line; "" if it has not.
    """

    def __init__(self, number: int, key: int, *, max_reply_bytes: int) -> None:
        self.number = number
        self.key = key
        self.opening = b""
        self.again = b""
        self.owed: Owed = ""
        self.deadline: float | None = None
        self.is_ending = False
        self.error = ""
        self.connection: socket.socket | None = None
        self._unsent = memoryview(b"")
        self._reader = FrameReader(max_bytes=max_reply_bytes)

    def wait_again(self) -> None:
        """Return to what it was before it was given to a fork server that has not forked it."""
        self.opening, self.again = self.again, b""
        self.deadline, self.is_ending = None, False
        self._unsent = memoryview(b"")

    @property
    def has_unsent(self) -> bool:
        """Whether something is left to be sent."""
        return len(self._unsent) > 0

    def send(self, data: bytes) -> None:
        """Add data to what is to be sent, and send what the connection takes without waiting."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes. That the process has ended is found in another way."""
        assert self.connection is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent[: 1 << 18]) :]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended, or has closed its connection
            self._unsent = memoryview(b"")

    def receive(self) -> tuple[list[Frame], bool]:
        """Return the frames that have arrived, and whether the process may send more.

        Raises: ValueError if it has sent something else.
        """
        assert self.connection is not None
        frames: list[Frame] = []
        while True:
            try:
                data = self.connection.recv(1 << 20)
            except BlockingIOError:
                return frames, True
            except OSError:
                data = b""
            if not data:
                return frames, False
            frames += self._reader.feed(data)
