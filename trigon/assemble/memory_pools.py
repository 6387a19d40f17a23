"""The memory of workers that sample and of those that learn, where these are separate.

A learner has the model, its optimizer and the passes, and no engine. A sampler has vLLM, whose
weights and KV cache stay where they are between two batches, and no trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from trigon.assemble.memory_engine import EngineMemory
from trigon.assemble.memory_table import Hardware, Part, PhaseMemory, phase_of
from trigon.assemble.options import PIXEL_CACHE_BYTES
from trigon.config.schema import Config
from trigon.models.dimensions import Dimensions
from trigon.models.memory import ModelSize

BUCKET_BYTES = 256 * 2**20
"""What a weight sync sends at a time (distributed/weight_transfer.py)."""


def add_samplers(
    learners: Sequence[PhaseMemory],
    config: Config,
    size: ModelSize,
    hardware: Hardware,
    *,
    context_bytes: int,
    process_bytes: int,
) -> list[PhaseMemory]:
    """Return the phases of both pools, given those of workers that only learn.

    If each pool has one machine, they may be on the same one, and their host memory is added. What
    a worker of either pool has at least: context_bytes on its GPU, process_bytes on its host.
    """
    samplers = _Samplers(config, size, hardware, context_bytes, process_bytes)
    on_host = samplers.on_host()
    share_machine = config.trainer.nnodes == config.worker.rollout.nnodes == 1
    phases = []
    for phase in learners:
        if phase.pool == "GPU" or not share_machine:
            phases.append(replace(phase, workers="learners"))
        else:
            rest = Part("workers that sample", on_host.expected, on_host.certain if hardware.device == "cpu" else 0)
            phases.append(replace(phase, parts=(*phase.parts, rest)))
    return [*phases, *samplers.on_device(), *([] if share_machine else [on_host])]


class _Samplers:
    def __init__(
        self, config: Config, size: ModelSize, hardware: Hardware, context_bytes: int, process_bytes: int
    ) -> None:
        self._config, self._size, self._hardware = config, size, hardware
        self._context_bytes, self._process_bytes = context_bytes, process_bytes
        self._engine = EngineMemory(config, size, hardware, samples=True)

    def on_device(self) -> list[PhaseMemory]:
        """Return the phases on the GPU of a sampler."""
        if self._hardware.device == "cpu":
            return []
        engine, graphs = self._engine, self._engine.graphs()
        context = Part("CUDA context, NCCL", self._context_bytes, 0)
        awake = engine.awake(starts=False)
        bucket = Part("bucket of received tensors", BUCKET_BYTES, 0)
        return [
            replace(phase, workers="samplers")
            for phase in (
                phase_of("start", "GPU", [*engine.awake(starts=True), context]),
                phase_of("weight sync", "GPU", [*awake, engine.synced(), bucket, graphs, context]),
                phase_of("sampling", "GPU", [*awake, graphs, context]),
            )
        ]

    def on_host(self) -> PhaseMemory:
        """Return what the samplers of a machine keep in its memory."""
        per_node, on_cpu = self._config.worker.rollout.n_gpus_per_node, self._hardware.device == "cpu"
        weights = per_node * self._engine.weights if on_cpu else 0
        cached = pixel_cache_bytes(self._config, self._size.dimensions, self._config.num_samplers)
        live = streamed_pixel_bytes(self._config, self._size.dimensions, self._config.num_samplers)
        phase = phase_of(
            "sampling",
            "host",
            [
                Part("rollout engine's weights", weights, weights),
                Part("vLLM's KV cache", per_node * self._engine.cpu_cache if on_cpu else 0, 0),
                Part("caches of images", per_node * cached, 0),
                Part("images of prompts being sampled", per_node * live, 0),
                Part("processes", per_node * self._process_bytes, 0),
            ],
        )
        return replace(phase, workers="samplers")


def pixel_cache_bytes(config: Config, dimensions: Dimensions | None, num_workers: int) -> int:
    """Return the most bytes of the pixels of a step that one of so many workers keeps."""
    prompts = ceil(config.prompts_per_step / num_workers)
    return min(PIXEL_CACHE_BYTES, prompts * _pixel_bytes(config, dimensions))


def streamed_pixel_bytes(config: Config, dimensions: Dimensions | None, num_workers: int) -> int:
    """Return the most bytes of pixels that one of so many samplers holds beside its cache.

    With max_staleness above 1 a call has all groups that may be outstanding, with their pixels.
    0 otherwise.
    """
    ahead = config.algorithm.max_staleness
    if config.worker.hybrid_engine or ahead <= 1:
        return 0
    outstanding = (1 + ahead) * (1 + config.worker.rollout.oversampling) * config.prompts_per_step
    prompts = ceil(outstanding / num_workers)
    return prompts * _pixel_bytes(config, dimensions)


def _pixel_bytes(config: Config, dimensions: Dimensions | None) -> int:
    """Return the bytes of the pixels of the largest prompt."""
    if dimensions is None or dimensions.vision is None:
        return 0
    patches = config.data.max_prompt_length * dimensions.vision.merge**2
    return patches * dimensions.vision.values_per_patch * 4
