"""Predicts the published steps of EasyR1: `python scripts/published_steps.py`, a table in Markdown.

EasyR1 publishes the time of a step and the throughput for runs on geometry3k in its
assets/baselines.md (v0.3.2, vLLM 0.10.0). Its trainer computes a prompt and its images once for
each completion, so that these figures test the hardware table and the efficiencies of a plan rather
than Trigon, of which no figure on a GPU exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from trigon.assemble.memory_check import with_options
from trigon.config.schema import Config
from trigon.tools.plan.lengths import LengthOptions
from trigon.tools.plan.model import SHIPPED
from trigon.tools.plan.plan import plan
from trigon.tools.plan.result import RunPlan
from trigon.tools.plan.work import Trainer

EASYR1 = Trainer("EasyR1", "repeated", reduces_every_pass=True, always_scores=True)

SEQUENCES = 512 * 5
"""Of a step: prompts times completions."""

_TEXT_TOKENS = 110  # of a prompt of geometry3k with EasyR1's template
_IMAGE_TOKENS = {"qwen2_5_vl": 18 * 18, "qwen3_vl": 16 * 16}  # images of 512 x 512 pixels

_BF16 = {"worker.actor.fsdp.torch_dtype": "bf16", "worker.actor.optim.strategy": "adamw_bf16"}
_SETTINGS: dict[str, Any] = {
    "data.train_files": ["hiyouga/geometry3k@train"],
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "data.rollout_batch_size": 512,
    "worker.actor.global_batch_size": 128,
    "worker.rollout.n": 5,
    "worker.rollout.enable_prefix_caching": False,
    "worker.reward.reward_function": "math",
    "worker.actor.offload.offload_params": True,
    "worker.actor.offload.offload_optimizer": True,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "trainer.auto_micro_batch": False,
    "trainer.val_before_train": False,
}


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the table of EasyR1. micro: sequences of an update's pass, and of a scoring's.

    tokens_per_second: of a device, prompts included. seconds: of a step.
    """

    model: str
    gpus: str
    bf16: bool
    micro: tuple[int, int]
    parallel: int
    tokens_per_second: int
    seconds: int

    @property
    def tokens(self) -> float:
        """The mean tokens of a sequence, from the two published figures."""
        return self.tokens_per_second * 8 * self.seconds / SEQUENCES


ROWS = (
    Published("Qwen2.5-VL-3B-Instruct", "8xH100-80G", False, (1, 2), 2, 1800, 120),
    Published("Qwen2.5-VL-7B-Instruct", "8xH100-80G", False, (1, 2), 2, 1600, 145),
    Published("Qwen2.5-VL-7B-Instruct", "8xH100-80G", False, (4, 8), 2, 2000, 120),
    Published("Qwen2.5-VL-7B-Instruct", "8xL20-48G", False, (1, 2), 2, 410, 580),
    Published("Qwen2.5-VL-7B-Instruct", "8xH100-80G", True, (1, 2), 2, 1600, 145),
    Published("Qwen2.5-VL-32B-Instruct", "8xH100-80G", True, (1, 2), 8, 620, 530),
    Published("Qwen3-VL-30B-A3B-Instruct", "8xH800-80G", True, (1, 2), 8, 80, 4600),
)


@cache
def predict(row: Published) -> RunPlan:
    """Return the plan of a published run, as EasyR1's trainer computes."""
    image_tokens = _IMAGE_TOKENS["qwen3_vl" if row.model.startswith("Qwen3") else "qwen2_5_vl"]
    prompt_tokens = image_tokens + _TEXT_TOKENS
    changes = {
        **_SETTINGS,
        **(_BF16 if row.bf16 else {}),
        "worker.actor.model.model_path": str(SHIPPED / row.model),
        "worker.actor.micro_batch_size_per_device_for_update": row.micro[0],
        "worker.actor.micro_batch_size_per_device_for_experience": row.micro[1],
        "worker.rollout.tensor_parallel_size": row.parallel,
    }
    lengths = LengthOptions(
        prompt_tokens=prompt_tokens, image_tokens=image_tokens, response_tokens=row.tokens - prompt_tokens
    )
    return plan(with_options(Config(), changes), gpus=row.gpus, lengths=lengths, trainer=EASYR1)


def table() -> str:
    """Return the rows as published and as predicted."""
    lines = [
        "| model | GPUs | weights | micro-batch | published s/step | predicted s/step | predicted / published |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        time = predict(row).time
        assert time is not None
        cells = (
            row.model.removesuffix("-Instruct"),
            row.gpus.replace("x", " x ", 1),
            "bf16" if row.bf16 else "fp32",
            "{} / {}".format(*row.micro),
            str(row.seconds),
            f"{time.total:.0f}",
            f"{time.total / row.seconds:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
