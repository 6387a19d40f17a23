"""What is built, counted and refused for the critic of a configuration."""

from __future__ import annotations

import pytest

from support.critics import make_critic, make_trunk
from support.published import configured
from trigon.assemble.critic import check_trained_critic, require_same_tokens
from trigon.assemble.hub import hub_names
from trigon.assemble.memory import GIB, Hardware, count_checkpoint_bytes, count_memory, size_of_model
from trigon.assemble.remedies import list_changes
from trigon.assemble.workers import config_for_workers
from trigon.config.options import with_options
from trigon.config.plan import make_plan, with_critic_as_actor
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ConfigError, ModelError
from trigon.models.load import load_processors

GAE = {"algorithm.adv_estimator": "gae", "worker.actor.fsdp.torch_dtype": "fp32"}
KEPT_REFERENCE = {"worker.ref.fsdp.enable_cpu_offload": False, "worker.ref.offload.offload_params": False}
GPU = Hardware("cuda", 80 * GIB, 2000 * GIB)


def configured_with(**changes) -> Config:
    return with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | changes)


def parts_of(config: Config, phase: str, pool: str = "GPU") -> dict[str, int]:
    memory = count_memory(config, size_of_model(config), GPU)
    [found] = [each for each in memory.phases if (each.phase, each.pool) == (phase, pool)]
    return {part.name: part.expected for part in found.parts}


def test_the_memory_of_a_critic_is_that_of_its_engine(tiny_model):
    folder = str(tiny_model("qwen2_5_vl"))
    config = with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | {"worker.actor.model.model_path": folder})
    parts, sizes = parts_of(config, "critic update"), make_critic(tiny_model("qwen2_5_vl")).sizes()
    assert parts["critic's weights"] == sizes.weight_bytes
    assert parts["critic's gradients"] == sizes.gradient_bytes
    assert parts["critic's optimizer states"] == sizes.optimizer_bytes


def test_a_critic_stays_in_memory_while_others_work_unless_it_is_offloaded():
    config = configured_with()
    resting = parts_of(config, "sampling")
    rest = parts_of(with_options(config, {"algorithm.adv_estimator": "grpo"}), "sampling")
    assert resting.keys() - rest.keys() == {"critic's weights", "critic's optimizer states"}
    assert resting["critic's optimizer states"] == 2 * resting["critic's weights"] > 20 * GIB
    offload = {f"worker.critic.offload.offload_{name}": True for name in ("params", "optimizer")}
    assert parts_of(with_options(config, offload), "sampling") == rest
    assert "critic's weights" in parts_of(with_options(config, offload), "sampling", "host")


def test_the_inputs_of_the_critics_layers_can_be_in_host_memory():
    offloads = configured_with(**{"worker.critic.model.enable_activation_offload": True})
    parts, kept = parts_of(offloads, "critic update"), parts_of(configured_with(), "critic update")
    assert parts["activations"] < kept["activations"]
    assert parts_of(offloads, "critic update", "host")["inputs of layers"] > kept["activations"] - parts["activations"]


@pytest.mark.parametrize(("changes", "offered"), [({}, True), ({"worker.critic.share_trunk": True}, False)])
def test_that_the_critics_inputs_can_be_in_host_memory_is_offered(changes, offered):
    config = configured_with(**changes)
    changed = {"worker.critic.model.enable_activation_offload": True}
    offers = [each for alternatives in list_changes(config, "cuda", ()) for each in alternatives]
    assert any(changed.items() <= each.items() for each in offers) is offered


@pytest.mark.parametrize(("phase", "own"), [("critic values", 2), ("critic update", 3)])
def test_the_policy_rests_during_the_passes_of_the_critic(phase, own):
    config = configured_with(**KEPT_REFERENCE)
    parts = parts_of(config, phase)
    assert {"weights", "optimizer states", "reference model", "activations"} <= parts.keys()
    assert sum(name.startswith("critic's") for name in parts) == own
    assert parts["reference model"] == parts_of(config, "sampling")["reference model"]
    offload = {f"worker.actor.offload.offload_{name}": True for name in ("params", "optimizer")}
    offload |= {"worker.ref.offload.offload_params": True}
    rest = parts_of(with_options(config, offload), phase)
    assert not {"weights", "optimizer states", "reference model"} & rest.keys()


