"""The store in which the ranks of torch.distributed meet: one port, at a stated address only.

torch's TCPStore by itself listens on all interfaces, and it has no password: any process that
reaches its port can read and write it.
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


def open_store(
    address: str,
    port: int,
    *,
    listener: socket.socket | None,
    size: int | None = None,
    seconds: float = JOIN_SECONDS,
) -> Store:
    """Return the store of all ranks.

    Args:
        listener: the socket of that address and port on rank 0, which the store takes over; None on
            all other ranks.
        size: number of ranks, for all of which rank 0 waits; None: it waits for none.
        seconds: time limit of connecting, and of each wait for a key.
    """
    timeout, waits = datetime.timedelta(seconds=seconds), size is not None
    if listener is None:
        store: Store = TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=waits)
    else:
        descriptor = listener.detach()
        store = TCPStore(
            address, port, size, is_master=True, timeout=timeout, wait_for_workers=waits, master_listen_fd=descriptor
        )
    return store
