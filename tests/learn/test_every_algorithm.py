"""Every algorithm raises the reward: through the real configuration, real vLLM, real graders, in this process.

The task is easy, so that a few steps show it: to answer every question with a 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from trigon.algorithms.advantages import AdvantageEstimator
from trigon.algorithms.losses import PolicyLossType
from trigon.cli.train import train
from trigon.config.load import load_config

ROOT = Path(__file__).parents[2]
STEPS = 6

REWARD = """
REWARD_TYPE = "sequential"


def compute_score(answer):
    says_one = float("1" in answer["response"])
    brief = float(answer["response_length"] < 10)
    return {"overall": 0.9 * says_one + 0.1 * brief, "accuracy": says_one, "brief": brief}
"""

KL_IN_LOSS = ("algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_coef=0.01")
KL_IN_REWARD = ("algorithm.disable_kl=false", "algorithm.use_kl_loss=false", "algorithm.kl_coef=0.01")
TWO_UPDATES = ("worker.actor.global_batch_size=4",)  # so that ratios leave 1, and bounds act

ALGORITHMS: dict[str, tuple[str, ...]] = {
    **{f"adv {name}": (f"algorithm.adv_estimator={name}",) for name in get_args(AdvantageEstimator)},
    **{f"loss {name}": (f"worker.actor.loss_type={name}", *TWO_UPDATES) for name in get_args(PolicyLossType)},
    "dr_grpo whole": ("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq_fixed"),
    "averaging seq": ("worker.actor.loss_avg_mode=seq", "worker.actor.entropy_coeff=0.001"),
    **{
        f"kl {name} in the loss": (*KL_IN_LOSS, f"algorithm.kl_penalty={name}")
        for name in ("abs", "mse", "low_var_kl", "full")
    },
    "kl in the reward, token by token": (*KL_IN_REWARD, "algorithm.adv_estimator=reinforce_plus_plus"),
    "full kl in the reward, adaptive": (*KL_IN_REWARD, "algorithm.kl_penalty=full", "algorithm.kl_type=adaptive"),
    "truncated importance": ("algorithm.mismatch_correction=truncate", *TWO_UPDATES),
    "masked sequences": ("algorithm.mismatch_correction=mask", "algorithm.mismatch_level=sequence"),
    "rejected sequences": ("algorithm.mismatch_correction=reject", "algorithm.mismatch_level=sequence"),
    "online filtering": (
        "algorithm.online_filtering=true",
        "algorithm.filter_key=accuracy",
        "data.mini_rollout_batch_size=6",
        "algorithm.filter_surplus=keep",
        "algorithm.overlong_filtering=true",
        "trainer.max_try_make_batch=3",
    ),
}
"""What is switched on: the overrides."""


def run(made: Path, folder: Path, *overrides: str) -> dict[str, list[float]]:
    """Train, and return each metric's course."""
    (folder / "reward.py").write_text(REWARD)
    loaded = load_config(
        ROOT / "trigon" / "cli" / "quickstart.yaml",
        [
            f"data.train_files={made / 'data' / 'train.parquet'}",
            f"worker.actor.model.model_path={made / 'model'}",
            f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
            f"trainer.save_checkpoint_path={folder / 'run'}",
            f"trainer.max_steps={STEPS}",
            "trainer.val_before_train=false",
            "trainer.val_freq=-1",
            "trainer.save_freq=-1",
            "data.rollout_batch_size=8",
            "data.max_response_length=16",
            "worker.actor.global_batch_size=8",
            "worker.actor.optim.lr=8e-4",
            "worker.actor.optim.lr_warmup_ratio=0",
            "worker.actor.optim.lr_scheduler_type=constant",
            "worker.ref.fsdp.torch_dtype=fp32",
            *overrides,
        ],
    )
    assert train(loaded) == 0
    lines = [json.loads(line)["metrics"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {key: [line[key] for line in lines if key in line] for key in lines[-1]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_raises_the_reward(taught, tmp_path, name):
    course = run(taught, tmp_path, *ALGORITHMS[name])
    accuracy = course["reward/accuracy"]
    assert len(accuracy) == STEPS
    assert accuracy[-1] >= accuracy[0] + 0.25, accuracy
    assert sum(course["actor/skipped_updates"]) == 0
