"""What is built, counted and refused for the critic of a configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.critics import make_critic, make_trunk
from support.published import configured
from trigon.assemble.engines import config_for_workers
from trigon.assemble.memory import GIB, Hardware, count_checkpoint_bytes, count_memory, size_of_model
from trigon.assemble.models import check_trained_critic, require_same_tokens
from trigon.assemble.remedies import list_changes
from trigon.config.files import hub_names
from trigon.config.options import with_options
from trigon.config.plan import make_plan
from trigon.config.schema import Config
from trigon.errors import CheckpointError, ConfigError, ModelError
from trigon.models.load import load_processors
from trigon.models.sizes import ModelSize

GAE = {"algorithm.adv_estimator": "gae", "worker.actor.fsdp.torch_dtype": "fp32"}
KEPT_REFERENCE = {"worker.ref.fsdp.enable_cpu_offload": False, "worker.ref.offload.offload_params": False}
GPU = Hardware("cuda", 80 * GIB, 2000 * GIB)


def configured_with(**changes) -> Config:
    return with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | changes)


def parts_of(config: Config, phase: str, pool: str = "GPU", size: ModelSize | None = None) -> dict[str, int]:
    memory = count_memory(config, size or size_of_model(config), GPU)
    [found] = [each for each in memory.phases if (each.phase, each.pool) == (phase, pool)]
    return {part.name: part.expected for part in found.parts}


def test_the_memory_of_a_critic_is_that_of_its_engine(tiny_model):
    folder = str(tiny_model("qwen2_5_vl"))
    config = with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | {"worker.actor.model.model_path": folder})
    parts, engine = parts_of(config, "critic update"), make_critic(tiny_model("qwen2_5_vl"))
    weights = sum(part.nbytes for part in engine.policy.parameters())
    assert parts["critic's weights"] == parts["critic's gradients"] == weights
    assert parts["critic's optimizer states"] == engine.optimizer_bytes


def test_a_critic_stays_in_memory_while_others_work_unless_it_is_offloaded():
    config = configured_with()
    size = size_of_model(config)
    resting = parts_of(config, "sampling", size=size)
    without = with_options(config, {"algorithm.adv_estimator": "grpo"})
    rest = parts_of(without, "sampling", size=replace(size, critic=None))
    assert resting.keys() - rest.keys() == {"critic's weights", "critic's optimizer states"}
    assert resting["critic's optimizer states"] == 2 * resting["critic's weights"] > 20 * GIB
    offload = {f"worker.critic.offload.offload_{name}": True for name in ("params", "optimizer")}
    offloaded = with_options(config, offload)
    assert parts_of(offloaded, "sampling", size=size) == rest
    assert "critic's weights" in parts_of(offloaded, "sampling", "host", size)


@pytest.mark.extended
def test_the_inputs_of_the_critics_layers_can_be_in_host_memory():
    offloads = configured_with(**{"worker.critic.model.enable_activation_offload": True})
    size = size_of_model(offloads)
    parts, kept = (parts_of(each, "critic update", size=size) for each in (offloads, configured_with()))
    assert parts["activations"] < kept["activations"]
    moved = parts_of(offloads, "critic update", "host", size)["inputs of layers"]
    assert moved > kept["activations"] - parts["activations"]
    for share_trunk in (False, True):
        config = configured_with(**{"worker.critic.share_trunk": share_trunk})
        offers = [each for alternatives in list_changes(config, "cuda", ()) for each in alternatives]
        assert any("worker.critic.model.enable_activation_offload" in each for each in offers) is not share_trunk


def test_adapters_of_the_critic_do_not_ask_for_another_reference():
    adapters = {"worker.critic.model.lora.rank": 8}
    config = configured_with(**KEPT_REFERENCE | adapters)
    assert parts_of(config, "critic update")["reference model"] > GIB  # of the policy, which has none
    without = configured_with(**KEPT_REFERENCE | {"worker.actor.model.lora.rank": 8})
    assert "reference model" not in parts_of(without, "critic update")  # the policy without its adapters


def test_the_critics_model_is_asked_for_and_workers_get_its_absolute_path(tiny_model, monkeypatch):
    other = configured_with(**{"worker.critic.model.model_path": "org/critic"})
    assert "org/critic" in hub_names(other)
    assert "org/critic" not in hub_names(with_options(other, {"algorithm.adv_estimator": "grpo"}))
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


@pytest.mark.parametrize(
    ("critic", "actor_updates", "critic_updates"),
    [
        # Updates of a step, of the run and of the warm-up. The policy rests in 4 of 10 steps.
        ({"global_batch_size": 2, "ppo_epochs": 3, "optim": {"lr_warmup_ratio": 0.5}}, (2, 12, 2), (12, 120, 60)),
        ({"share_trunk": True}, (2, 12, 2), (2, 20, 0)),
    ],
)
def test_the_plan_counts_the_updates_of_critic_and_policy(critic, actor_updates, critic_updates):
    config = Config(
        algorithm={"adv_estimator": "gae"},
        data={"rollout_batch_size": 8},
        worker={"actor": {"global_batch_size": 4, "optim": {"lr_warmup_steps": 1}}, "critic": critic},
        trainer={"max_steps": 10, "critic_warmup": 4},
    )
    plan = make_plan(config, num_train_prompts=8)
    assert (plan.updates_per_step, plan.total_updates, plan.warmup_updates) == actor_updates
    assert (plan.critic.updates_per_step, plan.critic.total_updates, plan.critic.warmup_updates) == critic_updates


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


def test_the_memory_of_a_shared_trunk_is_that_of_its_engine(tiny_model):
    folder = tiny_model("qwen2_5_vl")
    changes = {"worker.actor.model.model_path": str(folder), "worker.critic.share_trunk": True}
    config = with_options(configured("Qwen2.5-VL-3B-Instruct"), GAE | changes)
    parts, engines = parts_of(config, "update"), make_trunk(folder)
    policy_engine, _ = engines
    weights = sum(part.nbytes for part in policy_engine.policy.parameters())  # the value head too
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["optimizer states"] == sum(engine.optimizer_bytes for engine in engines)
    phases = {phase.phase for phase in count_memory(config, size_of_model(config), GPU).phases}
    assert not {"critic values", "critic update"} & phases
    checkpoint = count_checkpoint_bytes(config, size_of_model(config))
    policy = with_options(config, {"algorithm.adv_estimator": "grpo"})
    assert checkpoint - count_checkpoint_bytes(policy, size_of_model(policy)) == 12 * sum(
        part.numel() for part in policy_engine.policy.value_head.parameters()
    )


def test_a_checkpoint_of_another_critic_is_refused_before_models_are_loaded(tiny_model, tmp_path):
    apart = with_options(Config(), GAE)
    shared = with_options(apart, {"worker.critic.share_trunk": True})
    adapters = {rank: with_options(apart, {"worker.critic.model.lora.rank": rank}) for rank in (2, 4)}
    saved = {
        "apart": make_critic(tiny_model("qwen3")),
        "shared": make_trunk(tiny_model("qwen3"))[1],
        "adapters": make_critic(tiny_model("qwen3"), lora_rank=4),
    }
    for name, engine in saved.items():
        engine.save_state(tmp_path / name, model_only=False)()
    for config, name in ((shared, "shared"), (apart, "apart"), (adapters[4], "adapters")):
        check_trained_critic(config, tmp_path / name)
    for config, name, message in (
        (shared, "apart", r"a model of its own, and worker\.critic\.share_trunk is true"),
        (apart, "shared", r"a head on the policy's trunk, and worker\.critic\."),
        (apart, "adapters", r"set worker\.critic\.model\.lora\.rank=4 to resume"),
        (adapters[2], "adapters", r"rank 4, and worker\.critic\.model\.lora\.rank is 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_trained_critic(config, tmp_path / name)
