"""Prints what vLLM makes of a CUDA engine's arguments, on a machine without a GPU.

    python -m support.cuda_engine_config FOLDER '[{"tensor_parallel_size": 2}]'

To be run in a process of its own: it lets vLLM believe that it runs on an H100, up to its
configuration. FOLDER: of the model. Then a JSON list of changes to make_vllm_settings. Prints a
JSON list with the configuration of each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from support.rollout import make_vllm_settings
from trigon.models.load import Processors, load_processors
from trigon.rollout.vllm.arguments import engine_arguments
from trigon.rollout.vllm.process import choose_model_runner, import_vllm, register_models
from trigon.rollout.vllm.weights import checkpoint_names


def pretend_h100() -> None:
    """Give vLLM's platform the class of CUDA, with the answers of an H100."""
    # The CUDA build registers its kernels with this import.
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * 2**30

        @classmethod
        def device_count(cls) -> int:
            return 1  # Ray shows each worker its own

        def is_cumem_allocator_available(self) -> bool:
            return True

    # Every module of vLLM refers to the same instance.
    platforms.current_platform.__class__ = H100
    importlib.import_module("vllm.config.vllm").HAS_TRITON = True


def describe(vllm: Any, folder: Path, processors: Processors, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of vLLM's configuration that follow from Trigon's arguments."""
    settings = make_vllm_settings(
        folder, **({"device": "cuda", "dtype": "bf16", "max_num_batched_tokens": 8192} | changes)
    )
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # of another row
    choose_model_runner(settings.model_runner, "cuda")
    arguments = engine_arguments(settings, processors, checkpoint_names=checkpoint_names(folder))
    config = vllm.EngineArgs(**arguments).create_engine_config()
    return {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "largest_graph": config.compilation_config.max_cudagraph_capture_size,
        "sleep": config.model_config.enable_sleep_mode,
        "logprobs": config.model_config.logprobs_mode,
        "load_format": config.load_config.load_format,
        "executor": config.parallel_config.distributed_executor_backend,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "custom_all_reduce": not config.parallel_config.disable_custom_all_reduce,
        "fused_all_reduce": config.compilation_config.pass_config.fuse_allreduce_rms,
        "lora": config.lora_config is not None,
        "is_moe": config.model_config.is_moe,
        "reads_images": config.model_config.multimodal_config is not None,
    }


def main(folder: Path, rows: list[dict[str, Any]]) -> None:
    processors = load_processors(str(folder))
    vllm = import_vllm("cpu")
    # Imported before the platform changes, since CUDA's kernels are not in this build.
    importlib.import_module("vllm.v1.worker.cpu_worker")
    vllm.EngineArgs, vllm.LLMEngine  # noqa: B018  (vllm imports them at the first access)
    register_models(vllm, processors.hf_config.architectures)
    pretend_h100()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    print(json.dumps([describe(vllm, folder, processors, row) for row in rows]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
