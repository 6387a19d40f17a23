"""The settings of VllmEngine, and the arguments of vllm.EngineArgs that follow from them.

Pure: starts nothing and does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trigon.config.names import DeviceType
from trigon.models.load import Processors
from trigon.models.sizes import head_dim

ModelRunner = Literal["v1", "v2"]

CPU_CACHED_SEQUENCES = 256
"""Sequences of maximum length for which the KV cache on the CPU has room, within 1 GiB."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's KV cache on the CPU: the fewest that its attention supports there.

The completions of a group share the full blocks of their prompt, and each computes the rest again.
With vLLM's default of 128 tokens the rest is often half of the prompt, or all of it.
"""

LARGEST_DEFAULT_GRAPH = 512
"""Most sequences of vLLM's largest CUDA graph by default; more would decode without one."""

GRAPH_STRIDE = 16
"""CUDA graphs of more than 256 sequences are that far apart."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How VllmEngine starts vLLM, and how it decodes completions.

    model_folder: a local folder with config.json and *.safetensors (models.load.model_folder).
    device: the device for which the installed vLLM was built.
    dtype: of weights, activations and KV cache.
    max_model_len: most tokens of a prompt and its completion together.
    max_num_batched_tokens: most tokens of all requests in one forward pass; see batched_tokens.
    max_num_seqs: most sequences in one forward pass.
    model_runner: vLLM's model runner on a GPU; None: vLLM's choice.
    async_scheduling: schedule a forward pass on a GPU while the last one runs; None: vLLM's choice.
    gpu_memory_utilization: fraction of the GPU's memory that vLLM may hold while awake. Not used on
        the CPU, see cpu_cache_bytes.
    enforce_eager: neither compile the model nor record CUDA graphs. Always so on the CPU.
    enable_chunked_prefill: let vLLM split prompts over forward passes; see splits_prompts.
    enable_prefix_caching: share the KV cache of equal prefixes between requests.
    limit_images: most images of one prompt. 0: no limit.
    seed: of vLLM's own random generators. Completions do not depend on it; see rollout/seeds.py.
    trust_remote_code: allow Python code from the model folder.
    override_config: keys of config.json to replace.
    skip_special_tokens: leave special tokens out of Completion.text.
    disable_log_stats: do not collect vLLM's own statistics.
    tensor_parallel_size: consecutive ranks of torch.distributed's default process group that hold
        one copy of the model together; all of them must make the same calls. None: one process.
    shows_videos: whether prompts may have videos, for which vLLM then reserves memory.
    weight_check_freq: the checksums of the weights are compared with the trainer's at every version
        that is a multiple of it; 0: never.
    stays_awake: keep the memory of a GPU while the engine sleeps, with its weights: no trainer is
        on the device.
    """

    model_folder: Path
    device: DeviceType
    dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    limit_images: int
    seed: int
    trust_remote_code: bool
    override_config: Mapping[str, Any]
    skip_special_tokens: bool
    disable_log_stats: bool
    tensor_parallel_size: int | None = None
    shows_videos: bool = False
    model_runner: ModelRunner | None = None
    async_scheduling: bool | None = None
    weight_check_freq: int = 1
    stays_awake: bool = False

    @property
    def frees_memory(self) -> bool:
        """Whether the engine gives memory back while it sleeps. It has none to give on the CPU."""
        return self.device == "cuda" and not self.stays_awake

    def checks_weights(self, version: int, *, restarted: bool = False) -> bool:
        """Return whether the weights of this version are compared by checksum.

        restarted: they are the first ones of an engine that was started anew after a failure.
        """
        return self.weight_check_freq > 0 and (restarted or version % self.weight_check_freq == 0)


