"""The memory of a critic, added to that of the policy's phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from trigon.assemble.memory_table import Part, Phase, PhaseMemory, Pool, phase_of

_OWN = ("weights", "gradients", "optimizer states")
_PASSES: Mapping[Phase, Phase] = {"log-probs": "critic values", "update": "critic update"}


class Counted(Protocol):
    """Counts the memory of one model's phases; see memory.py."""

    def on_device(self) -> Sequence[PhaseMemory]:
        """Return the phases on the GPU of one rank."""
        ...

    def on_host(self) -> Sequence[PhaseMemory]:
        """Return the phases in the host memory of a node."""
        ...

    def resting(self, pool: Pool) -> list[Part]:
        """Return the weights, of the reference too, and states in a pool while others work."""
        ...

    def copied(self) -> Part:
        """Return the copy that a save makes in the host memory of a node."""
        ...


def add_critic(phases: Sequence[PhaseMemory], policy: Counted, critic: Counted) -> list[PhaseMemory]:
    """Return the phases of a policy with what its critic keeps in them, and the critic's passes.

    The copy of a checkpoint and what is offloaded are in host memory. During the critic's passes
    the policy rests: what it offloads has left the device.
    """
    added = []
    for phase in phases:
        parts = [*phase.parts, *map(_of_critic, critic.resting(phase.pool))]
        if (phase.phase, phase.pool) == ("save", "host"):
            parts.append(_of_critic(critic.copied()))
        added.append(phase_of(phase.phase, phase.pool, parts))
    pools = {phase.pool for phase in phases}
    for phase in (*(critic.on_device() if "GPU" in pools else ()), *critic.on_host()):
        if phase.phase in _PASSES:
            parts = [_of_critic(part) if part.name in _OWN else part for part in phase.parts]
            added.append(phase_of(_PASSES[phase.phase], phase.pool, [*parts, *policy.resting(phase.pool)]))
    return added


def _of_critic(part: Part) -> Part:
    return replace(part, name=f"critic's {part.name}")
