"""The settings of VllmEngine, and the arguments of vllm.EngineArgs that follow from them.

Pure: starts nothing and does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trigon.config.names import DeviceType
from trigon.config.schema import Config, RolloutConfig
from trigon.errors import ConfigError, EngineError
from trigon.models.dtypes import DTYPES
from trigon.models.families import ModelFamily
from trigon.models.load import Processors
from trigon.models.sizes import head_dim, layer_configs

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

    config: the configuration; mainly worker.rollout is used.
    model_folder: a local folder with config.json and *.safetensors (models.load.model_folder).
    device: the device for which the installed vLLM was built.
    tensor_parallel_size: consecutive ranks of torch.distributed's default process group that hold
        one copy of the model together; all of them must make the same calls. None: one process.
    shows_videos: whether prompts may have videos, for which vLLM then reserves memory.
    stays_awake: keep the memory of a GPU while the engine sleeps, with its weights: no trainer is
        on the device.
    """

    config: Config
    model_folder: Path
    device: DeviceType
    tensor_parallel_size: int | None = None
    shows_videos: bool = False
    stays_awake: bool = False

    @property
    def rollout(self) -> RolloutConfig:
        """The section of the engine."""
        return self.config.worker.rollout

    @property
    def model_runner(self) -> ModelRunner | None:
        """vLLM's model runner on a GPU; None is vLLM's choice."""
        runner = self.rollout.model_runner
        return None if runner == "auto" else runner

    @property
    def records_experts(self) -> bool:
        """Whether completions have the experts that their tokens used."""
        return self.config.worker.actor.replays_routing

    @property
    def limit_images(self) -> int:
        """The most images of a sequence; 0 is any number.

        With episodes it is 0: observations add images, and the option limits only prompts.
        """
        return 0 if self.rollout.has_episodes else self.rollout.limit_images

    @property
    def frees_memory(self) -> bool:
        """Whether the engine gives memory back while it sleeps. It has none to give on the CPU."""
        return self.device == "cuda" and not self.stays_awake

    def checks_weights(self, version: int, *, restarted: bool = False) -> bool:
        """Return whether the weights of this version are compared by checksum.

        restarted: they are the first weights of an engine that was started again after a failure.
        """
        every = self.rollout.weight_check_freq
        return every > 0 and (restarted or version % every == 0)


