"""Every algorithm raises the reward, with real configuration, vLLM and reward workers.

The task is easy enough for a few steps: completions with a 1 are rewarded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from trigon.config.load import load_config
from trigon.config.names import AdvantageEstimator, CorrectionKind, KlEstimator, LossAveraging, PolicyLossType
from trigon.tools.cli.train import train

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
STEPS = 6
NUM_PROMPTS = 128

REWARD = """
REWARD_TYPE = "sequential"


def compute_score(reward_input):
    has_one = float("1" in reward_input["response"])
    brief = float(reward_input["response_length"] < 20)
    return {"overall": 0.9 * has_one + 0.1 * brief, "accuracy": has_one, "brief": brief}
"""

KL_IN_LOSS = ("algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_coef=0.01")
KL_IN_REWARD = ("algorithm.disable_kl=false", "algorithm.use_kl_loss=false", "algorithm.kl_coef=0.01")
TWO_UPDATES = ("worker.actor.global_batch_size=4",)  # in the second update the ratios are not 1

# Each tests an advantage estimator or a policy loss, most also a KL, an averaging or a correction.
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo, default": ("algorithm.adv_estimator=grpo", "worker.actor.loss_type=default", *TWO_UPDATES),
    "grpo, gspo, averaged by sequence": (
        *("algorithm.adv_estimator=grpo", "worker.actor.loss_type=gspo", "worker.actor.loss_avg_mode=seq"),
        *TWO_UPDATES,
    ),
    "grpo_batch, gspo_token, entropy": (
        *(
            "algorithm.adv_estimator=grpo_batch",
            "worker.actor.loss_type=gspo_token",
            "worker.actor.entropy_coeff=0.001",
        ),
        *TWO_UPDATES,
    ),
    "grpo_passk": ("algorithm.adv_estimator=grpo_passk",),
    "grpo, cispo": ("algorithm.adv_estimator=grpo", "worker.actor.loss_type=cispo", *TWO_UPDATES),
    "dr_grpo, sapo, fixed length": (
        *("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_type=sapo", "worker.actor.loss_avg_mode=seq_fixed"),
        *TWO_UPDATES,
    ),
    "rloo, truncated importance": (
        *("algorithm.adv_estimator=rloo", "algorithm.mismatch_correction=truncate", "worker.actor.loss_avg_mode=token"),
        *TWO_UPDATES,
    ),
    "reinforce_plus_plus, k1 in the reward": (
        *(*KL_IN_REWARD, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.kl_penalty=kl"),
    ),
    "reinforce_plus_plus_baseline, k2 in the loss": (
        *(*KL_IN_LOSS, "algorithm.adv_estimator=reinforce_plus_plus_baseline", "algorithm.kl_penalty=mse"),
    ),
    "remax, k3 in the loss": (*KL_IN_LOSS, "algorithm.adv_estimator=remax", "algorithm.kl_penalty=low_var_kl"),
    "opo, abs in the loss": (*KL_IN_LOSS, "algorithm.adv_estimator=opo", "algorithm.kl_penalty=abs"),
    "gdpo, full KL in the loss": (*KL_IN_LOSS, "algorithm.adv_estimator=gdpo", "algorithm.kl_penalty=full"),
    "full KL in the reward, adaptive; masked sequences": (
        *(*KL_IN_REWARD, "algorithm.kl_penalty=full", "algorithm.kl_type=adaptive"),
        *("algorithm.mismatch_correction=mask", "algorithm.mismatch_level=sequence"),
    ),
    "online filtering; rejected sequences": (
        *("algorithm.online_filtering=true", "algorithm.filter_key=accuracy", "data.mini_rollout_batch_size=6"),
        *("algorithm.filter_surplus=keep", "algorithm.overlong_filtering=true", "trainer.max_try_make_batch=3"),
        *("algorithm.mismatch_correction=reject", "algorithm.mismatch_level=sequence"),
    ),
}
"""The overrides of each."""

OTHER_STEPS = {
    "grpo_passk": 8,  # its signal is weak: only the best of a group has an advantage
    "online filtering; rejected sequences": 4,  # later all completions are correct, and all groups are filtered
}

CHOICES = {
    "algorithm.adv_estimator": get_args(AdvantageEstimator),
    "worker.actor.loss_type": get_args(PolicyLossType),
    "worker.actor.loss_avg_mode": get_args(LossAveraging),
    "algorithm.kl_penalty": get_args(KlEstimator),
    "algorithm.mismatch_correction": get_args(CorrectionKind),
}


def run(made: Path, folder: Path, steps: int, *overrides: str) -> dict[str, list[float]]:
    """Train, and return the values of each metric by step."""
    (folder / "reward.py").write_text(REWARD)
    loaded = load_config(
        ROOT / "trigon" / "tools" / "quickstart" / "quickstart.yaml",
        [
            f"data.train_files={made / 'data' / 'train.parquet'}@train[:{NUM_PROMPTS}]",
            f"worker.actor.model.model_path={made / 'model'}",
            f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
            f"trainer.save_checkpoint_path={folder / 'run'}",
            f"trainer.max_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.val_freq=-1",
            "trainer.save_freq=-1",
            "data.rollout_batch_size=8",
            "data.max_response_length=24",
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


def test_every_choice_of_the_configuration_is_tested():
    tested = {override for overrides in ALGORITHMS.values() for override in overrides}
    required = {f"{key}={choice}" for key, choices in CHOICES.items() for choice in choices}
    assert required - tested == set()


@pytest.mark.long(
    but=[
        "grpo, default",
        "grpo_batch, gspo_token, entropy",
        "rloo, truncated importance",
        "remax, k3 in the loss",
        "full KL in the reward, adaptive; masked sequences",
        "online filtering; rejected sequences",
    ]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reward_rises(tiny_folder, tmp_path, name):
    steps = OTHER_STEPS.get(name, STEPS)
    metrics = run(tiny_folder, tmp_path, steps, *ALGORITHMS[name])
    accuracy = metrics["reward/accuracy"]
    assert len(accuracy) == steps
    assert accuracy[-1] >= accuracy[0] + 0.25, accuracy
    assert sum(metrics["actor/skipped_updates"]) == 0
