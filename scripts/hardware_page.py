"""Writes docs/hardware.md: `python scripts/hardware_page.py > docs/hardware.md`.

Counts the memory of runs of published models, whose config.json files are in
trigon/planning/model_configs: their published dimensions, without what does not change a size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trigon.build.memory import count_memory
from trigon.build.memory_check import TIGHT, with_options
from trigon.build.memory_table import GIB, Hardware, RunMemory
from trigon.build.model_sizes import size_of_model
from trigon.config.schema import Config
from trigon.models.memory import ModelSize

CONFIGS = Path(__file__).parents[1] / "trigon" / "planning" / "model_configs"

DEVICE_BYTES = 79 * GIB
"""A GPU of "80 GB": torch finds 79.2 GiB on an A100 and 79.6 GiB on an H100."""

HARDWARE = Hardware("cuda", DEVICE_BYTES, 2000 * GIB)
GPUS = (1, 2, 4, 8, 16)
MODELS = (
    "Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen2.5-VL-32B-Instruct",
    "Qwen2.5-VL-72B-Instruct",
    "Qwen3-VL-30B-A3B-Instruct",
)
BF16 = {"worker.actor.fsdp.torch_dtype": "bf16"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "All weights in float32 (`adamw`)": {},
    "All weights in bfloat16 (`adamw_bf16`)": {**BF16, "worker.actor.optim.strategy": "adamw_bf16"},
    "LoRA of rank 64 on bfloat16": {**BF16, "worker.actor.model.lora.rank": 64},
}
SETTINGS: Mapping[str, Any] = {
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "worker.rollout.n": 5,
    "worker.rollout.gpu_memory_utilization": 0.6,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
}
OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}
SIZE_OPTIONS = ("worker.actor.model.model_path", "worker.actor.model.lora.rank")

INTRODUCTION = f"""\
# Hardware

<!-- Written by `python scripts/hardware_page.py > docs/hardware.md`; change the script instead. -->

What fits on GPUs of 80 GB, by arithmetic. **No figure on this page was measured on a GPU.**

The same arithmetic is made when a run starts. A run that cannot fit is refused before anything is
loaded, with the parts of the phase that does not fit and the changes that help most, each with the
bytes that it saves. `trainer.check_memory=false` turns this off.

## How it is counted

Weights, gradients and optimizer states are exact: the model is created without memory from its
config.json, and its parameters are counted. Activations and logits are counted from the tensors
that autograd keeps for each layer, at the largest rows that the options allow, with prompts full of
images. Layers gathered by FSDP, vLLM's weights and its share of the GPU follow from the options.
1 GiB each is assumed for CUDA's context with NCCL's buffers, and for vLLM's CUDA graphs, and 2 GiB of
host memory for each worker's libraries.

The tests compare the arithmetic of an update's pass and of a pass without gradient with the peaks
of live tensors measured on the CPU, for nine families of tiny models and for one of 40 million
parameters, in float32, bfloat16 and mixed precision, with and without gradient checkpointing: they
agree within 15 %. What only a GPU has, such as workspaces of kernels, fragmentation and CUDA graphs,
is not checked.

A run is refused for what it needs with certainty, however short its prompts and completions are;
rows of maximum length, at which this page counts, only give a warning.

## Tables

Conditions: prompts and completions of 2,048 tokens, n = 5, `gpu_memory_utilization=0.6`, gradient
checkpointing, passes of one longest sequence (the least that `trainer.auto_micro_batch` accepts), a
KL term whose reference is in host memory between its passes, the vision tower trained, 16 GPUs as
two machines of eight, {DEVICE_BYTES // GIB} GiB of each GPU. `tensor_parallel_size` is the smallest of 1, 2, 4 and 8
with which a run fits.

Each cell has the phase that needs most and its GiB on each GPU. **fits**: at most {TIGHT:.0%} of the GPU.
**offload**: fits with `worker.actor.offload.offload_params=true` and `offload_optimizer=true`.
**no**: does not fit with these conditions.
"""


def document() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for method in METHODS:
        parts.append(f"### {method}\n")
        parts += _table(["model", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)], method, _cell)
    parts.append(
        "## Host memory\n\nGiB on each machine with eight GPUs, with weights and optimizer states offloaded: the "
        "phase that\nneeds most. A checkpoint that is being written counts, with a copy of weights and states; image "
        "caches\nhave at most 4 GiB a worker.\n"
    )
    header = ["model", *(name.partition(" (")[0] for name in METHODS)]
    parts += [_line(header), _line("---" for _ in header)]
    for name in MODELS:
        cells = (_host_cell(name, method) for method in METHODS)
        parts.append(_line([name.removesuffix("-Instruct"), *cells]))
    example = _count(_options(MODELS[1], "All weights in float32 (`adamw`)", 8) | OFFLOAD)
    parts.append(
        f"\n## Phase by phase\n\n{MODELS[1].removesuffix('-Instruct')} on eight GPUs, all weights in float32, with "
        f"offloading:\n\n```text\n{example.table()}\n```\n"
    )
    return "\n".join(parts)


def _table(header: list[str], method: str, cell: Callable[[str, str, int], str]) -> list[str]:
    lines = [_line(header), _line("---" for _ in header)]
    for name in MODELS:
        lines.append(_line([name.removesuffix("-Instruct"), *(cell(name, method, gpus) for gpus in GPUS)]))
    return [*lines, ""]


def _cell(name: str, method: str, gpus: int) -> str:
    """Return the first of: fits, fits with offloading, does not fit."""
    options = _options(name, method, gpus)
    tried = []
    for word, offload in (("fits", {}), ("offload", OFFLOAD)):
        for parallel in (1, 2, 4, 8):
            if parallel > gpus:
                continue
            memory = _count({**options, **offload, "worker.rollout.tensor_parallel_size": parallel})
            worst = max((phase for phase in memory.phases if phase.pool == "GPU"), key=lambda phase: phase.expected)
            text = f"{worst.phase} {worst.expected / GIB:,.0f}"
            if worst.expected <= TIGHT * DEVICE_BYTES:
                return f"**{word}** ({text})"
            tried.append((worst.expected, text))
    return f"no ({min(tried)[1]})"


def _host_cell(name: str, method: str) -> str:
    memory = _count(_options(name, method, 8) | OFFLOAD)
    worst = max((phase for phase in memory.phases if phase.pool == "host"), key=lambda phase: phase.expected)
    return f"{worst.phase} {worst.expected / GIB:,.0f}"


def _options(name: str, method: str, gpus: int) -> dict[str, Any]:
    return {
        **SETTINGS,
        **METHODS[method],
        "worker.actor.model.model_path": str(CONFIGS / name),
        "trainer.n_gpus_per_node": min(gpus, 8),
        "trainer.nnodes": max(1, gpus // 8),
    }


def _count(options: Mapping[str, Any]) -> RunMemory:
    config = with_options(Config(), options)
    size = _size(tuple((key, options[key]) for key in SIZE_OPTIONS if key in options))
    return count_memory(config, size, HARDWARE)


@cache
def _size(options: tuple[tuple[str, Any], ...]) -> ModelSize:
    return size_of_model(with_options(Config(), dict(options)))


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(document())