def engine_arguments(
    settings: VllmSettings,
    processors: Processors,
    *,
    checkpoint_names: Collection[str] = (),
    has_episodes: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of vllm.EngineArgs.

    checkpoint_names: names of the tensors in the model folder; see reads_checkpoint. has_episodes:
    a turn should compute only its observation, so that prefixes are always cached.
    """
    rollout, model, on_cpu = settings.rollout, settings.config.worker.actor.model, settings.device == "cpu"
    require_implementation(processors.family)
    if on_cpu and processors.family.linear_attention:
        _require_cpu_linear_attention(settings, processors)
    if on_cpu and processors.family.image_layers_of(processors.hf_config) != "none":
        raise EngineError(
            f"vLLM does not run a {processors.family.model_type!r} model on a CPU: its attention there is causal, and "
            "the tokens of an image attend to each other in both directions. Set worker.rollout.name=transformers."
        )
    if settings.records_experts:
        _require_expert_records(settings, processors)
    _require_packages(processors)
    arguments: dict[str, Any] = {
        "model": str(settings.model_folder),
        "tokenizer": str(processors.tokenizer.name_or_path),  # the run's, which decodes stop strings
        "dtype": DTYPES[rollout.dtype],
        "max_model_len": settings.config.context_length,
        "max_num_batched_tokens": batched_tokens(settings),
        # vLLM allows no more sequences than tokens of a forward pass.
        "max_num_seqs": min(rollout.max_num_seqs_on(settings.device), batched_tokens(settings)),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        "kv_cache_memory_bytes": cpu_cache_bytes(settings, processors) if on_cpu else None,
        "load_format": "auto" if reads_checkpoint(settings, processors, checkpoint_names) else "dummy",
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "async_scheduling": None if on_cpu else rollout.async_scheduling,
        "enable_chunked_prefill": splits_prompts(settings),
        "enable_prefix_caching": caches_prefixes(settings, processors, has_episodes=has_episodes),
        "enable_sleep_mode": settings.frees_memory,
        # external_launcher takes its rank from RANK and LOCAL_RANK, in the process group that
        # exists already.
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size is None else "external_launcher",
        "tensor_parallel_size": settings.tensor_parallel_size or 1,
        # The default, raw_logprobs, is before temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # Without the sampling defaults of the model's generation_config.json.
        "generation_config": "vllm",
        "hf_overrides": dict(model.override_config),
        "trust_remote_code": model.trust_remote_code,
        "disable_log_stats": rollout.disable_log_stats,
        "use_tqdm_on_load": False,
        "seed": rollout.seed,
    }
    if settings.records_experts:
        arguments["enable_return_routed_experts"] = True
    compilation: dict[str, Any] = {}
    if not (arguments["enforce_eager"] or arguments["max_num_seqs"] <= LARGEST_DEFAULT_GRAPH):
        compilation["max_cudagraph_capture_size"] = -(-arguments["max_num_seqs"] // GRAPH_STRIDE) * GRAPH_STRIDE
    if not on_cpu and (settings.tensor_parallel_size or 1) > 1:
        # All collectives are NCCL's. vLLM's own all-reduce, and FlashInfer's fused one, open the
        # memory of the other ranks' GPUs by device number, and each worker sees only its own GPU
        # (Ray sets CUDA_VISIBLE_DEVICES), so that vLLM 0.32 fails at its start with an IndexError.
        # The environment variables in process.py switch off the others.
        arguments["disable_custom_all_reduce"] = True
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
    if compilation:
        arguments["compilation_config"] = compilation
    return arguments | (_vision_arguments(settings, processors) if processors.family.has_vision else {})


def require_implementation(family: ModelFamily) -> None:
    """Raise ConfigError unless vLLM has an implementation of a family."""
    if not family.in_vllm:
        raise ConfigError(
            f"worker.rollout.name is vllm, which has no implementation of its own of {family.model_type} models; set "
            "it to transformers"
        )


def _require_packages(processors: Processors) -> None:
    """Raise EngineError for a missing package that vLLM's processor of the family needs."""
    missing = [name for name in processors.family.engine_packages if find_spec(name) is None]
    if missing:
        raise EngineError(
            f"vLLM's processor of {processors.family.model_type!r} models needs {' and '.join(missing)}. Install it "
            f"(pip install {' '.join(missing)}), or set worker.rollout.name=transformers."
        )


def _require_cpu_linear_attention(settings: VllmSettings, processors: Processors) -> None:
    """Raise EngineError unless vLLM 0.32 computes this linear attention on a CPU."""
    config = processors.hf_config.get_text_config()
    widths = {config.linear_key_head_dim, config.linear_value_head_dim}
    dtype = settings.rollout.dtype
    if dtype != "bf16" or widths != {128}:
        raise EngineError(
            "vLLM computes linear attention on a CPU in bfloat16 and with heads of 128 only; here the dtype is "
            f"worker.rollout.dtype={dtype} and the heads are of {sorted(widths)}. Set "
            "worker.rollout.dtype=bf16, or worker.rollout.name=transformers, which computes any."
        )


def _require_expert_records(settings: VllmSettings, processors: Processors) -> None:
    """Raise EngineError where vLLM 0.32 does not return the experts that tokens used.

    Its second model runner returns them. That runner needs Triton, and so a GPU, and keeps the
    experts with the blocks of its prefix cache.
    """
    reasons = {
        "on the CPU": settings.device == "cpu",
        "with worker.rollout.model_runner=v1": settings.model_runner == "v1",
        "of linear attention without worker.rollout.enable_chunked_prefill": not caches_prefixes(
            settings, processors, has_episodes=True
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise EngineError(
            f"worker.actor.router_replay=R3 needs the experts that the engine used, and vLLM does not return those "
            f"{reason}. Change that, set worker.actor.router_replay=disabled, or set worker.rollout.name=transformers, "
            "which is slow."
        )


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
    return settings.device == "cuda" and settings.rollout.chunks_prefill_on(settings.device)


def caches_prefixes(settings: VllmSettings, processors: Processors, *, has_episodes: bool) -> bool:
    """Return whether requests share the cache of equal prefixes.

    For layers of linear attention vLLM 0.32 caches states at the ends of blocks, which needs
    prompts that are split there. has_episodes: see engine_arguments.
    """
    rollout = settings.rollout
    wanted = rollout.enable_prefix_caching or rollout.has_episodes or has_episodes or settings.records_experts
    return wanted and (not processors.family.linear_attention or splits_prompts(settings))


def batched_tokens(settings: VllmSettings) -> int:
    """Return the most tokens of one forward pass: at least max_model_len, unless prompts are split.

    vLLM's encoder cache has room for as many tokens of images and videos, or for a largest image.
    """
    if splits_prompts(settings):
        return settings.rollout.max_num_batched_tokens
    return max(settings.rollout.max_num_batched_tokens, settings.config.context_length)


def cpu_cache_bytes(settings: VllmSettings, processors: Processors) -> int:
    """Return the size of the KV cache on the CPU, all of which vLLM allocates at the start.

    1 GiB, or less where CPU_CACHED_SEQUENCES sequences of max_model_len tokens need less. The
    environment variable VLLM_CPU_KVCACHE_SPACE, in GiB, overrides it.
    """
    config = processors.hf_config.get_text_config()
    width = max(layer.num_key_value_heads * head_dim(layer) for layer in layer_configs(config))
    token_bytes = int(2 * config.num_hidden_layers * width * DTYPES[settings.rollout.dtype].itemsize)  # keys and values
    return min(2**30, CPU_CACHED_SEQUENCES * (settings.config.context_length + CPU_BLOCK_TOKENS) * token_bytes)


def _vision_arguments(settings: VllmSettings, processors: Processors) -> dict[str, Any]:
    assert processors.image_processor is not None
    # The largest image, by which vLLM sizes its encoder cache. It never processes an image itself.
    processor_arguments: dict[str, Any] = {}
    if processors.family.takes_patches:
        # No larger than a prompt has room for: published limits are up to 16,384 tokens.
        size = processors.image_processor.size
        side = processors.image_processor.patch_size * processors.image_processor.merge_size
        fits = settings.config.context_length * side**2 * processors.family.frames_per_image
        largest = max(size["shortest_edge"], min(size["longest_edge"], fits))
        processor_arguments = {"size": {"shortest_edge": size["shortest_edge"], "longest_edge": largest}}
    image_limit = {"image": settings.limit_images} if settings.limit_images else {}
    return {
        # vLLM plans its memory with the number of videos, and still accepts a prompt with more.
        "limit_mm_per_prompt": {"video": int(settings.shows_videos)} | image_limit,
        "mm_processor_kwargs": processor_arguments,
        "mm_device_do_normalize": False,  # prompts come with normalised pixels
        "mm_processor_cache_gb": 0,  # prompts come with processed pixels, so nothing can be reused
    }
