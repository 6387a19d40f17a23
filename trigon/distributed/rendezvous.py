"""The store in which the ranks of torch.distributed meet: one port, at a stated address only.

torch's TCPStore by itself listens on all interfaces, and it has no password: who reaches its port
reads and writes it.
"""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_SECONDS = 600.0
"""Maximum deadline of joining the process group, in which a wrong network setting makes ranks hang.

Most of it is for importing packages from a slow disk."""


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at a free port of this IPv4 address, and at no other address."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen()
    return listener


def open_store(address: str, port: int, *, size: int, listener: socket.socket | None) -> Store:
    """Return the store of all ranks, which all of them open together.

    Args:
        size: number of ranks. listener: on rank 0 the socket of that address and port, which the
            store takes over; None on all others.
    """
    timeout = datetime.timedelta(seconds=JOIN_SECONDS)
    if listener is None:
        store: Store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    else:
        store = TCPStore(address, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())
    return store
