"""Refuses a run that cannot fit into the memory that is there, before anything is loaded.

The message has the arithmetic of the phase that exceeds it most, and the changes that help most:
the same arithmetic is made again with each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trigon.assemble.memory import Hardware, PhaseMemory, RunMemory, count_memory, size_of_model
from trigon.assemble.remedies import Changes, format_changes, list_changes
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.sizes import ModelSize
from trigon.system.machine import count_total_bytes
from trigon.system.terminal import format_bytes

TIGHT = 0.95
"""Fraction of a pool of memory above which a run that is expected to need as much is warned."""

_MOST_REMEDIES = 3


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the configuration.

    saved_bytes: what it saves in the phase that did not fit. fits: whether the run fits with it.
    """

    changes: Changes
    saved_bytes: int
    fits: bool

    def __str__(self) -> str:
        fits = ", and the run fits" if self.fits else ""
        return f"{format_changes(self.changes)}: {format_bytes(self.saved_bytes)} less{fits}"


def find_hardware(device: torch.device) -> Hardware:
    """Return the memory of this process's device and machine."""
    if device.type == "cuda":
        return Hardware("cuda", int(torch.cuda.mem_get_info(device)[1]), count_total_bytes())
    return Hardware("cpu", 0, count_total_bytes())


def check_memory(
    config: Config, hardware: Hardware, *, warn: Callable[[str], None], size: ModelSize | None = None
) -> RunMemory | None:
    """Raise ConfigError if the run certainly does not fit, and warn if it probably does not.

    warn: called with a message. size: as for memory_counter.
    Returns: the memory of the run; None if trainer.check_memory is false.
    """
    if not config.trainer.check_memory:
        return None
    count = memory_counter(config, hardware, size)
    memory = count(config)
    anyway = "trainer.check_memory=false starts the run all the same."
    worst = memory.worst(certain=True)
    if memory.fraction(worst, certain=True) > 1:
        remedies = find_remedies(config, memory, worst, count)
        lines = [
            f"this run needs at least {format_bytes(worst.certain)} during {worst.phase}, and there are "
            f"{memory.describe_capacity(worst)} ({worst.where}):",
            *(f"  {format_bytes(part.certain):>10}  {part.name}" for part in worst.parts if part.certain),
            "What helps most:" if remedies else "No single change of the configuration helps.",
            *(f"  {remedy}" for remedy in remedies),
            anyway,
        ]
        raise ConfigError("\n".join(lines))
    if memory.problem is not None:
        raise ConfigError(f"{memory.problem}\n{anyway}")
    if not memory.counts_passes:
        warn(
            "the activations of this model's family are not counted: only weights, optimizer states and the rollout "
            "engine were compared with the memory that is there"
        )
        return memory
    likely = memory.worst(certain=False)
    if memory.fraction(likely, certain=False) > TIGHT:
        warn(
            f"memory is tight: {likely.phase} is expected to need {format_bytes(likely.expected)} of "
            f"{memory.describe_capacity(likely)} ({likely.where}) where prompts and completions have "
            "their maximum length"
        )
    return memory


def memory_counter(config: Config, hardware: Hardware, size: ModelSize | None = None) -> Callable[[Config], RunMemory]:
    """Return a function that counts the memory of a configuration with other options.

    It creates the model, without memory, once for each value of the options that change its size.
    size: sizes of the model of config, if they are known.
    """
    sizes: dict[tuple[Any, ...], ModelSize] = {} if size is None else {_sized_by(config): size}

    def count(changed: Config) -> RunMemory:
        key = _sized_by(changed)
        if key not in sizes:
            sizes[key] = size_of_model(changed)
        return count_memory(changed, sizes[key], hardware)

    return count


def _sized_by(config: Config) -> tuple[Any, ...]:
    """Return the values of the options that change the sizes of the models, but for their paths."""
    actor, critic = config.worker.actor.model, config.worker.critic
    models = ((each.lora.rank, each.freeze_vision_tower) for each in (actor, critic.model))
    return (*models, critic.share_trunk)


def find_remedies(
    config: Config,
    memory: RunMemory,
    worst: PhaseMemory,
    count: Callable[[Config], RunMemory],
    *,
    certain: bool = True,
) -> list[Remedy]:
    """Return the changes that save most in a phase, those with which the run fits first.

    count: returns the memory of a changed configuration.
    certain: compare what the run needs at least; False: what it is expected to need.
    """

    def remedy_of(changes: Changes) -> Remedy:
        changed = count(with_options(config, changes))
        place = (worst.phase, worst.pool, worst.workers)
        same = (each for each in changed.phases if (each.phase, each.pool, each.workers) == place)
        saved = worst.needed(certain=certain) - sum(each.needed(certain=certain) for each in same)
        return Remedy(changes, saved, fits=changed.fits(certain=certain))

    remedies = []
    for alternatives in list_changes(config, memory.hardware.device, memory.tensor_parallel_sizes):
        saving = [each for each in map(remedy_of, alternatives) if each.saved_bytes > 0]
        if saving:  # the mildest with which the run fits, or else the one that saves most
            remedies.append(
                next((each for each in saving if each.fits), max(saving, key=lambda each: each.saved_bytes))
            )
    return sorted(remedies, key=lambda remedy: (not remedy.fits, -remedy.saved_bytes))[:_MOST_REMEDIES]
