"""Writes docs/hardware.md: `python scripts/hardware_page.py > docs/hardware.md`.

Counts the memory of runs of published models, whose config.json files are in
trigon/tools/plan/model_configs: their published dimensions, without what does not change a size.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trigon.assemble.memory import GIB, TIGHT, Hardware, RunMemory, count_memory, size_of_model
from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.models.sizes import ModelSize
from trigon.system.terminal import format_bytes

CONFIGS = Path(__file__).parents[1] / "trigon" / "tools" / "plan" / "model_configs"

DEVICE_BYTES = 79 * GIB
"""A GPU of "80 GB": torch finds 79.2 GiB on an A100 and 79.6 GiB on an H100."""

HOST_BYTES = 2000 * GIB
SIZES: Mapping[str, float] = {"24 GB": 23.6, "40 GB": 39.4, "48 GB": 44.5, "80 GB": DEVICE_BYTES / GIB}
"""GiB that torch finds on a GeForce RTX 4090, an A100 of 40 GB, and an L40S."""
COUNTS = (1, 2, 4, 8, 16, 32)
GPUS = (1, 2, 4, 8, 16)
MODELS = (
    "Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen2.5-VL-32B-Instruct",
    "Qwen2.5-VL-72B-Instruct",
    "Qwen3-VL-30B-A3B-Instruct",
    "Qwen3.5-9B",
    "Qwen3.5-35B-A3B",
)
SMALL = "Qwen2.5-1.5B-Instruct"
BF16 = {"worker.actor.fsdp.torch_dtype": "bf16"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "All weights in float32 (`adamw`)": {},
    "All weights in bfloat16 (`adamw_bf16`)": {**BF16, "worker.actor.optim.strategy": "adamw_bf16"},
    "LoRA of rank 64 on bfloat16": {**BF16, "worker.actor.model.lora.rank": 64},
}
FLOAT32, BFLOAT16, _LORA = METHODS
EASYR1: Mapping[str, Mapping[str, tuple[int, str]]] = {
    FLOAT32: {
        SMALL: (2, "24 GB"),
        "Qwen2.5-VL-3B-Instruct": (4, "40 GB"),
        "Qwen2.5-VL-7B-Instruct": (8, "40 GB"),
        "Qwen2.5-VL-32B-Instruct": (16, "80 GB"),
    },
    BFLOAT16: {
        SMALL: (1, "24 GB"),
        "Qwen2.5-VL-3B-Instruct": (1, "40 GB"),
        "Qwen2.5-VL-7B-Instruct": (4, "40 GB"),
        "Qwen2.5-VL-32B-Instruct": (8, "80 GB"),
    },
}
"""The GPUs that EasyR1 estimates for full fine-tuning with GRPO: how many, and their size."""

SETTINGS: Mapping[str, Any] = {
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "worker.rollout.n": 5,
    "worker.rollout.gpu_memory_utilization": 0.6,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
}
OFFLOAD = {"worker.actor.offload.offload_params": True, "worker.actor.offload.offload_optimizer": True}

INTRODUCTION = f"""\
# Hardware

<!-- Written by `python scripts/hardware_page.py > docs/hardware.md`; change the script instead. -->

