"""One child process for code that may hang, crash, leak, or lie.

Knows how such a process is started without a fork of this one (threads of torch and vLLM may be running), what it may
see and use, how it is spoken to, and how it is killed with everything that it started. Refuses to know about answers
and scores. The other end is trigon.rewards.worker.

    parent                                  child (own session, own process group)
    channel  <== lines of JSON ==>          channel
    stdin    --- never written --->         lifeline: when the parent is gone, the kernel kills the child's group
    stdout   <-- text of the user's code -- stdout and stderr
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

MAX_REPLY_BYTES = 1 << 20
"""Longest line that a child may send."""

MAX_OUTPUT_BYTES = 1 << 16
"""Text of the user's code that is shown for each piece of work; the rest is dropped, and said to be."""

_log = logging.getLogger(__name__)  # as a warning, so that it reaches stderr where nobody has set logging up

_TAIL_BYTES = 4000
_MAX_LINE_CHARACTERS = 500

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from trigon.rewards.worker import main; main(int(sys.argv[1]))"

_SECRET_WORDS = {"APIKEY", "AUTH", "KEY", "KEYS", "PASSWD", "PASSWORD", "SECRET", "SECRETS", "TOKEN", "TOKENS"}
_SECRET_WORDS |= {"CREDENTIAL", "CREDENTIALS"}
_SECRET_PREFIXES = ("AWS_", "AZURE_", "WANDB_", "SWANLAB_", "MLFLOW_TRACKING_")
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]+:[^/@\s]+@")


class ChildProcess:
    """A child that has been started. It sets its own limits before it does anything else.

    ended: no more lines will come, because it is gone or has sent what no honest child sends. Kill it then.
    """

    def __init__(self, name: str) -> None:
        """Start a child. name prefixes what it prints."""
        self.name = name
        self.ended = False
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                bufsize=0,
                env=child_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline = self._process.stdin
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._received = b""
        self._line = b""
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last of what it has printed since it was last sent something."""
        return self._tail.decode(errors="replace")

    def send(self, line: str, *, timeout_seconds: float) -> None:
        """Hand one line over, and start to count its output anew.

        Raises: TimeoutError if the child does not take it; ConnectionError if it is gone.
        """
        self._tail = b""
        self._bytes_to_show = MAX_OUTPUT_BYTES
        self.channel.settimeout(timeout_seconds)
        self.channel.sendall(line.encode() + b"\n")

    def receive(self) -> list[bytes]:
        """Return the whole lines that have arrived. Call it when the channel is readable."""
        try:
            arrived = self.channel.recv(1 << 16)
        except ConnectionResetError:
            arrived = b""
        *lines, self._received = (self._received + arrived).split(b"\n")
        self.ended = not arrived or len(self._received) > MAX_REPLY_BYTES
        return lines

    def show_output(self) -> bool:
        """Pass what the child has printed on to this module's log. Return False once it has closed its output."""
        text = self.output.read(1 << 16)
        self._show(text or b"")
        return text != b""

    def kill(self) -> int:
        """Kill the child and all that it started, free everything, and return its exit code, or minus its signal.

        -SIGKILL means that it was alive until now (or that the system had killed it); anything else was its own end.
        """
        # Until the child is waited for, its id cannot become another's, and its own way out stays on record.
        os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._show(self.output.read(1 << 16) or b"")  # all that a pipe holds
        self._show(b"\n" if self._line else b"")
        for stream in (self._lifeline, self.output, self.channel):
            stream.close()
        self.ended = True
        return code

    def _show(self, text: bytes) -> None:
        self._tail = (self._tail + text)[-_TAIL_BYTES:]
        *lines, self._line = (self._line + text[: max(self._bytes_to_show, 0)]).split(b"\n")
        for line in lines:
            _log.warning("[%s] %s", self.name, harmless(line))
        if 0 <= self._bytes_to_show < len(text):
            _log.warning("[%s] ... more than %d bytes printed; the rest is not shown", self.name, MAX_OUTPUT_BYTES)
        self._bytes_to_show -= len(text)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what looks like a secret: tokens, keys, passwords, trackers' and clouds' own.

    It also makes sets iterate in the same order in every child, keeps numeric libraries to one thread each, and hides
    the GPUs, whose memory belongs to the model.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not (
            _SECRET_WORDS & set(name.upper().split("_"))
            or name.upper().startswith(_SECRET_PREFIXES)
            or _URL_WITH_PASSWORD.search(value)
        )
    }
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def ending_of(code: int) -> str:
    """Say in words how a process ended that nobody here killed."""
    if code == -signal.SIGKILL:
        return "was killed by the system, perhaps for want of memory"
    return f"exited with code {code}" if code >= 0 else f"died of signal {-code} ({signal.strsignal(-code)})"


def harmless(line: bytes) -> str:
    """Return a line as a terminal can safely show it: no control characters, no changes of direction, not too long."""
    text = line.decode(errors="replace").rstrip("\r")
    shown = "".join(c if c.isprintable() or c == "\t" else "�" for c in text[:_MAX_LINE_CHARACTERS])
    return shown + f" ... ({len(text)} characters)" * (len(text) > _MAX_LINE_CHARACTERS)
