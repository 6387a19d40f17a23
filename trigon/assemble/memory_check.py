"""Refuses a run that cannot fit into the memory that is there, before anything is loaded.

The message has the arithmetic of the phase that exceeds it most, and the changes that help most:
the same arithmetic is made again with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trigon.assemble.memory import count_memory
from trigon.assemble.memory_table import Hardware, PhaseMemory, RunMemory, format_gib
from trigon.assemble.model_sizes import size_of_model
from trigon.config.checks import find_contradictions
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.errors import ConfigError
from trigon.models.memory import ModelSize
from trigon.system.host_memory import count_total_bytes

TIGHT = 0.95
"""Fraction of a pool of memory above which a run that is expected to need as much is warned."""

_MOST_CHANGES = 3

Changes = Mapping[str, Any]
"""Options by name, with new values."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the configuration. saved_bytes: of the phase that did not fit.

    fits: whether the run fits with it.
    """

    changes: Changes
    saved_bytes: int
    fits: bool

    def __str__(self) -> str:
        options = " ".join(f"{name}={_yaml(value)}" for name, value in self.changes.items())
        return f"{options}: {format_gib(self.saved_bytes)} less{', and the run fits' if self.fits else ''}"


def find_hardware(device: torch.device) -> Hardware | None:
    """Return the memory of this process's device and machine; None if it cannot be read."""
    host_bytes = count_total_bytes()
    if host_bytes is None:
        return None
    if device.type == "cuda":
        return Hardware("cuda", int(torch.cuda.mem_get_info(device)[1]), host_bytes)
    return Hardware("cpu", 0, host_bytes)


def check_memory(
    config: Config,
    hardware: Hardware,
    *,
    warn: Callable[[str], None],
    size: ModelSize | None = None,
) -> RunMemory | None:
    """Raise ConfigError if the run certainly does not fit, and warn if it probably does not.

    warn: gets a message. size: as for MemoryCounter.
    Returns: the arithmetic; None if trainer.check_memory is false.
    """
    if not config.trainer.check_memory:
        return None
    count = MemoryCounter(config, hardware, size).count
    memory = count(config)
    worst = memory.worst(certain=True)
    if worst.certain > memory.capacity(worst):
        raise ConfigError(_refusal(memory, worst, find_remedies(config, memory, worst, count)))
    if not memory.counts_passes:
        warn(
            "the activations of this model's family are not counted: only weights, optimizer states and the rollout "
            "engine were compared with the memory that is there"
        )
        return memory
    likely = memory.worst(certain=False)
    if likely.expected > TIGHT * memory.capacity(likely):
        warn(
            f"memory is tight: {likely.phase} is expected to need {format_gib(likely.expected)} of "
            f"{format_gib(memory.capacity(likely))} ({describe_pool(likely)}) where prompts and completions have "
            "their maximum length"
        )
    return memory


class MemoryCounter:
    """Counts the memory of a configuration with other options.

    It makes the model, without memory, once for each LoRA rank and kind of vision tower.
    """

    def __init__(self, config: Config, hardware: Hardware, size: ModelSize | None = None) -> None:
        """Keep the configuration. size: that of its model, if it is known."""
        self._config, self._hardware = config, hardware
        self._sizes: dict[tuple[Any, ...], ModelSize] = {} if size is None else {_kind(config): size}

    def size(self, changed: Config) -> ModelSize:
        """Return the sizes of the model."""
        key = _kind(changed)
        if key not in self._sizes:
            changes = dict(zip(_SIZED_BY, key, strict=True))
            self._sizes[key] = size_of_model(with_options(self._config, changes))
        return self._sizes[key]

    def count(self, changed: Config) -> RunMemory:
        """Return the memory of a run."""
        return count_memory(changed, self.size(changed), self._hardware)


_SIZED_BY = (
    "worker.actor.model.lora.rank",
    "worker.actor.model.freeze_vision_tower",
    "worker.critic.model.lora.rank",
    "worker.critic.model.freeze_vision_tower",
    "worker.critic.share_trunk",
)


def _kind(config: Config) -> tuple[Any, ...]:
    """Return the values of _SIZED_BY, on which the sizes of the models depend."""
    model, critic = config.worker.actor.model, config.worker.critic.model
    shares = config.worker.critic.share_trunk
    return model.lora.rank, model.freeze_vision_tower, critic.lora.rank, critic.freeze_vision_tower, shares


def find_remedies(
    config: Config,
    memory: RunMemory,
    worst: PhaseMemory,
    count: Callable[[Config], RunMemory],
    *,
    certain: bool = True,
) -> list[Remedy]:
    """Return the changes that save most in a phase, those with which the run fits first.

    count: returns the arithmetic of a changed configuration.
    certain: compare what the run needs at least; False: what it is expected to need.
    """
    remedies = [
        remedy
        for alternatives in _candidates(config, memory)
        if (remedy := _mildest([_remedy(config, worst, changes, count, certain) for changes in alternatives]))
        is not None
    ]
    return sorted(remedies, key=lambda remedy: (not remedy.fits, -remedy.saved_bytes))[:_MOST_CHANGES]


