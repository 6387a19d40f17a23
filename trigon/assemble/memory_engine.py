"""The memory of a rollout engine by arithmetic, beside a trainer or on workers of its own."""

from __future__ import annotations

from math import ceil

from trigon.assemble.memory_table import GIB, Hardware, Part, exactly
from trigon.config.schema import Config
from trigon.models.dtypes import DTYPES
from trigon.models.memory import ModelSize

GRAPH_BYTES = GIB
"""Expected memory of vLLM's CUDA graphs, which stays while the engine sleeps."""

WORKSPACE_BYTES = 4 * GIB
"""The part of vLLM's share that it may keep for activations, and not allocate while it is idle."""

CPU_CACHE_BYTES = GIB
"""The most that vLLM's KV cache takes on the CPU (rollout/vllm/arguments.py)."""

_SYNC_COPIES = 3  # of a tensor: gathered, converted, and as vLLM collects it for a layer


class EngineMemory:
    """Counts the memory of the rollout engine on one worker.

    samples: False for a worker that only learns, which has no engine.
    """

    def __init__(self, config: Config, size: ModelSize, hardware: Hardware, *, samples: bool) -> None:
        self._config, self._size, self._hardware = config, size, hardware
        self._samples = samples

    @property
    def weights(self) -> int:
        """The bytes of the engine's weights; 0 without an engine."""
        if not self._samples:
            return 0
        all_, rollout = self._size.all, self._config.worker.rollout
        parallel = rollout.tensor_parallel_size if rollout.name == "vllm" else 1
        return ceil((all_.frozen + all_.trained) * DTYPES[rollout.dtype].itemsize / parallel)

    @property
    def cpu_cache(self) -> int:
        """The bytes of the KV cache on the CPU."""
        return CPU_CACHE_BYTES if self._samples and self._config.worker.rollout.name == "vllm" else 0

    def graphs(self) -> Part:
        """Return CUDA graphs, which stay while the engine sleeps."""
        rollout = self._config.worker.rollout
        has_graphs = self._samples and rollout.name == "vllm" and not rollout.enforce_eager
        return Part("CUDA graphs of vLLM", GRAPH_BYTES if has_graphs else 0, 0)

    def synced(self) -> Part:
        """Return what a weight sync holds beside the weights of trainer and engine."""
        synced = self._size.largest * DTYPES[self._config.worker.rollout.dtype].itemsize
        return Part("largest tensor, gathered and converted", _SYNC_COPIES * synced, 0)

    def awake(self, *, starts: bool) -> list[Part]:
        """Return the engine while it samples: vLLM takes a fixed share of the GPU.

        starts: vLLM refuses to start if its share is not free.
        """
        if not self._samples:
            return []
        rollout, weights = self._config.worker.rollout, self.weights
        if rollout.name != "vllm":
            return [exactly("rollout engine's weights", weights)]
        share = int(rollout.gpu_memory_utilization * self._hardware.device_bytes)
        needed = weights + self._cache_of_context()
        certain = max(share - (0 if starts else WORKSPACE_BYTES), needed) - weights
        return [
            exactly("vLLM's weights", weights),
            Part("vLLM's KV cache and workspace", max(share, needed) - weights, certain),
        ]

    def _cache_of_context(self) -> int:
        """The KV cache of one sequence of maximum length, which vLLM needs at least."""
        rollout = self._config.worker.rollout
        share = max(self._size.key_heads // rollout.tensor_parallel_size, 1) / self._size.key_heads
        return int(self._config.context_length * self._size.key_values * DTYPES[rollout.dtype].itemsize * share)
