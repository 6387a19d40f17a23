"""The arguments of vllm.EngineArgs: CPU and GPU, tensor parallelism, text and image models."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.models import processors_of
from support.rollout import make_vllm_settings
from trigon.assemble.models import check_policy
from trigon.config.options import with_options
from trigon.errors import ConfigError, EngineError
from trigon.models.load import load_processors
from trigon.rollout.vllm.arguments import cpu_cache_bytes, engine_arguments
from trigon.rollout.vllm.process import choose_model_runner
from trigon.rollout.vllm.weights import canonical_names, check_names, checkpoint_names

# 2 (keys and values) * 2 layers * 2 heads * 32 dimensions * 4 bytes * 256 sequences * (256 + 32)
# tokens
CPU_CACHE_BYTES = 2 * 2 * 2 * 32 * 4 * 256 * (256 + 32)

COMMON = {
    "model": "MODEL",
    "dtype": torch.float32,
    "max_model_len": 256,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 128,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": True,
    "distributed_executor_backend": "uni",
    "tensor_parallel_size": 1,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "hf_overrides": {},
    "trust_remote_code": False,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "seed": 0,
}
ON_CPU = COMMON | {
    "block_size": 32,
    "kv_cache_memory_bytes": CPU_CACHE_BYTES,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "async_scheduling": None,
    "load_format": "auto",
    "enable_sleep_mode": False,
}
ON_GPU = COMMON | {
    "block_size": None,
    "kv_cache_memory_bytes": None,
    "enforce_eager": False,
    "enable_chunked_prefill": True,
    "async_scheduling": None,
    "load_format": "dummy",
    "enable_sleep_mode": True,
}
DEVICES = {"cpu": ON_CPU, "cuda": ON_GPU}
PARALLEL = {
    None: {},
    1: {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 1},
    2: {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
}
# Each worker sees one GPU, so that all-reduce by peer-to-peer access would fail.
NCCL_ONLY = {
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
VISION = {
    "limit_mm_per_prompt": {"video": 0, "image": 1},
    "mm_processor_kwargs": {"size": {"shortest_edge": 784, "longest_edge": 50176}},
    "mm_device_do_normalize": False,
    "mm_processor_cache_gb": 0,
}
TILED_VISION = VISION | {"mm_processor_kwargs": {}}
MODELS = {"qwen2": {}, "qwen2_5_vl": VISION, "internvl": TILED_VISION}


@pytest.mark.parametrize(
    ("device", "tensor_parallel_size", "model_type"),
    [*itertools.product(DEVICES, PARALLEL, ["qwen2_5_vl"]), ("cpu", None, "internvl"), ("cuda", 2, "qwen2")],
)
def test_engine_arguments(tiny_model, device, tensor_parallel_size, model_type):
    settings = make_vllm_settings(
        Path("MODEL"),
        device=device,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=False,
        enable_chunked_prefill=True,
    )
    processors = load_processors(str(tiny_model(model_type)), min_pixels=784, max_pixels=50176)
    expected = DEVICES[device] | PARALLEL[tensor_parallel_size] | MODELS[model_type]
    if device == "cuda" and tensor_parallel_size == 2:
        expected |= NCCL_ONLY
    assert engine_arguments(settings, processors) == expected | {"tokenizer": str(tiny_model(model_type))}


def test_a_cpu_does_not_run_images_that_attend_in_both_directions(tiny_model):
    processors = processors_of(tiny_model("gemma3"))
    with pytest.raises(EngineError, match=r"'gemma3' model on a CPU.*Set worker\.rollout\.name=transformers"):
        engine_arguments(make_vllm_settings(Path("MODEL"), device="cpu"), processors)
    arguments = engine_arguments(make_vllm_settings(Path("MODEL"), device="cuda"), processors)
    assert arguments["limit_mm_per_prompt"] == {"video": 0, "image": 1}


def test_a_family_that_vllm_does_not_implement_is_refused_with_the_engine_that_samples_it(tiny_model):
    folder = tiny_model("glm46v")
    processors, refusal = processors_of(folder), r"worker\.rollout\.name is vllm.*glm46v.*set it to transformers"
    with pytest.raises(ConfigError, match=refusal):
        engine_arguments(make_vllm_settings(folder, device="cuda"), processors)
    config = make_vllm_settings(folder).config
    with pytest.raises(ConfigError, match=refusal):
        check_policy(config, processors.hf_config)
    check_policy(with_options(config, {"worker.rollout.name": "transformers"}), processors.hf_config)


@pytest.mark.parametrize(
    ("device", "tied", "names", "load_format"),
    [
        ("cuda", True, ["model.embed_tokens.weight"], "dummy"),
        ("cuda", False, ["model.embed_tokens.weight", "lm_head.weight"], "dummy"),
        # Only the two tensors show whether the head is tied.
        ("cuda", True, ["model.embed_tokens.weight", "lm_head.weight"], "auto"),
        ("cuda", True, ["model.embed_tokens.weight", "language_model.lm_head.weight"], "auto"),
        ("cpu", False, ["model.embed_tokens.weight", "lm_head.weight"], "auto"),
    ],
)
def test_a_gpu_does_not_read_weights_that_it_drops_at_once(tiny_model, device, tied, names, load_format):
    processors = processors_of(tiny_model("qwen2", tie_word_embeddings=tied))
    arguments = engine_arguments(make_vllm_settings("MODEL", device=device), processors, checkpoint_names=names)
    assert arguments["load_format"] == load_format


@pytest.mark.parametrize(
    ("model_runner", "device", "variable"),
    [("v1", "cuda", "0"), ("v2", "cuda", "1"), (None, "cuda", "the user's"), ("v2", "cpu", "the user's")],
)
def test_the_model_runner_is_chosen_by_an_environment_variable(monkeypatch, model_runner, device, variable):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "the user's")
    choose_model_runner(model_runner, device)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == variable


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"max_num_seqs": 512}, None),  # vLLM's own largest graph
        ({"max_num_seqs": 1024}, 1024),
        ({"max_num_seqs": 600}, 608),
        ({"max_num_seqs": 1024, "enforce_eager": True}, None),
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 256}, None),
        ({"max_num_seqs": 1024, "device": "cpu", "enable_chunked_prefill": False}, None),
    ],
)
def test_the_largest_cuda_graph_holds_all_sequences(tiny_model, changes, largest):
    folder = tiny_model("qwen2")
    options = {"device": "cuda", "enable_chunked_prefill": True, "max_num_batched_tokens": 8192, "enforce_eager": False}
    settings = make_vllm_settings(folder, **{**options, **changes})
    compilation = engine_arguments(settings, load_processors(str(folder))).get("compilation_config", {})
    assert compilation.get("max_cudagraph_capture_size") == largest


def test_the_cache_on_the_cpu_is_at_most_one_gibibyte(tiny_model):
    processors = processors_of(tiny_model("qwen2"))
    settings = make_vllm_settings("MODEL")
    assert cpu_cache_bytes(settings, processors) == CPU_CACHE_BYTES
    assert cpu_cache_bytes(make_vllm_settings("MODEL", dtype="bf16"), processors) == CPU_CACHE_BYTES // 2
    assert cpu_cache_bytes(make_vllm_settings("MODEL", max_model_len=100_000), processors) == 2**30


def test_linear_attention_that_vllm_cannot_compute_on_a_cpu_is_refused_with_the_options_that_help(tiny_model):
    folder = tiny_model("qwen3_5")
    processors = processors_of(folder)  # heads of 16 and 24
    for dtype in ("fp32", "bf16"):
        with pytest.raises(EngineError, match=r"worker\.rollout\.dtype=bf16.*worker\.rollout\.name=transformers"):
            engine_arguments(make_vllm_settings(folder, dtype=dtype), processors)
    text = processors.hf_config.text_config
    text.linear_key_head_dim = text.linear_value_head_dim = 128
    settings = make_vllm_settings(folder, dtype="bf16", enable_chunked_prefill=True)
    assert not engine_arguments(settings, processors)["enable_prefix_caching"]  # prompts are never split there
    assert engine_arguments(replace(settings, device="cuda"), processors)["enable_prefix_caching"]


def test_tensors_that_neither_trainer_nor_engine_loads_are_not_missing_after_a_sync(tiny_model):
    folder = tiny_model("qwen3_5")
    processors, names = processors_of(folder), checkpoint_names(folder)
    published = canonical_names([*names, "mtp.layers.0.mlp.up_proj.weight"], processors)
    check_names(names, published, processors)
    with pytest.raises(EngineError, match="1 missing"):
        check_names(names[1:], published, processors)
