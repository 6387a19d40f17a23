"""vLLM accepts the arguments of a CUDA engine, and what it makes of them. Without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.vllm]

TESTS = Path(__file__).parents[1]

ALONE = {
    "runner": "v2",
    "async_scheduling": True,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "chunked_prefill": True,
    "graphs": "FULL_AND_PIECEWISE",
    "largest_graph": 1024,
    "sleep": True,
    "logprobs": "processed_logprobs",
    "load_format": "dummy",
    "executor": "uni",
    "tensor_parallel_size": 1,
    "custom_all_reduce": True,  # of no use to one rank
    "fused_all_reduce": False,
    # Trigon merges adapters into the weights that it loads.
    "lora": False,
}
CUDA = {"max_num_seqs": 1024, "enable_chunked_prefill": True, "enforce_eager": False}
ROWS = {
    "one process": (CUDA, ALONE),
    "one of several workers": (CUDA | {"tensor_parallel_size": 1}, ALONE | {"executor": "external_launcher"}),
    "two GPUs for a model": (
        CUDA | {"tensor_parallel_size": 2},
        ALONE | {"executor": "external_launcher", "tensor_parallel_size": 2, "custom_all_reduce": False},
    ),
    "eager": (CUDA | {"enforce_eager": True}, ALONE | {"graphs": "NONE", "largest_graph": 0}),
    "the older runner": (CUDA | {"model_runner": "v1"}, ALONE | {"runner": "v1"}),
    "without overlap": (
        CUDA | {"model_runner": "v2", "async_scheduling": False},
        ALONE | {"async_scheduling": False},
    ),
    "few tokens": (
        CUDA | {"max_num_batched_tokens": 300},
        ALONE | {"max_num_batched_tokens": 300, "max_num_seqs": 300, "largest_graph": 300},
    ),
    "whole prompts": (CUDA | {"enable_chunked_prefill": False}, ALONE | {"chunked_prefill": False}),
    "few sequences": (CUDA | {"max_num_seqs": 64}, ALONE | {"max_num_seqs": 64, "largest_graph": 128}),
}
MODELS = {"qwen2": (False, False), "qwen2_5_vl": (False, True), "qwen3_vl_moe": (True, True)}


@pytest.mark.long(but=["qwen2_5_vl"])
@pytest.mark.parametrize("model_type", MODELS)
def test_vllm_makes_of_the_arguments_what_is_meant(tiny_model, model_type):
    is_moe, reads_images = MODELS[model_type]
    changes = [changes for changes, _ in ROWS.values()]
    result = subprocess.run(
        [sys.executable, "-m", "support.cuda_engine_config", str(tiny_model(model_type)), json.dumps(changes)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    kind = {"is_moe": is_moe, "reads_images": reads_images}
    differing = {
        f"{row}: {key}": (each[key], value)
        for (row, (_, expected)), each in zip(ROWS.items(), found, strict=True)
        for key, value in (expected | kind).items()
        if each[key] != value
    }
    assert differing == {}  # {row and key: (found, expected)}
