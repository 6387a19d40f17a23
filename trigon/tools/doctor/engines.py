"""The checks of vLLM beside a trainer in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trigon.tools.doctor.result import CheckSkipped, Findings, Setting, require_packages


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """How vLLM is started.

    runner: its model runner, V1 or V2. async_scheduling: it schedules the next forward pass during
    the last one. graphs: it compiles the model and records CUDA graphs.
    """

    runner: Literal["v1", "v2"]
    async_scheduling: bool
    graphs: bool

    @property
    def name(self) -> str:
        """The name of its check: "vllm-v2-async-graphs"."""
        return (
            f"vllm-{self.runner}-{'async' if self.async_scheduling else 'sync'}-{'graphs' if self.graphs else 'eager'}"
        )


VARIANTS = (
    EngineVariant("v2", async_scheduling=True, graphs=True),  # vLLM's own defaults on CUDA
    EngineVariant("v2", async_scheduling=False, graphs=False),
    EngineVariant("v1", async_scheduling=True, graphs=False),
    EngineVariant("v1", async_scheduling=False, graphs=True),
)
"""Every two of the three settings occur in every combination."""

OTHER_VARIANTS = (
    EngineVariant("v1", async_scheduling=False, graphs=False),
    EngineVariant("v1", async_scheduling=True, graphs=True),
    EngineVariant("v2", async_scheduling=True, graphs=False),
    EngineVariant("v2", async_scheduling=False, graphs=True),
)
"""The others, for which there may be no time left."""


def check_variant(setting: Setting, *, variant: EngineVariant) -> Findings:
    """Compare vLLM's log-probabilities with the trainer's, before and after a change of weights.

    A bfloat16 model with the shapes of Qwen2.5-VL-3B; vLLM sleeps and wakes up in between.
    Raises: CheckSkipped without vLLM, and on the CPU for all but one variant.
    """
    require_packages("vllm")
    if setting.device == "cpu" and variant != EngineVariant("v1", async_scheduling=False, graphs=False):
        raise CheckSkipped("vLLM on the CPU has the V1 runner only, without asynchronous scheduling and graphs")
    from trigon.tools.doctor.engine_parity import compare_engines

    return compare_engines(setting, variant)


def check_text_after_sleep(setting: Setting) -> Findings:
    """Compare the log-probabilities of text-only prompts before and after vLLM sleeps.

    A Qwen3-VL, whose vision features of several layers vLLM keeps in buffers of the model.
    Raises: CheckSkipped without vLLM.
    """
    require_packages("vllm")
    from trigon.tools.doctor.engine_parity import compare_text_after_sleep

    return compare_text_after_sleep(setting)
