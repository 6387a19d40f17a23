"""The hardware of a plan: specification figures of accelerators, and what `--gpus` says.

The figures are those that the manufacturers publish, each with its source; none was measured here.
A rate that a run gets is a figure of this module times an efficiency of timing.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trigon.assemble.memory_table import GIB
from trigon.errors import ConfigError
from trigon.models.flops import peak_tflops
from trigon.system.suggestions import nearest

NETWORK_GBPS = 400.0
"""Assumed network of each GPU between nodes, in Gbit/s in each direction: one NDR InfiniBand port.
"""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device, by its specification.

    device_name: as torch names it; trigon.models.flops has the peaks by this name.
    memory_bytes: that torch finds; a little less than the product's name says.
    flops: dense, per second, in bfloat16. memory_rate, link_rate, host_rate: bytes per second of
    its memory, of its link to the other GPUs of the node in one direction, and to host memory.
    source: of the figures.
    """

    name: str
    device_name: str
    memory_bytes: int
    flops: float
    memory_rate: float
    link_rate: float
    host_rate: float
    source: str

    def of_cores(self, cores: int) -> Accelerator:
        """Return so many CPU cores as one device."""
        return replace(self, name=f"{cores} CPU core{'s' if cores > 1 else ''}", flops=self.flops * cores)


def _gpu(
    name: str, device_name: str, memory_gib: float, memory_tb: float, link_gb: float, host_gb: float, source: str
) -> Accelerator:
    peak = peak_tflops(device_name)
    assert peak is not None, f"{device_name} has no peak in trigon/models/flops.py"
    return Accelerator(
        name=name,
        device_name=device_name,
        memory_bytes=int(memory_gib * GIB),
        flops=peak * 1e12,
        memory_rate=memory_tb * 1e12,
        link_rate=link_gb * 1e9,
        host_rate=host_gb * 1e9,
        source=source,
    )


# NVLink is specified with the sum of both directions; half of it is one direction. GPUs without
# NVLink use PCIe: 32 GB/s in each direction for 16 lanes of version 4, 64 GB/s of version 5.
ACCELERATORS: Mapping[str, Accelerator] = {
    each.name: each
    for each in (
        _gpu("A100-40G", "A100-SXM4-40GB", 39.4, 1.555, 300, 32, "NVIDIA A100 datasheet"),
        _gpu("A100-80G", "A100-SXM4-80GB", 79.2, 2.039, 300, 32, "NVIDIA A100 datasheet"),
        _gpu("A800-80G", "A800-SXM4-80GB", 79.2, 2.039, 200, 32, "NVIDIA A800 datasheet"),
        _gpu("H100-80G", "H100 80GB HBM3", 79.6, 3.35, 450, 64, "NVIDIA H100 datasheet, SXM"),
        _gpu("H800-80G", "H800 80GB HBM3", 79.6, 3.35, 200, 64, "NVIDIA H800 datasheet, SXM"),
        _gpu("H200-141G", "H200", 139.8, 4.8, 450, 64, "NVIDIA H200 datasheet, SXM"),
        _gpu("L20-48G", "L20", 44.5, 0.864, 32, 32, "NVIDIA L20 datasheet"),
        _gpu("L40S-48G", "L40S", 44.5, 0.864, 32, 32, "NVIDIA L40S datasheet"),
        _gpu("RTX4090-24G", "GeForce RTX 4090", 23.6, 1.008, 32, 32, "NVIDIA Ada GPU architecture whitepaper"),
    )
}
"""By name. A name without its memory means the largest: H100 is H100-80G."""

CPU = Accelerator(
    name="CPU core",
    device_name="cpu",
    memory_bytes=0,
    flops=50e9,
    memory_rate=10e9,
    link_rate=5e9,
    host_rate=10e9,
    source="an assumption: CPUs differ by a factor of ten; calibrate with a run of this machine",
)
"""One worker's share of a machine without GPUs."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run. network_rate: bytes per second of each one between nodes."""

    nodes: int
    gpus_per_node: int
    accelerator: Accelerator
    network_rate: float = NETWORK_GBPS / 8 * 1e9

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node} x {self.accelerator.name}"


def parse_gpus(text: str, *, nodes: int, gpus_per_node: int) -> Cluster:
    """Return the devices that a text names: 8xH100-80G, or 2x8xA100-40G for two nodes.

    nodes, gpus_per_node: for a text without numbers, such as H200.
    Raises: ConfigError for an unknown GPU, with the nearest known one.
    """
    written = re.fullmatch(r"(?:([1-9]\d{0,4})[xX*])?(?:([1-9]\d{0,4})[xX*])?([A-Za-z][\w -]*|4090)", text.strip())
    if written is None:
        raise ConfigError(f"cannot read the GPUs {text!r}: write 8xH100-80G, or 2x8xH100-80G for two nodes")
    accelerator = find_accelerator(written[3])
    match [int(count) for count in (written[1], written[2]) if count is not None]:
        case [count]:
            nodes, gpus_per_node = 1, count
        case [first, second]:
            nodes, gpus_per_node = first, second
    return Cluster(nodes, gpus_per_node, accelerator)


def find_accelerator(text: str) -> Accelerator:
    """Return the accelerator of a name: H100-80G, h100, A100-80GB, RTX 4090, 4090.

    Raises: ConfigError for an unknown one.
    """
    name = re.sub(r"[ _]", "-", text.upper()).removesuffix("B").replace("GEFORCE-", "").replace("RTX-", "RTX")
    name = f"RTX{name}" if name.startswith("4090") else name
    matching = [each for each in ACCELERATORS.values() if each.name == name or each.name.partition("-")[0] == name]
    if not matching:
        short = {each.partition("-")[0]: each for each in ACCELERATORS}
        near = nearest(name.partition("-")[0], short)
        hint = "" if near is None else f"; did you mean {short[near]}?"
        raise ConfigError(
            f"unknown GPU {text!r}{hint}\nknown are {', '.join(ACCELERATORS)}; one of the same speed and memory "
            "has the same plan"
        )
    return max(matching, key=lambda each: each.memory_bytes)


def accelerator_named(device_name: str) -> Accelerator | None:
    """Return the accelerator that torch names so, or None if its figures are not known."""
    name = device_name.removeprefix("NVIDIA ")
    peak = peak_tflops(name)
    matching = [each for each in ACCELERATORS.values() if each.device_name.split()[0] == name.split()[0]]
    return matching[-1] if matching and peak is not None else None
