"""Configurations of runs of published models, of which the repository has the config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trigon.config.options import with_options
from trigon.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "trigon" / "tools" / "plan" / "model_configs"
"""One folder for each model."""


def configured(name: str, changes: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration of a run on one GPU: prompts and completions of 2,048 tokens."""
    lengths = {
        "data.max_prompt_length": 2048,
        "data.max_response_length": 2048,
        "worker.rollout.n": 5,
        "worker.actor.micro_batch_size_per_device_for_update": 1,
        "worker.actor.micro_batch_size_per_device_for_experience": 2,
        "worker.actor.model.model_path": str(CONFIGS / name),
    }
    return with_options(Config(), {**lengths, **(changes or {})})
