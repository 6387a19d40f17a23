"""How a child of child.py begins, in its own process, after the supervisor has confined it."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import socket
import sys

from trigon.system.confinement import kernel
from trigon.system.confinement.supervisor import Confined
from trigon.system.frames import encode_frame
from trigon.system.signals import outlive_stop_signals

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that user code may write."""


def start(channel_fd: int, confined: Confined, *, max_open_files: int) -> socket.socket:
    """Limit this process, before it runs user code, and say how it is confined.

    max_open_files: and sockets. Returns: the channel to the driver, a blocking socket.
    """
    outlive_stop_signals()  # the driver, which saves first, ends this process
    kernel.set_limits(
        {
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: max_open_files,
            resource.RLIMIT_CORE: 0,
        }
    )
    with contextlib.suppress(OSError):  # not on Linux, or not permitted
        kernel.end_first_without_memory()
    os.set_inheritable(channel_fd, False)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable(file=2)
    channel = socket.socket(fileno=channel_fd)
    channel.setblocking(True)
    channel.sendall(encode_frame({"used": list(confined.used), "obstacle": confined.obstacle}))
    return channel
