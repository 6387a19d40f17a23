"""Which sockets processes listen on, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Listener(NamedTuple):
    """A socket that takes connections (TCP) or packets from anyone (UDP). process: its title."""

    process: str
    protocol: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return the sockets on which these processes listen; Unix sockets are not among them."""
    by_inode: dict[str, tuple[str, str, int]] = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        table = Path("/proc/net") / protocol
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            remote_port = fields[2].rpartition(":")[2]
            if fields[3] == "0A" if protocol.startswith("tcp") else remote_port == "0000":
                address, _, port = fields[1].partition(":")
                by_inode[fields[9]] = (protocol, _decode(address), int(port, 16))
    found = set()
    for pid in pids:
        try:
            process = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            links = list(Path(f"/proc/{pid}/fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        for link in links:
            try:
                target = os.readlink(link)
            except (FileNotFoundError, ProcessLookupError):  # it was closed meanwhile
                continue
            if target.startswith("socket:[") and target[8:-1] in by_inode:
                found.add(Listener(process, *by_inode[target[8:-1]]))
    return found


def descendants(pid: int) -> set[int]:
    """Return a process and all processes that it and its children have started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queue = set(), [pid]
    while queue:
        found.add(each := queue.pop())
        queue += children.get(each, [])
    return found


def outside_address() -> str | None:
    """Return an IPv4 address of this machine that others may reach; None if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the system chooses the address to send from
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if ipaddress.ip_address(address).is_loopback else address


def _decode(address: str) -> str:
    """Decode an address of /proc/net: hexadecimal, each 32 bits in its byte order."""
    raw = bytes.fromhex(address)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return str(ipaddress.ip_address(words))
