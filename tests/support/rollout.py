"""Rollout engines on tiny models, and weights for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.options import with_short
from trigon.config.schema import Config
from trigon.models.load import Processors
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.transformers import TransformersEngine
from trigon.rollout.vllm import VllmEngine, VllmSettings
from trigon.system.trace import DecodeTracer
from trigon.types import LocalWeights, NamedTensors, Prompt

ROLLOUT = {
    "dtype": "fp32",
    "max_model_len": 256,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 128,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "limit_images": 1,
    "seed": 0,
}


def make_vllm_settings(folder: Path | str, **changes: Any) -> VllmSettings:
    """Return settings for the CPU, with these fields, or options of the engine, changed."""
    own = {"device": "cpu"} | {name: changes.pop(name) for name in VllmSettings.__slots__ if name in changes}
    config = with_short(Config(worker={"rollout": ROLLOUT | {"seed": changes.pop("seed", 0)}}), changes)
    return VllmSettings(config=config, model_folder=Path(folder), **own)


def make_vllm_engine(
    folder: Path | str, processors: Processors, *, tracer: DecodeTracer | None = None, **changes: Any
) -> VllmEngine:
    """Start vLLM on the CPU, with these fields of make_vllm_settings changed."""
    return VllmEngine(make_vllm_settings(folder, **changes), processors, tracer=tracer)


def runs_with(engine: VllmEngine) -> tuple[str, bool, bool]:
    """Return vLLM's model runner, and whether it schedules asynchronously and records graphs."""
    config = engine._llm_engine.vllm_config
    return (
        "v2" if config.use_v2_model_runner else "v1",
        bool(config.scheduler_config.async_scheduling),
        config.compilation_config.cudagraph_mode.name != "NONE",
    )


def make_transformers_engine(
    folder: Path | str,
    processors: Processors,
    *,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float32,
    records_experts: bool = False,
    episodes: EpisodeSettings | None = None,
) -> TransformersEngine:
    """Load an engine of transformers on the CPU."""
    return TransformersEngine(
        model_path=str(folder),
        processors=processors,
        device="cpu",
        dtype=dtype,
        max_model_len=max_model_len,
        trust_remote_code=False,
        override_config={},
        skip_special_tokens=True,
        records_experts=records_experts,
        episodes=episodes,
    )


def handle_of(weights: Mapping[str, Tensor]) -> LocalWeights:
    """Return a handle of these tensors."""
    return LocalWeights(lambda dtype=None: iter(weights.items()))


def unreadable_weights() -> LocalWeights:
    """Return a handle that fails the test if it is read."""

    def read(dtype: torch.dtype | None = None) -> NamedTensors:
        raise AssertionError("the weights were read")

    return LocalWeights(read)


NO_WEIGHTS = handle_of({})


class Phases:
    """Records the phases that were announced: (name, total, progress), outermost last."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, int | None, int]] = []

    @contextmanager
    def __call__(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        done: list[int] = []
        yield done.append
        self.announced.append((name, total, sum(filter(None, done))))


def drawn(prompts: Sequence[Prompt], step: int) -> list[Prompt]:
    """Return prompts as if they were drawn for this step, on which their seeds depend."""
    return [replace(prompt, draw=step) for prompt in prompts]
