"""A critic on the policy's trunk computes what a critic with a model of equal weights does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.critics import critic_config, flat, make_critic, make_trunk, make_value_model, to_learn
from support.engines import CONFIG, make_engine, make_rollouts, tensors_in, weights_of
from support.models import processors_of
from trigon.algorithms.reduce import count_denominators
from trigon.data.packing import pack_train
from trigon.metrics import values
from trigon.models.positions import positions_of
from trigon.training.budget import Budgets, Lengths, tune_engines
from trigon.training.device_memory import HostMemory
from trigon.training.parallel import SingleProcess
from trigon.training.step import PolicyLoss, reduced_value_loss

ONE_GROUP = 40  # token budget of a row that no two groups fit into


def parameters_of(engine) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in engine.policy.named_parameters()}


def changed_in(engine, before: dict[str, Tensor]) -> set[str]:
    return {name for name, part in engine.policy.named_parameters() if not torch.equal(part, before[name])}


@pytest.mark.extended(but=["token"])
@pytest.mark.parametrize("averaging", ["token", "seq"])
def test_values_log_probabilities_and_loss_are_those_of_two_models(tiny_vlm, averaging):
    trainer, critic = make_trunk(tiny_vlm, averaging=averaging)
    apart, rollouts = make_critic(tiny_vlm, averaging=averaging), make_rollouts(tiny_vlm)
    expected = flat(apart.values(rollouts))
    assert expected.std() > 0.1
    assert torch.equal(flat(critic.values(rollouts)), expected)
    logprobs, scored = critic.logprobs_and_values(rollouts)
    assert torch.equal(flat(scored), expected)
    assert torch.equal(flat(logprobs), flat(make_engine(tiny_vlm).logprobs(rollouts)))
    groups = to_learn(rollouts, masked=[(0, 1)])
    metrics, of_critic, of_policy = (values(each.step(groups)) for each in (trainer, apart, make_engine(tiny_vlm)))
    for key in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/lr"):
        assert metrics[key] == pytest.approx(of_critic[key], abs=1e-6), key
    for key in ("actor/pg_loss", "actor/entropy", "actor/lr"):
        assert metrics[key] == pytest.approx(of_policy[key], abs=1e-6), key


@pytest.mark.extended(but=["0.3"])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_head_gets_the_gradient_of_a_critic_of_its_own_and_the_trunk_that_of_both(tiny_vlm, coefficient):
    trainer, _ = make_trunk(tiny_vlm, coefficient=coefficient)
    policy, apart, groups = make_engine(tiny_vlm).policy, make_value_model(tiny_vlm), to_learn(make_rollouts(tiny_vlm))
    own = trainer.policy
    positions = positions_of(own.family, processors_of(tiny_vlm).hf_config)
    [batch] = pack_train(groups, max_tokens=10_000, positions=positions)
    denominators = count_denominators(part.loss_mask for group in groups for part in group.sequences)
    config = critic_config(trunk=coefficient)
    common = {"run_dummy_vision": False, "gradient_scale": 1.0}
    for model, its_config in ((own, config), (policy, CONFIG)):
        PolicyLoss(model, its_config, nullcontext, reference=None).backward(batch, denominators, **common)
    reduced_value_loss(apart(batch.packed), batch, config.worker.critic, denominators)[0].backward()

    head = own.value_head
    for name, part in apart.model.lm_head.named_parameters():
        assert part.grad.norm() > 0
        torch.testing.assert_close(head.get_parameter(name).grad, part.grad, atol=1e-6, rtol=1e-6)
    of_policy, of_values = (dict(each.model.named_parameters()) for each in (policy, apart))
    for name, part in own.model.named_parameters():
        expected = of_policy[name].grad
        if name != "lm_head.weight" and of_values[name].grad is not None:
            expected = expected + coefficient * of_values[name].grad
        torch.testing.assert_close(part.grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.extended
def test_without_weight_the_values_leave_the_policy_as_it_would_be_without_them(tiny_vlm):
    (trainer, _), plain = make_trunk(tiny_vlm, coefficient=0.0), make_engine(tiny_vlm)
    groups = to_learn(make_rollouts(tiny_vlm))
    for engine in (trainer, plain):
        engine.step(groups)
    expected = weights_of(plain)
    own = weights_of(trainer)
    assert own.keys() == expected.keys()  # a weight sync and an export have no value head
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())


@pytest.mark.extended(but=["full"])
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_the_head_learns_alone_while_the_policy_rests_and_with_it_afterwards(tiny_vlm, lora_rank):
    trainer, critic = make_trunk(tiny_vlm, lora_rank=lora_rank)
    groups, before = to_learn(make_rollouts(tiny_vlm)), parameters_of(trainer)
    metrics = values(critic.step(groups))
    head = {"value_head.weight", "value_head.bias"}
    assert changed_in(trainer, before) == head
    assert not any(key.startswith("actor/") for key in metrics)
    assert metrics["critic/grad_norm"] > 0
    together = values(trainer.step(groups))
    assert changed_in(trainer, before) > head
    assert {"actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/lr"} <= together.keys()
    assert together["critic/vf_loss"] < metrics["critic/vf_loss"]


def test_groups_without_advantages_teach_the_values(tiny_vlm):
    trainer, _ = make_trunk(tiny_vlm)
    groups = [
        replace(
            group,
            sequences=tuple(replace(each, advantages=torch.zeros_like(each.advantages)) for each in group.sequences),
        )
        for group in to_learn(make_rollouts(tiny_vlm))
    ]
    assert values(trainer.step(groups))["actor/skipped_groups"] == 0


@pytest.mark.extended
def test_micro_batches_change_nothing_but_rounding(tiny_vlm):
    groups = to_learn(make_rollouts(tiny_vlm), masked=[(0, 1), (2, 0), (2, 1), (2, 2)])
    (large, _), (small, _) = (make_trunk(tiny_vlm, max_tokens=tokens) for tokens in (10_000, ONE_GROUP))
    metrics, others = values(large.step(groups)), values(small.step(groups))
    assert others["actor/micro_batches"] > metrics["actor/micro_batches"] == 1
    for key in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"):
        assert others[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_an_update_whose_value_gradient_is_not_finite_is_skipped_for_both(tiny_vlm):
    trainer, _ = make_trunk(tiny_vlm)
    groups, before = to_learn(make_rollouts(tiny_vlm)), parameters_of(trainer)
    spoilt = replace(groups[0].sequences[0], returns=torch.full_like(groups[0].sequences[0].returns, torch.inf))
    groups[0] = replace(groups[0], sequences=(spoilt, *groups[0].sequences[1:]))
    metrics = values(trainer.step(groups))
    assert (metrics["actor/nonfinite_updates"], metrics["actor/skipped_updates"]) == (1, 1)
    assert not changed_in(trainer, before)


@pytest.mark.extended(but=["lora"])
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
def test_a_restored_policy_and_its_head_continue_bit_for_bit(tiny_vlm, tmp_path, lora_rank):
    steps = [to_learn(make_rollouts(tiny_vlm, seed=seed)) for seed in (1, 20, 40)]
    trainer, critic = make_trunk(tiny_vlm, lora_rank=lora_rank)
    critic.step(steps[0])
    trainer.step(steps[1])
    folders = (tmp_path / "actor", tmp_path / "critic")
    for engine, folder in zip((trainer, critic), folders, strict=True):
        folder.mkdir()
        engine.save_state(folder, model_only=False)()
    assert tensors_in(folders[1] / "weights").keys() == {"value_head.weight", "value_head.bias"}
    part = "adapter" if lora_rank else "weights"
    assert not any("value_head" in name for name in tensors_in(folders[0] / part))
    resumed, resumed_critic = make_trunk(tiny_vlm, lora_rank=lora_rank, head_seed=None)
    for engine, folder in zip((resumed, resumed_critic), folders, strict=True):
        engine.load_state(folder)
    assert values(resumed.step(steps[2])) == values(trainer.step(steps[2]))
    expected = parameters_of(trainer)
    assert not changed_in(resumed, expected)


def test_an_offloaded_trunk_is_on_its_device_for_the_critic(tiny_vlm):
    trainer, critic = make_trunk(tiny_vlm, offload=True)
    rollouts = make_rollouts(tiny_vlm)
    trainer.offload()
    assert torch.equal(flat(critic.values(rollouts)), flat(make_critic(tiny_vlm).values(rollouts)))


def test_dry_runs_leave_no_gradient_behind(tiny_vlm):
    trainer, _ = make_trunk(tiny_vlm)
    with trainer.dry_run_updates() as dry_run:
        dry_run(to_learn(make_rollouts(tiny_vlm)))
        assert trainer.policy.value_head.weight.grad is not None
    assert all(part.grad is None for part in trainer.policy.parameters())


def test_measured_token_budgets_are_those_of_both(tiny_vlm):
    trainer, critic = make_trunk(tiny_vlm)
    memory = HostMemory(shared_by=1)
    known = Budgets(
        update_tokens=ONE_GROUP,
        update_bytes=1,
        experience_tokens=2 * ONE_GROUP,
        experience_bytes=1,
        device=memory.device_name,
        device_bytes=1,
    )
    lengths = Lengths(10, 10, None, update_tokens=100, step_tokens=100)
    budgets = tune_engines(trainer, None, memory, lengths, SingleProcess(), known=known, critic=critic)
    assert (budgets.critic_update_tokens, budgets.critic_experience_tokens) == (ONE_GROUP, 2 * ONE_GROUP)
    groups = to_learn(make_rollouts(tiny_vlm))
    alone, together = (values(engine.step(groups)) for engine in (critic, trainer))
    assert alone["critic/micro_batches"] == together["actor/micro_batches"] == len(groups)