def test_adapters_of_the_critic_do_not_ask_for_another_reference():
    adapters = {"worker.critic.model.lora.rank": 8}
    config = configured_with(**KEPT_REFERENCE | adapters)
    assert parts_of(config, "critic update")["reference model"] > GIB  # of the policy, which has none
    without = configured_with(**KEPT_REFERENCE | {"worker.actor.model.lora.rank": 8})
    assert "reference model" not in parts_of(without, "critic update")  # the policy without its adapters


def test_a_checkpoint_has_the_critic_with_its_own_head():
    config, without = configured_with(), configured_with(**{"algorithm.adv_estimator": "grpo"})
    both, policy = (count_checkpoint_bytes(each, size_of_model(each)) for each in (config, without))
    assert both - 2 * policy == 12 * 2049  # the policy's head is its embedding


def test_a_critic_has_the_options_of_its_own_and_the_policys_model():
    config = configured_with(**{"worker.critic.optim.lr": 0.5, "worker.critic.model.freeze_vision_tower": True})
    actor, critic = with_critic_as_actor(config).worker.actor, config.critic
    assert (actor.optim.lr, actor.model.freeze_vision_tower) == (critic.optim.lr, True) == (0.5, True)
    assert actor.model.model_path == critic.model.model_path == config.worker.actor.model.model_path
    other = with_options(config, {"worker.critic.model.model_path": "org/critic"})
    assert with_critic_as_actor(other).worker.actor.model.model_path == "org/critic"
    assert "org/critic" in hub_names(other)
    assert "org/critic" not in hub_names(with_options(other, {"algorithm.adv_estimator": "grpo"}))


def test_workers_get_an_absolute_path_of_the_critics_model(tiny_model, monkeypatch):
    folder = tiny_model("qwen2_5_vl")
    monkeypatch.chdir(folder.parent)
    config = configured_with(**{"worker.critic.model.model_path": f"./{folder.name}"})
    assert config_for_workers(config).worker.critic.model.model_path == str(folder)


def test_a_critic_that_cannot_read_the_policys_tokens_is_refused(tiny_model):
    processors = load_processors(str(tiny_model("qwen2_5_vl")))
    require_same_tokens(configured_with(), processors)
    same = configured_with(**{"worker.critic.model.model_path": str(tiny_model("qwen2_5_vl", seed=3))})
    require_same_tokens(same, processors)
    other = configured_with(**{"worker.critic.model.model_path": str(tiny_model("qwen3"))})
    with pytest.raises(ModelError, match="it is a qwen3 model, and the policy a qwen2_5_vl model"):
        require_same_tokens(other, processors)


def test_the_plan_counts_the_critics_updates_and_the_steps_in_which_the_policy_rests():
    config = Config(
        algorithm={"adv_estimator": "gae"},
        data={"rollout_batch_size": 8},
        worker={
            "actor": {"global_batch_size": 4, "optim": {"lr_warmup_steps": 1}},
            "critic": {"global_batch_size": 2, "ppo_epochs": 3, "optim": {"lr_warmup_ratio": 0.5}},
        },
        trainer={"max_steps": 10, "critic_warmup": 4},
    )
    plan = make_plan(config, num_train_prompts=8)
    assert (plan.updates_per_step, plan.total_updates, plan.warmup_updates) == (2, 12, 2)
    assert (plan.critic.updates_per_step, plan.critic.total_updates, plan.critic.warmup_updates) == (12, 120, 60)


