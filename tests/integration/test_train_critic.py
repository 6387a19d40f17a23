"""PPO with a critic from the command line: with vLLM, resumed, and with EasyR1's configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from support.engines import tensors_in
from support.runs import kill, lines, make_run, num_lines, overrides_of, start, wait_for
from support.tensors import assert_equal_tensors

GAE = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "algorithm.lam_critic=1",
    "algorithm.use_kl_loss=false",  # a KL in the reward, by token
    "worker.critic.global_batch_size=2",
    "worker.critic.optim.lr=1e-3",
    "worker.critic.fsdp.mp_param_dtype=fp32",
    "worker.critic.ppo_epochs=2",
    "trainer.critic_warmup=2",
    "trainer.val_freq=-1",
    "trainer.save_limit=-1",
    "trainer.val_before_train=false",
)


def tensors_of(folder: Path, step: int, model: str):
    return tensors_in(folder / f"global_step_{step}" / model / "weights")


@pytest.fixture(scope="module")
def uninterrupted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic") / "run"
    make_run(made, folder, *GAE, "worker.rollout.n=2", steps=4)
    return folder


def assert_policy_rested(made: Path, folder: Path) -> None:
    """The critic learned in all of four steps, and the policy in the last two."""
    metrics = [line["metrics"] for line in lines(folder)]
    assert [("actor/lr" in each, each["critic/lr"]) for each in metrics] == [
        (False, 1e-3),
        (False, 1e-3),
        (True, 1e-3),
        (True, 1e-3),
    ]
    assert all(each["critic/grad_norm"] > 0 for each in metrics)
    assert metrics[0]["critic/values/max"] == metrics[0]["critic/values/min"] == 0.0 < metrics[1]["critic/values/max"]
    start_weights = load_file(made / "model" / "model.safetensors")
    resting, learned = (tensors_of(folder, step, "actor") for step in (2, 4))
    assert all((resting[name] == tensor).all() for name, tensor in start_weights.items() if name in resting)
    assert any((learned[name] != tensor).any() for name, tensor in resting.items())


@pytest.mark.extended
def test_the_policy_rests_while_the_critic_warms_up(made, uninterrupted):
    assert_policy_rested(made, uninterrupted)
    critic, later = (tensors_of(uninterrupted, step, "critic") for step in (2, 4))
    assert critic["lm_head.weight"].shape[0] == 1
    assert (critic["lm_head.weight"] != later["lm_head.weight"]).any()
    assert all(line["metrics"]["critic/micro_batches"] >= 4 for line in lines(uninterrupted))  # two updates, twice


@pytest.mark.long
def test_a_run_with_a_critic_that_is_killed_equals_an_uninterrupted_one(made, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    # The inputs of layers are in host memory, which changes no bit.
    models = [f"worker.{model}.model.enable" for model in ("actor", "critic")]
    offloads = [f"{each}_{name}=true" for each in models for name in ("gradient_checkpointing", "activation_offload")]
    arguments = (*GAE, *offloads, "worker.rollout.n=2")
    process = start(made, folder, *arguments, steps=4)
    wait_for(lambda: num_lines(folder) >= 3, process, folder)  # after step 3, which has no checkpoint
    kill(process)
    make_run(made, folder, *arguments, steps=4)
    assert lines(folder) == lines(uninterrupted)
    for model in ("actor", "critic"):
        assert_equal_tensors(tensors_of(folder, 4, model), tensors_of(uninterrupted, 4, model))


@pytest.mark.long
def test_two_workers_train_a_policy_and_its_critic_on_one_trunk(made, tmp_path):
    folder = tmp_path / "run"
    own = [option for option in GAE if not option.startswith(("worker.critic.global", "worker.critic.ppo"))]
    options = ("worker.critic.share_trunk=true", "worker.actor.fsdp.mp_param_dtype=fp32", "worker.rollout.n=2")
    make_run(made, folder, *own, *options, "trainer.n_gpus_per_node=2", steps=4)
    assert_policy_rested(made, folder)
    head = tensors_of(folder, 4, "critic")
    assert head.keys() == {"value_head.weight", "value_head.bias"}
    assert (head["value_head.weight"] != tensors_of(folder, 2, "critic")["value_head.weight"]).any()


@pytest.mark.long
def test_easyr1s_configuration_with_one_completion_per_prompt_runs(made, tmp_path):
    """The keys of EasyR1's worker.critic, as its dataclasses have them."""
    folder, file = tmp_path / "run", tmp_path / "run.yaml"
    critic = {
        "strategy": "fsdp",
        "global_batch_size": 4,
        "micro_batch_size_per_device_for_update": 4,
        "micro_batch_size_per_device_for_experience": 16,
        "max_grad_norm": 1.0,
        "cliprange_value": 0.5,
        "loss_avg_mode": "token",
        "ppo_epochs": 1,
        "padding_free": False,
        "dynamic_batching": True,
        "ulysses_size": 1,
        "model": {
            "model_path": str(made / "model"),
            "tokenizer_path": str(made / "model"),
            "override_config": {},
            "enable_gradient_checkpointing": True,
            "trust_remote_code": True,
            "freeze_vision_tower": True,
            "lora": {"rank": 0, "alpha": 64, "target_modules": "all-linear", "exclude_modules": None},
        },
        "optim": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.01, "strategy": "adamw", "training_steps": -1},
        "fsdp": {"enable_full_shard": True, "enable_rank0_init": True, "use_orig_params": False, "fsdp_size": -1},
        "offload": {"offload_params": False, "offload_optimizer": False},
    }
    config = yaml.safe_load(
        (Path(__file__).parents[2] / "trigon" / "tools" / "quickstart" / "quickstart.yaml").read_text()
    )
    config["worker"]["critic"] = critic
    config["algorithm"] |= {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0}
    config["trainer"]["critic_warmup"] = 0
    file.write_text(yaml.safe_dump(config))
    arguments = [f"config={file}", *overrides_of(made, folder, steps=2), "worker.rollout.n=1", "trainer.val_freq=-1"]
    subprocess.run(
        [sys.executable, "-m", "trigon.trainer.main", *arguments, "trainer.val_before_train=false"],
        check=True,
        capture_output=True,
        timeout=300,
    )
    metrics = [line["metrics"] for line in lines(folder)]
    assert len(metrics) == 2
    assert all(each["critic/grad_norm"] > 0 and each["actor/grad_norm"] > 0 for each in metrics)
