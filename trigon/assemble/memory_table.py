"""The memory of a run as data: parts, phases, pools of memory, and a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Pool = Literal["GPU", "host"]
"""GPU: of each rank. host: of a node, for all of its ranks together."""

Workers = Literal["all", "learners", "samplers"]
"""The workers that a phase is of: those of one pool, or all."""

Phase = Literal[
    "start",
    "weight sync",
    "sampling",
    "log-probs",
    "update",
    "optimizer step",
    "critic values",
    "critic update",
    "save",
]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the memory of a phase. certain: what it needs at least, in bytes."""

    name: str
    expected: int
    certain: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of a phase in one pool of memory, of one or of all pools of workers."""

    phase: Phase
    pool: Pool
    parts: tuple[Part, ...]
    workers: Workers = "all"

    @property
    def where(self) -> str:
        """Whose memory it is, for people."""
        place = "GPU" if self.pool == "GPU" else "host"
        return place if self.workers == "all" else f"{place} of {self.workers}"

    @property
    def expected(self) -> int:
        """The bytes that the phase is expected to need."""
        return sum(part.expected for part in self.parts)

    @property
    def certain(self) -> int:
        """The bytes that the phase needs at least."""
        return sum(part.certain for part in self.parts)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run finds. device_bytes: of each GPU; 0 on the CPU. host_bytes: of each node."""

    device: Literal["cpu", "cuda"]
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of a run.

    phases: on the GPUs, and in host memory. counts_passes: False for a family whose passes are not
    counted; their parts are then 0. tensor_parallel_sizes: numbers of GPUs that can hold one copy
    of the model in the rollout engine together.
    """

    hardware: Hardware
    phases: tuple[PhaseMemory, ...]
    counts_passes: bool
    tensor_parallel_sizes: tuple[int, ...]

    def capacity(self, phase: PhaseMemory) -> int:
        """Return the size of the pool of a phase in bytes."""
        return self.hardware.device_bytes if phase.pool == "GPU" else self.hardware.host_bytes

    def worst(self, *, certain: bool) -> PhaseMemory:
        """Return the phase that exceeds its pool most, or comes nearest to its limit.

        certain: by what it needs at least; False: by what it is expected to need.
        """
        return max(
            self.phases,
            key=lambda phase: (phase.certain if certain else phase.expected) / max(1, self.capacity(phase)),
        )

    def table(self) -> str:
        """Return all phases and parts as text for people, in GiB."""
        lines = []
        for phase in self.phases:
            lines.append(
                f"{phase.phase}, {phase.where}: {format_gib(phase.expected)} of {format_gib(self.capacity(phase))}"
            )
            lines += [f"    {format_gib(part.expected):>12}  {part.name}" for part in phase.parts if part.expected]
        return "\n".join(lines)


def exactly(name: str, num_bytes: int) -> Part:
    """Return a part that is needed in any case."""
    return Part(name, num_bytes, num_bytes)


def phase_of(phase: Phase, pool: Pool, parts: Iterable[Part]) -> PhaseMemory:
    """Return a phase without the parts that are empty."""
    return PhaseMemory(phase, pool, tuple(part for part in parts if part.expected))


def format_gib(num_bytes: int) -> str:
    """Return bytes as text in GiB, or in MiB below a tenth of one GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:,.1f} MiB"