@pytest.mark.parametrize("warmup", [4, 5])
def test_a_policy_that_would_never_learn_is_refused_when_the_steps_are_counted(warmup):
    config = Config(
        algorithm={"adv_estimator": "gae"},
        data={"rollout_batch_size": 8},
        worker={"actor": {"global_batch_size": 8}, "critic": {"global_batch_size": 8}},
        trainer={"total_epochs": 2, "critic_warmup": warmup},
    )
    assert make_plan(config, num_train_prompts=24).total_steps == 6
    with pytest.raises(ConfigError, match=r"there are 4 steps \(trainer.total_epochs\): the policy would never learn"):
        make_plan(config, num_train_prompts=16)
    validates = with_options(config, {"trainer.val_only": True, "data.val_files": "x.jsonl"})
    assert make_plan(validates, num_train_prompts=0).total_steps == 0


def test_adapters_of_the_critic_in_a_checkpoint_are_compared_before_models_are_loaded(tiny_model, tmp_path):
    make_critic(tiny_model("qwen3"), lora_rank=4).save_state(tmp_path, model_only=False)()
    with pytest.raises(CheckpointError, match=r"set worker\.critic\.model\.lora\.rank=4 to resume"):
        check_trained_critic(Config(), tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 4, and worker\.critic\.model\.lora\.rank is 2"):
        check_trained_critic(with_options(Config(), {"worker.critic.model.lora.rank": 2}), tmp_path)
    check_trained_critic(with_options(Config(), {"worker.critic.model.lora.rank": 4}), tmp_path)


def test_a_critic_with_a_shared_trunk_has_the_batches_of_the_actor_and_an_optimizer_of_its_own():
    config = Config(
        algorithm={"adv_estimator": "gae"},
        data={"rollout_batch_size": 8},
        worker={
            "actor": {"global_batch_size": 4, "ppo_epochs": 2, "micro_batch_size_per_device_for_update": 3},
            "critic": {"share_trunk": True, "optim": {"lr": 0.5}},
        },
        trainer={"max_steps": 10, "critic_warmup": 4},
    )
    plan = make_plan(config, num_train_prompts=8)
    assert (plan.critic.prompts_per_update, plan.critic.epochs_per_step) == (4, 2)
    assert plan.critic.tokens_per_update_pass == plan.tokens_per_update_pass
    assert (plan.total_updates, plan.critic.total_updates) == (24, 40)  # the policy rests in 4 of 10 steps
    assert config.critic.optim.lr == 0.5


def test_the_memory_of_a_shared_trunk_is_that_of_its_engine(tiny_model):
    folder = tiny_model("qwen2_5_vl")
    changes = {"worker.actor.model.model_path": str(folder), "worker.critic.share_trunk": True}
    config = with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | changes)
    parts, engines = parts_of(config, "update"), make_trunk(folder)
    sizes = [engine.sizes() for engine in engines]
    for part, name in (("weights", "weight"), ("gradients", "gradient"), ("optimizer states", "optimizer")):
        assert parts[part] == sum(getattr(each, f"{name}_bytes") for each in sizes)
    phases = {phase.phase for phase in count_memory(config, size_of_model(config), GPU).phases}
    assert not {"critic values", "critic update"} & phases
    checkpoint = count_checkpoint_bytes(config, size_of_model(config))
    policy = with_options(config, {"algorithm.adv_estimator": "grpo"})
    assert checkpoint - count_checkpoint_bytes(policy, size_of_model(policy)) == 12 * sizes[1].parameters


def test_a_checkpoint_of_the_other_kind_of_critic_is_refused_before_models_are_loaded(tiny_model, tmp_path):
    shared = with_options(Config(), GAE | {"worker.critic.share_trunk": True})
    apart = with_options(Config(), GAE)
    make_critic(tiny_model("qwen3")).save_state(tmp_path / "apart", model_only=False)()
    make_trunk(tiny_model("qwen3"))[1].save_state(tmp_path / "shared", model_only=False)()
    check_trained_critic(shared, tmp_path / "shared")
    check_trained_critic(apart, tmp_path / "apart")
    with pytest.raises(CheckpointError, match=r"a model of its own, and worker\.critic\.share_trunk is true"):
        check_trained_critic(shared, tmp_path / "apart")
    with pytest.raises(CheckpointError, match=r"a head on the policy's trunk, and worker\.critic\."):
        check_trained_critic(apart, tmp_path / "shared")
