"""Plans of published models, of which no weights, tokenizer or data are on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trigon.config.options import with_options
from trigon.config.schema import Config
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.plan import RunPlan, plan

SETTINGS: Mapping[str, Any] = {
    "data.train_files": ["hiyouga/geometry3k@train"],
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "data.rollout_batch_size": 512,
    "worker.actor.global_batch_size": 128,
    "worker.actor.model.model_path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "worker.rollout.n": 5,
    "worker.reward.reward_function": "math",
    "algorithm.use_kl_loss": True,
    "trainer.val_before_train": False,
    "trainer.total_epochs": 15,
}
LENGTHS = LengthOptions(prompt_tokens=434, image_tokens=324, response_tokens=290, num_prompts=2101)


def planned(
    changes: Mapping[str, Any] | None = None,
    *,
    gpus: str = "8xH100-80G",
    lengths: LengthOptions = LENGTHS,
    **options: Any,
) -> RunPlan:
    """Return the plan of GRPO on geometry3k with these changes."""
    config = with_options(Config(), {**SETTINGS, **(changes or {})})
    return plan(config, gpus=gpus, lengths=lengths, **options)
