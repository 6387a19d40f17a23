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
    store: Store = TCPStore(
        address,
        port,
        size,
        is_master=listener is not None,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=size is not None,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return store