def engine_arguments(
    settings: VllmSettings, processors: Processors, *, checkpoint_names: Collection[str] = ()
) -> dict[str, Any]:
    """Return the keyword arguments of vllm.EngineArgs.

    checkpoint_names: of the tensors in the model folder; see reads_checkpoint.
    """
    on_cpu = settings.device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(settings.model_folder),
        "tokenizer": str(processors.tokenizer.name_or_path),  # that of the run, which decodes stop strings
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": batched_tokens(settings),
        # vLLM allows no more sequences than tokens of a forward pass.
        "max_num_seqs": min(settings.max_num_seqs, batched_tokens(settings)),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        "kv_cache_memory_bytes": cpu_cache_bytes(settings, processors) if on_cpu else None,
        "load_format": "auto" if reads_checkpoint(settings, processors, checkpoint_names) else "dummy",
        "enforce_eager": settings.enforce_eager or on_cpu,
        "async_scheduling": None if on_cpu else settings.async_scheduling,
        "enable_chunked_prefill": splits_prompts(settings),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_sleep_mode": settings.frees_memory,
        # external_launcher takes its rank from RANK and LOCAL_RANK, in the process group that
        # exists already.
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size is None else "external_launcher",
        "tensor_parallel_size": settings.tensor_parallel_size or 1,
        # The default, raw_logprobs, is before temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # Without the sampling defaults of the model's generation_config.json.
        "generation_config": "vllm",
        "hf_overrides": dict(settings.override_config),
        "trust_remote_code": settings.trust_remote_code,
        "disable_log_stats": settings.disable_log_stats,
        "use_tqdm_on_load": False,
        "seed": settings.seed,
    }
    compilation: dict[str, Any] = {}
    if not (arguments["enforce_eager"] or arguments["max_num_seqs"] <= LARGEST_DEFAULT_GRAPH):
        compilation["max_cudagraph_capture_size"] = -(-arguments["max_num_seqs"] // GRAPH_STRIDE) * GRAPH_STRIDE
    if not on_cpu and (settings.tensor_parallel_size or 1) > 1:
        arguments["disable_custom_all_reduce"] = True
        compilation |= _collective_compilation()
    if compilation:
        arguments["compilation_config"] = compilation
    return arguments | (_vision_arguments(settings, processors) if processors.family.has_vision else {})


def reads_checkpoint(settings: VllmSettings, processors: Processors, checkpoint_names: Collection[str]) -> bool:
    """Return whether vLLM reads the weights of the model folder when it starts.

    A GPU drops them at once and takes the trainer's at every awake(), so that reading them there,
    on every rank, would be for nothing. Random weights serve as well to measure memory and to
    record CUDA graphs. Buffers that are no weights are computed, and the scales of attention are
    set, after random weights too.

    vLLM must read them if the configuration ties the output head to the embedding, and the folder
    has a head nevertheless: vLLM 0.32, like transformers, then compares the two to decide whether
    they are tied, and does not with random weights.
    """
    tied = getattr(processors.hf_config, "tie_word_embeddings", False)
    has_head = any(name.endswith("lm_head.weight") for name in checkpoint_names)
    return settings.device == "cpu" or (tied and has_head)


def splits_prompts(settings: VllmSettings) -> bool:
    """Return whether vLLM may split a prompt over several forward passes (chunked prefill).

    Never on the CPU: there vLLM 0.32 fails at a seeded request whose prompt it has split ("CPU
    Generator does not use offset").
    """
    return settings.enable_chunked_prefill and settings.device == "cuda"


def batched_tokens(settings: VllmSettings) -> int:
    """Return the most tokens of one forward pass: at least max_model_len, unless prompts are split.

    vLLM's encoder cache has room for as many tokens of images and videos, or for a largest image.
    """
    if splits_prompts(settings):
        return settings.max_num_batched_tokens
    return max(settings.max_num_batched_tokens, settings.max_model_len)


def cpu_cache_bytes(settings: VllmSettings, processors: Processors) -> int:
    """Return the size of the KV cache on the CPU, all of which vLLM allocates at the start.

    1 GiB, or less where CPU_CACHED_SEQUENCES sequences of max_model_len tokens need less. The
    environment variable VLLM_CPU_KVCACHE_SPACE, in GiB, overrides it.
    """
    config = processors.hf_config.get_text_config()
    width = config.num_key_value_heads * head_dim(config)
    token_bytes = int(2 * config.num_hidden_layers * width * settings.dtype.itemsize)  # keys and values
    return min(2**30, CPU_CACHED_SEQUENCES * (settings.max_model_len + CPU_BLOCK_TOKENS) * token_bytes)


def _collective_compilation() -> dict[str, Any]:
    """Return how vLLM compiles for several ranks that share a model: all collectives are NCCL's.

    vLLM's own all-reduce (disable_custom_all_reduce), and FlashInfer's fused one, open the memory
    of the other ranks' GPUs by device number. Each worker sees only its own GPU (Ray sets
    CUDA_VISIBLE_DEVICES), so that vLLM 0.32 fails at its start with an IndexError. The environment
    variables in process.py switch off the others.
    """
    return {"pass_config": {"fuse_allreduce_rms": False}}


def _vision_arguments(settings: VllmSettings, processors: Processors) -> dict[str, Any]:
    assert processors.image_processor is not None
    size = processors.image_processor.size
    # The largest image, by which vLLM sizes its encoder cache. It never processes an image itself.
    processor_arguments: dict[str, Any] = {}
    if not processors.family.tiles:
        # No larger than a prompt has room for: published limits are up to 16,384 tokens.
        side = processors.image_processor.patch_size * processors.image_processor.merge_size
        largest = max(size["shortest_edge"], min(size["longest_edge"], settings.max_model_len * side**2))
        processor_arguments = {"min_pixels": size["shortest_edge"], "max_pixels": largest}
    image_limit = {"image": settings.limit_images} if settings.limit_images else {}
    return {
        # vLLM plans its memory with the number of videos, and still accepts a prompt with more.
        "limit_mm_per_prompt": {"video": int(settings.shows_videos)} | image_limit,
        "mm_processor_kwargs": processor_arguments,
        "mm_device_do_normalize": False,  # prompts come with normalised pixels
        "mm_processor_cache_gb": 0,  # prompts come with processed pixels, so nothing can be reused
    }
