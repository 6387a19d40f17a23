"""The load-balancing loss of MoE models: by hand, as in transformers, and in updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import ONE_ROW, make_engine, make_rollouts, to_train, weights_of, with_loss
from support.models import processors_of
from support.oracle import load_hugging_face, make_group, make_prompt, pack_groups
from support.tensors import flatten
from trigon.algorithms.reduce import expert_shares, load_balancing_loss
from trigon.data.packing import pack_rollouts, tokens_of
from trigon.metrics import values
from trigon.models.load import load_model
from trigon.models.policy import Policy
from trigon.models.positions import positions_of

MOE = ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_next"]
BALANCED = with_loss(router_aux_loss_coef=1.0)
TinyModel = Callable[..., Path]


def test_the_loss_by_hand() -> None:
    # Two experts for each of 4 tokens in one layer, of 3 experts. All use the first.
    shares = expert_shares([4.0, 3.0, 1.0], experts_per_token=2)
    assert shares.tokens == 4
    assert shares.fractions.tolist() == [1.0, 0.75, 0.25]
    probabilities = torch.tensor([2.0, 1.2, 0.8], requires_grad=True)  # sums over the tokens
    loss = load_balancing_loss(probabilities, shares)
    assert float(loss.detach()) == pytest.approx(3 * (1.0 * 0.5 + 0.75 * 0.3 + 0.25 * 0.2))
    loss.backward()
    assert probabilities.grad is not None
    assert probabilities.grad.tolist() == pytest.approx([0.75, 0.5625, 0.1875])


def test_it_is_smallest_where_all_experts_are_used_alike() -> None:
    shares = expert_shares([2.0] * 4, experts_per_token=2)
    assert float(load_balancing_loss(torch.full((4,), 1.0), shares)) == pytest.approx(2.0)


def test_no_tokens_have_no_loss() -> None:
    assert float(load_balancing_loss(torch.zeros(3), expert_shares([0.0] * 3, experts_per_token=2))) == 0.0


def router_logits(oracle: Any, token_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
    output = oracle(input_ids=torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    logits: tuple[Tensor, ...] = output.router_logits
    return logits


def transformers_loss(logits: tuple[Tensor, ...], config: Any) -> Tensor:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    loss = load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.extended(but=["qwen3_moe"])
@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_one_sequence_it_is_that_of_transformers(
    tiny_model: TinyModel, model_type: str, checkpointing: bool
) -> None:
    folder = tiny_model(model_type)
    processors = processors_of(folder)
    group = make_group(make_prompt(processors, [], seed=1, words_before=17), [12], seed=2)
    oracle = load_hugging_face(folder, torch.float32)
    text_config = oracle.config.get_text_config()
    expected = transformers_loss(
        router_logits(oracle, group.prompt.token_ids + group.rollouts[0].completion.token_ids), text_config
    )
    expected.backward()

    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=processors.banned_token_ids)
    if checkpointing:
        policy.enable_gradient_checkpointing()
    [row] = pack_groups(processors, [group])
    shares = expert_shares(
        policy.router_assignments(row.packed).tolist(), experts_per_token=text_config.num_experts_per_tok
    )
    loss = load_balancing_loss(policy(row.packed, router_load=True).router_probabilities, shares)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert any(name.endswith("mlp.gate.weight") for name in gradients)
    for name, weight in oracle.named_parameters():
        if weight.grad is not None:
            assert (gradients[name] - weight.grad).norm() <= 1e-5 * weight.grad.norm() + 1e-7, name


def test_a_prompt_counts_once_for_its_group(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    engine, groups = make_engine(folder, config=BALANCED), make_rollouts(folder)
    oracle = load_hugging_face(folder, torch.float32)
    logits = []
    with torch.no_grad():
        for group in groups:
            prompt = group.prompt.token_ids
            for index, rollout in enumerate(group.rollouts):
                [layer] = router_logits(oracle, prompt + rollout.completion.token_ids)
                logits.append(layer if index == 0 else layer[len(prompt) :])
    expected = transformers_loss((torch.cat(logits),), oracle.config)
    assert values(engine.step(to_train(groups)))["actor/router_aux_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.extended)])
def test_neither_the_token_budget_nor_checkpointing_changes_the_update(tiny_model: TinyModel, model_type: str) -> None:
    folder = tiny_model(model_type)
    groups = to_train(make_rollouts(folder))

    def updated(**options: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
        engine = make_engine(folder, config=BALANCED, **options)
        return values(engine.step(groups)), weights_of(engine)

    metrics, weights = updated(max_tokens=ONE_ROW)
    for options in ({"max_tokens": 45}, {"max_tokens": 1}, {"max_tokens": 45, "checkpointing": True}):
        other, changed = updated(**options)
        assert other["actor/router_aux_loss"] == pytest.approx(metrics["actor/router_aux_loss"], rel=1e-5)
        assert other["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
        error = (flatten(changed) - flatten(weights)).norm() / flatten(weights).norm()
        assert error < 2e-5


def test_updates_spread_the_tokens_over_the_experts(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    groups = to_train(make_rollouts(folder), advantages=(0.0, 0.0, 0.0))  # which is all that is learned
    engine = make_engine(folder, config=with_loss(router_aux_loss_coef=1.0, lr=1e-2))
    losses = [values(engine.step(groups))["actor/router_aux_loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert losses[-1] < 2.05  # 2 experts per token: 2.0 if all are used alike


def test_autocast_does_not_round_the_load_of_the_experts(tiny_model: TinyModel) -> None:
    """A single process computes with autocast, ranks that shard a policy without it."""
    folder = tiny_model("qwen3_moe")
    policy, groups = make_engine(folder).policy, make_rollouts(folder)
    [row] = pack_rollouts(groups, max_tokens=ONE_ROW, positions=positions_of(policy.family, policy.model.config))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        load = policy(row.packed, router_load=True).router_probabilities.detach()
    assert load.dtype == torch.float32
    # The probabilities of a token add up to 1, and one layer has experts.
    assert float(load.sum()) == pytest.approx(sum(map(tokens_of, groups)), rel=1e-5)


def test_without_the_option_there_is_no_such_metric(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe")
    assert "actor/router_aux_loss" not in make_engine(folder).step(to_train(make_rollouts(folder)))
