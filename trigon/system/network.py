"""The loopback interface, on which the processes of a run on one machine listen."""

from __future__ import annotations

import fcntl
import socket
import struct

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # Linux ioctl: get the IPv4 address of a network interface


def loopback_variables() -> dict[str, str]:
    """Return the environment variables by which gloo and NCCL listen on the loopback interface.

    By default gloo listens on the address that the host name resolves to, and NCCL on the first
    interface that is not the loopback. GPUs of one machine exchange tensors through NVLink, PCIe or
    shared memory all the same.
    """
    interface = find_interface(LOOPBACK)
    assert interface is not None, f"no network interface has the address {LOOPBACK}"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                ifreq = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(ifreq[20:24]) == address:
                return name
    return None
