"""Measured peaks of passes on the CPU, and the arithmetic of the same passes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trigon.models.activations import (
    PassBytes,
    PassFormat,
    PassOptions,
    RowLengths,
    score_bytes,
    update_bytes,
)
from trigon.models.kernels import Kernel
from trigon.models.sizes import model_size
from trigon.training.dry_run import as_rollouts, dummy_group
from trigon.training.local import LocalTrainEngine
from trigon.training.memory import HostMemory

GROUPS, PROMPT, COMPLETIONS, RESPONSE = 2, 100, 4, 60


class Peaks(NamedTuple):
    """Peaks of an update and of a pass without gradient, in bytes: measured, and by arithmetic."""

    update: int
    score: int
    update_counted: PassBytes
    score_counted: PassBytes


def measure(
    engine: LocalTrainEngine,
    *,
    checkpointing: bool,
    compute_dtype: torch.dtype | None,
    kernel: Kernel = "sdpa",
    has_adapters: bool = False,
    offloads: bool = False,
) -> Peaks:
    """Measure passes over a row of equal groups with prompts full of images, and count them."""
    policy, memory = engine.policy, HostMemory(shared_by=1)
    group = dummy_group(
        policy, prompt_tokens=PROMPT, response_tokens=RESPONSE, image_pixels=None, num_completions=COMPLETIONS
    )
    groups = [group] * GROUPS
    with engine.dry_run_updates() as update:
        update(groups)  # allocates the gradients
        update_peak = memory.peak_bytes(lambda: update(groups))
    rollouts = as_rollouts(groups)
    engine.logprobs(rollouts)
    score_peak = memory.peak_bytes(lambda: engine.logprobs(rollouts))

    grid = None if group.prompt.vision is None else group.prompt.vision.grid_thw.prod(1)
    size = model_size(policy, None)
    assert size.dimensions is not None
    weight = policy.model.dtype
    arguments = (
        size.dimensions,
        RowLengths(
            groups=GROUPS,
            prompt=PROMPT,
            completions=COMPLETIONS,
            response=RESPONSE,
            patches=0 if grid is None else int(grid.sum()),
            image_patches=0 if grid is None else int(grid.max()),
        ),
        PassFormat(weight=weight.itemsize, compute=(compute_dtype or weight).itemsize),
        PassOptions(
            checkpointing=checkpointing,
            trains_weights=not has_adapters,
            trains_vision=size.trains_vision,
            kernel=kernel,
            chunk_rows=policy.logprob_chunk,
            tied=size.tied,
            on_cpu=True,
            offloads=offloads,
        ),
    )
    return Peaks(update_peak, score_peak, update_bytes(*arguments), score_bytes(*arguments))
