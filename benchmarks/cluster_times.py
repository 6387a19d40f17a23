"""The seconds that the simulation of clusters assumes of GPUs.

    passes      the longer of operations / (0.35 * peak) and gathered bytes / (0.7 * link);
                and 0.5 ms for each layer's forward
    prompts     operations / (0.5 * peak)
    decoding    steps of the longer of bytes of weights and KV cache / (0.6 * memory bandwidth) and
                operations / (0.5 * peak); and 3 ms
    optimizer, weight sync    bytes / (0.6 * memory bandwidth)

Peaks and bandwidths are those that the manufacturers publish; the shares of them are assumptions.
Nothing here was measured on a GPU. Operations, bytes and memory are those of `trigon plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trigon.assemble.memory import size_of_model
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.models.dtypes import DTYPES
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.plan import SHIPPED, RunPlan, plan

NETWORK_RATE = 400e9 / 8
"""Bytes per second of each GPU between nodes, in each direction: one NDR InfiniBand port."""

LINK_SHARE = 0.7
_PASS_SHARE, _PREFILL_SHARE, _MEMORY_SHARE = 0.35, 0.5, 0.6
_LAYER_SECONDS, _DECODE_SECONDS = 0.5e-3, 3e-3


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its datasheet, per second.

    flops: dense operations in bfloat16. memory_rate, link_rate: bytes of its memory, and of its
    link to other GPUs of the node in one direction (half of NVLink's figure, which counts both).
    """

    flops: float
    memory_rate: float
    link_rate: float


GPUS: Mapping[str, Gpu] = {
    "A100-40G": Gpu(312e12, 1.555e12, 300e9),
    "A100-80G": Gpu(312e12, 2.039e12, 300e9),
    "H100-80G": Gpu(989e12, 3.35e12, 450e9),
    "H200-141G": Gpu(989e12, 4.8e12, 450e9),
}


class ClusterTimes:
    """What a run takes on GPUs, each with a rollout engine of its own, and one update in a step.

    update_seconds, sync_seconds: of a step. prompt_seconds: to prefill the mean prompt.
    token_seconds: to prefill one token of a completion. max_sequences: that an engine decodes at a
    time.
    """

    def __init__(self, config: Config, gpu: str, lengths: LengthOptions, *, max_sequences: int) -> None:
        self.plan: RunPlan = plan(config, gpus=gpu, lengths=lengths)
        model = (config.worker.actor.model.model_path or "").partition("/")[2]
        self._size = size_of_model(with_options(config, {"worker.actor.model.model_path": str(SHIPPED / model)}))
        self._weights = self._size.all.weights
        self._gpu, flops, batches = GPUS[gpu], self.plan.flops, self.plan.batches
        if flops is None:
            raise ValueError(f"the operations of {model} are not counted")
        self._item_bytes = DTYPES[config.worker.rollout.dtype].itemsize
        known, rate = self.plan.lengths, self._gpu.flops * _PREFILL_SHARE
        self._context = known.mean_prompt + known.response_tokens / 2  # tokens of a sequence, on its way
        self._token_flops = flops.decode / batches.sampled / max(1.0, known.response_tokens)
        self.prompt_seconds = flops.prefill / batches.sampled_prompts / rate
        self.token_seconds = self._token_flops / rate
        free = config.worker.rollout.gpu_memory_utilization * self.plan.memory.hardware.device_bytes
        free -= self._weights * self._item_bytes + 4 * 2**30
        shared = config.group_size if config.worker.rollout.enable_prefix_caching else 1
        tokens = known.mean_prompt / shared + known.response_tokens / 2
        fitting = int(free / (tokens * self._size.key_values * self._item_bytes))
        self.max_sequences = max(1, min(max_sequences, fitting))

        fsdp, shards = config.worker.actor.fsdp, config.workers_per_copy
        checkpointing = config.worker.actor.model.enable_gradient_checkpointing
        launching = len(self._size.layers) * (4 if checkpointing else 3) * _LAYER_SECONDS
        link, memory = self._gpu.link_rate * LINK_SHARE, self._gpu.memory_rate * _MEMORY_SHARE
        # Of one update without KL, whose forward is that of sampling, and is computed once more.
        operations = flops.update + (flops.prefill + flops.decode if checkpointing else 0)
        computing = operations / config.num_workers / (self._gpu.flops * _PASS_SHARE)
        others, trained = (shards - 1) / shards, self._size.all.trained(config.worker.actor.model)
        # FSDP gathers the weights twice for each pass, and reduces the gradients once.
        gathered = 2 * batches.update_rows * self._weights * DTYPES[fsdp.mp_param_dtype].itemsize * others
        copies = 2 / shards if config.num_workers > shards else 0
        reduced = trained * DTYPES[fsdp.mp_reduce_dtype].itemsize * (others + copies)
        self.update_seconds = max(computing, (gathered + reduced) / link)
        self.update_seconds += batches.update_rows * launching + 8 * 4 * trained / shards / memory
        loaded = self._weights * self._item_bytes
        self.sync_seconds = loaded * others / link + 3 * loaded / memory

    def decode_step(self, sequences: int) -> float:
        """Return the seconds in which one token of each of these sequences is decoded."""
        read = self._weights_read(sequences) + sequences * self._context * self._size.key_values
        reading = read * self._item_bytes / (self._gpu.memory_rate * _MEMORY_SHARE)
        computing = sequences * self._token_flops / (self._gpu.flops * _PREFILL_SHARE)
        return max(reading, computing) + _DECODE_SECONDS

    def _weights_read(self, sequences: int) -> float:
        """Return the weights that a decoding step reads: of experts, those that get a token."""
        text = None if self._size.dimensions is None else self._size.dimensions.text
        if text is None or not text.experts:
            return float(self._weights)
        experts = text.moe_layers * text.experts * 3 * text.width * text.expert_mlp
        used = min(1.0, sequences * text.experts_per_token / text.experts)
        return self._weights - experts * (1 - used)