What fits on GPUs of 24, 40, 48 and 80 GB, by arithmetic. **No figure on this page was measured on a GPU.**
For your own model, lengths and GPUs, without a GPU ([planning a run](check.md#planning-a-run)):

```bash
trigon plan examples/config.yaml --gpus 8xH100-80G
```

The same arithmetic is made when a run starts. A run that cannot fit is refused before anything is
loaded, with the parts of the phase that does not fit and the changes that help most, each with the
bytes that it saves. `trainer.check_memory=false` turns this off.

## GPUs of 80 GB

Conditions: prompts and completions of 2,048 tokens, n = 5, `gpu_memory_utilization=0.6`, gradient
checkpointing, passes of one longest sequence (the least that `trainer.auto_micro_batch` accepts), a
KL term whose reference is in host memory between its passes, the vision tower trained, 16 GPUs as
two machines of eight, {DEVICE_BYTES // GIB} GiB of each GPU. `tensor_parallel_size` is the smallest of 1, 2, 4 and 8
with which a run fits.

Each cell has the phase that needs most and its GiB on each GPU. **fits**: at most {TIGHT:.0%} of the GPU.
**offload**: fits with `worker.actor.offload.offload_params=true` and `offload_optimizer=true`.
**no**: does not fit with these conditions.
"""


HOW_IT_IS_COUNTED = """\

## How it is counted

Weights, gradients and optimizer states are exact: the model is created without memory from its
config.json, and its parameters are counted. Activations and logits are counted from the tensors
that autograd keeps for each layer, at the largest rows that the options allow, with prompts full of
images. Layers gathered by FSDP, vLLM's weights and its share of the GPU follow from the options.
1 GiB each is assumed for CUDA's context with NCCL's buffers, and for vLLM's CUDA graphs, and 2 GiB of
host memory for each worker's libraries.

The tests compare the arithmetic of an update's pass and of a pass without gradient with the peaks
of live tensors measured on the CPU, for twelve families of tiny models, in float32, bfloat16 and
mixed precision, with and without gradient checkpointing: they agree within 15 %. What only a GPU has,
such as workspaces of kernels, fragmentation and CUDA graphs, is not checked.

A run is refused for what it needs with certainty, however short its prompts and completions are, and
where vLLM's share of a GPU cannot hold its weights and one sequence of maximum length; rows of maximum
length, at which this page counts, only give a warning.
"""

SMALLER_GPUS = f"""\
## GPUs of other sizes

The fewest GPUs of each size (of {{counts}}) on which a run fits, under the same
conditions, with {{found}} GiB of each GPU. *offloaded*: with both offload options, as above.
{SMALL.removesuffix("-Instruct")} is a language model; there is no vision-language model of its size.
"""

AGAINST_EASYR1 = """\
## Against EasyR1's table

EasyR1 estimates the GPUs for full fine-tuning with GRPO by the size of the model, and names no
lengths. Here, under the conditions above:
"""

DISAGREEMENT = """
The two disagree where a model in bfloat16 is to fit on one GPU. A weight takes 12 bytes while an
optimizer step is made: 2 for the weight, 2 for its gradient, and 8 for the states of `adamw_bf16`,
which keeps the second moment in float32 and the 16 bits that bfloat16 cuts off a weight, so that no
update is lost. For the 3.75 billion weights of Qwen2.5-VL-3B that is 42 GiB, more than a GPU of 40 GB
has, before any activation. Offloading does not help, since the step needs all of it on the GPU at
once; two GPUs, or LoRA, do. Qwen2.5-1.5B fits 24 GB with prompts and completions of 1,024 tokens.
"""


def document() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for method in METHODS:
        parts.append(f"### {method}\n")
        parts += _table(["model", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)], method, _cell)
    parts += _smaller_gpus()
    parts += _against_easyr1()
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
        f"offloading:\n\n```text\n{_phases(example)}\n```"
    )
    parts.append(HOW_IT_IS_COUNTED)
    return "\n".join(parts)


def _table(header: list[str], method: str, cell: Callable[[str, str, int], str]) -> list[str]:
    lines = [_line(header), _line("---" for _ in header)]
    for name in MODELS:
        lines.append(_line([name.removesuffix("-Instruct"), *(cell(name, method, gpus) for gpus in GPUS)]))
    return [*lines, ""]


def _smaller_gpus() -> list[str]:
    """Return the section with the fewest GPUs of each size."""
    found = ", ".join(f"{gib:g}" for gib in SIZES.values())
    parts = [SMALLER_GPUS.format(counts=", ".join(map(str, COUNTS)), found=found)]
    for method in METHODS:
        header = ["model", *SIZES]
        parts += [f"### {method}\n", _line(header), _line("---" for _ in header)]
        for name in (SMALL, *MODELS):
            cells = (_fewest(name, method, gib) for gib in SIZES.values())
            parts.append(_line([name.removesuffix("-Instruct"), *cells]))
        parts.append("")
    return parts


def _fewest(name: str, method: str, gib: float) -> str:
    """Return the fewest GPUs, with offloading and without it."""
    offloaded, plain = (
        next((gpus for gpus in COUNTS if _best(name, method, gpus, options, gib)[0]), None) for options in (OFFLOAD, {})
    )
    if plain is not None and (offloaded is None or plain <= offloaded):
        return str(plain)
    if offloaded is None:
        return f"more than {COUNTS[-1]}"
    return f"{offloaded} offloaded, {plain or f'more than {COUNTS[-1]}'} without"


def _against_easyr1() -> list[str]:
    """Return the section that compares this arithmetic with EasyR1's estimates."""
    header = ["method", "model", "EasyR1's estimate", "here"]
    lines = [AGAINST_EASYR1, _line(header), _line("---" for _ in header)]
    tables = []
    for method, estimates in EASYR1.items():
        for name, (gpus, size) in estimates.items():
            short = name.removesuffix("-Instruct")
            cell = _cell(name, method, gpus, SIZES[size])
            lines.append(_line([method, short, f"{gpus} x {size}", cell]))
            if cell.startswith("no"):
                memory = _count(_options(name, method, gpus) | OFFLOAD, SIZES[size])
                phases = re.split(r"\n(?=\S)", _phases(memory))
                update = "\n".join(each for each in phases if re.match("(update|optimizer step), each GPU", each))
                tables.append(f"{short} in bfloat16 on {gpus} x {size}, with offloading:\n\n```text\n{update}\n```\n")
    return [*lines, DISAGREEMENT, *tables]


def _cell(name: str, method: str, gpus: int, gib: float = DEVICE_BYTES / GIB) -> str:
    """Return the first of: fits, fits with offloading, does not fit. gib: of each GPU."""
    tried = []
    for word, offload in (("fits", {}), ("offload", OFFLOAD)):
        fits, gib_needed, text = _best(name, method, gpus, offload, gib)
        if fits:
            return f"**{word}** ({text})"
        tried.append((gib_needed, text))
    return f"no ({min(tried)[1]})"


def _best(name: str, method: str, gpus: int, offload: Mapping[str, Any], gib: float) -> tuple[bool, float, str]:
    """Return whether a run fits, and the GiB of its largest phase, as a number and as text.

    Of the smallest tensor_parallel_size with which it fits, or else of the one that needs least.
    """
    tried: list[tuple[bool, float, str]] = []
    for parallel in (1, 2, 4, 8):
        if parallel <= gpus:
            options = {**_options(name, method, gpus), **offload, "worker.rollout.tensor_parallel_size": parallel}
            memory = _count(options, gib)
            worst = max((phase for phase in memory.phases if phase.pool == "GPU"), key=lambda phase: phase.expected)
            needed = worst.expected / GIB
            fits = memory.problem is None and needed <= TIGHT * gib
            tried.append((fits, needed, f"{worst.phase} {needed:,.0f}"))
            if fits:
                return tried[-1]
    return min(tried, key=lambda each: each[1])


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


def _phases(memory: RunMemory) -> str:
    """Return all phases and their parts as text."""
    lines = []
    for phase in memory.phases:
        needed, capacity = format_bytes(phase.expected), memory.describe_capacity(phase)
        lines.append(f"{phase.phase}, {phase.where}: {needed} of {capacity}")
        lines += [f"    {format_bytes(part.expected):>12}  {part.name}" for part in phase.parts if part.expected]
    return "\n".join(lines)


def _count(options: Mapping[str, Any], gib: float = DEVICE_BYTES / GIB) -> RunMemory:
    """Return the memory of a run. gib: of each GPU."""
    size = _size(options["worker.actor.model.model_path"])
    return count_memory(with_options(Config(), options), size, Hardware("cuda", int(gib * GIB), HOST_BYTES))


@cache
def _size(model_path: str) -> ModelSize:
    return size_of_model(with_options(Config(), {"worker.actor.model.model_path": model_path}))


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(document())