def _remedy(
    config: Config, worst: PhaseMemory, changes: Changes, count: Callable[[Config], RunMemory], certain: bool
) -> Remedy:
    def needed(phase: PhaseMemory) -> int:
        return phase.certain if certain else phase.expected

    changed = count(with_options(config, changes))
    place = (worst.phase, worst.pool, worst.workers)
    same = [needed(each) for each in changed.phases if (each.phase, each.pool, each.workers) == place]
    limit = changed.worst(certain=certain)
    return Remedy(changes, needed(worst) - sum(same), fits=needed(limit) <= changed.capacity(limit))


def _mildest(alternatives: Sequence[Remedy]) -> Remedy | None:
    """Return the first with which the run fits, else the one that saves most; None if none does."""
    saving = [remedy for remedy in alternatives if remedy.saved_bytes > 0]
    fitting = [remedy for remedy in saving if remedy.fits]
    return fitting[0] if fitting else max(saving, key=lambda remedy: remedy.saved_bytes, default=None)


def can_divide_engine(config: Config) -> bool:
    """Return whether several workers may hold one rollout engine (tensor_parallel_size)."""
    return config.worker.hybrid_engine or config.algorithm.max_staleness <= 1


def _candidates(config: Config, memory: RunMemory) -> Iterator[Sequence[Changes]]:
    """Yield changes that can save memory, each as its alternatives, the mildest first.

    Those that save nothing in this run are left out later.
    """
    actor, rollout, trainer = config.worker.actor, config.worker.rollout, config.trainer
    bf16 = {"worker.actor.fsdp.torch_dtype": "bf16"}
    if actor.model.lora.rank > 0:
        yield [bf16]
    else:
        yield [{**bf16, "worker.actor.optim.strategy": "adamw_bf16"}]
        # The frozen weights of LoRA have the format of the forward pass by default.
        yield [{"worker.actor.model.lora.rank": 64, **({} if actor.fsdp.torch_dtype is None else bf16)}]
    yield [{"worker.actor.model.freeze_vision_tower": True}]
    if memory.hardware.device == "cuda" and actor.model.enable_gradient_checkpointing:
        yield [{"worker.actor.model.enable_activation_offload": True}]
    params = {"worker.actor.offload.offload_params": True}
    optimizer = {"worker.actor.offload.offload_optimizer": True}
    yield [params, optimizer, {**params, **optimizer}]
    if config.num_workers > 1:  # it is FSDP that moves the weights
        yield [{"worker.actor.fsdp.enable_cpu_offload": True}]
    yield [{"worker.actor.fsdp.enable_full_shard": True}]
    if config.has_critic and not config.shares_trunk:
        if not find_contradictions(config):
            yield [{"worker.critic.share_trunk": True}]
        params = {"worker.critic.offload.offload_params": True}
        optimizer = {"worker.critic.offload.offload_optimizer": True}
        yield [params, optimizer, {**params, **optimizer}]
        if memory.hardware.device == "cuda" and config.worker.critic.model.enable_gradient_checkpointing:
            yield [{"worker.critic.model.enable_activation_offload": True}]
        yield [{"worker.critic.model.lora.rank": 64}]
        yield [{"worker.critic.fsdp.torch_dtype": "bf16", "worker.critic.optim.strategy": "adamw_bf16"}]
    yield [{"worker.ref.fsdp.enable_cpu_offload": True}, {"algorithm.disable_kl": True}]
    # Workers of one machine share its host memory, but each has its own GPU.
    gpus, nodes = trainer.n_gpus_per_node, trainer.nnodes
    if memory.hardware.device == "cuda":
        more_gpus = [{"trainer.n_gpus_per_node": gpus * factor} for factor in (2, 4, 8) if gpus * factor <= 8]
        yield more_gpus or [{"trainer.nnodes": nodes * factor} for factor in (2, 4, 8)]
    elif config.num_workers > 1:
        yield [{"trainer.nnodes": nodes * factor} for factor in (2, 4, 8)]
    if can_divide_engine(config):
        yield [
            {"worker.rollout.tensor_parallel_size": size}
            for size in memory.tensor_parallel_sizes
            if size > rollout.tensor_parallel_size and config.num_samplers % size == 0
        ]
    lowest_first = [tenth / 10 for tenth in range(1, 10) if tenth / 10 < rollout.gpu_memory_utilization]
    yield [{"worker.rollout.gpu_memory_utilization": share} for share in reversed(lowest_first)]
    yield [{"data.max_response_length": max(1, config.data.max_response_length // 2)}]


def _refusal(memory: RunMemory, worst: PhaseMemory, remedies: list[Remedy]) -> str:
    lines = [
        f"this run needs at least {format_gib(worst.certain)} during {worst.phase}, and there are "
        f"{format_gib(memory.capacity(worst))} ({describe_pool(worst)}):"
    ]
    lines += [f"  {format_gib(part.certain):>10}  {part.name}" for part in worst.parts if part.certain]
    lines.append("What helps most:" if remedies else "No single change of the configuration helps.")
    lines += [f"  {remedy}" for remedy in remedies]
    lines.append("trainer.check_memory=false starts the run all the same.")
    return "\n".join(lines)


def describe_pool(phase: PhaseMemory) -> str:
    """Return which memory a phase needs, as text within a sentence."""
    of_workers = "" if phase.workers == "all" else f" of the {phase.workers}"
    if phase.pool == "GPU":
        return f"on each GPU{of_workers}"
    return f"host memory of a machine{of_workers}, for all of its workers"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
