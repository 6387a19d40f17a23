"""A critic computes the same however its rows are packed, on however many ranks, resumed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.critics import flat, make_critic, make_trunk, make_value_model, set_head, to_learn
from support.engines import make_engine, make_rollouts, tensors_in, to_train
from support.models import processors_of
from support.oracle import has_no_gradient, load_hugging_face, padded_logits
from trigon.data.packing import by_group, pack_rollouts
from trigon.errors import CheckpointError
from trigon.metrics import merge, values
from trigon.models.positions import positions_of
from trigon.models.value import ValueModel
from trigon.training.parallel import Sharding
from trigon.types import RolloutGroup, TrainGroup

TinyModel = Callable[..., Path]
ONE_GROUP = 40  # token budget of a row that no two groups fit into
FULL = Sharding(
    full_shard=True, ranks_per_copy=None, param_dtype=torch.float32, reduce_dtype=torch.float32, cpu_offload=False
)


def packed_values(model: ValueModel, folder: Path, groups: Sequence[RolloutGroup]) -> list[list[Tensor]]:
    processors = processors_of(folder)
    rows = pack_rollouts(groups, max_tokens=10_000, positions=positions_of(model.family, processors.hf_config))
    return by_group(rows, [model(row.packed) for row in rows])


@pytest.mark.extended(but=["qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "qwen3"])
def test_values_and_their_gradients_equal_those_of_a_padded_forward(tiny_model: TinyModel, model_type, tied):
    folder = tiny_model(model_type, tie_word_embeddings=tied)
    model, groups = make_value_model(folder), make_rollouts(folder)
    packed = flat(packed_values(model, folder, groups))
    weights = torch.randn(len(packed), generator=torch.Generator().manual_seed(1))
    (weights @ packed).backward()

    oracle = load_hugging_face(folder, torch.float32)
    width = oracle.get_input_embeddings().weight.shape[1]
    oracle.lm_head = torch.nn.Linear(width, 1)
    set_head(oracle.lm_head, 0)
    oracle.config.get_text_config().final_logit_softcapping = None  # bounds logits, no values
    padded = []
    for group in groups:
        completions = [rollout.completion.token_ids for rollout in group.rollouts]
        logits = padded_logits(oracle, group.prompt, completions)[..., 0]
        padded += [logits[row, : len(tokens)] for row, tokens in enumerate(completions)]
    expected = torch.cat(padded)
    (weights @ expected).backward()

    assert expected.std() > 0.1
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)
    own, expected_gradients = (
        {name: part.grad for name, part in each.named_parameters() if part.grad is not None}
        for each in (model.model, oracle)
    )
    assert own.keys() == expected_gradients.keys()
    zeros = {name: gradient for name, gradient in expected_gradients.items() if has_no_gradient(name)}
    assert all(max(own[name].norm(), gradient.norm()) < 1e-6 for name, gradient in zeros.items())
    errors = {
        name: float((own[name] - gradient).norm() / (gradient.norm() or 1.0))
        for name, gradient in expected_gradients.items()
        if name not in zeros
    }
    assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)


def test_a_new_critic_values_everything_at_zero(tiny_vlm):
    assert not flat(packed_values(make_value_model(tiny_vlm, head_seed=None), tiny_vlm, make_rollouts(tiny_vlm))).any()


def test_no_head_over_the_vocabulary_is_in_memory(tiny_model):
    model = make_value_model(tiny_model("qwen3"))
    assert [part.shape[0] for part in model.model.lm_head.parameters()] == [1, 1]
    vocabulary = model.embedding.weight.shape[0]
    assert sum(part.shape[0] == vocabulary for part in model.parameters()) == 1  # the embedding


def test_the_value_after_the_last_token_is_that_of_the_state_behind_it(tiny_vlm):
    """It is the value before a token that is appended."""
    critic, [group, *_] = make_critic(tiny_vlm), make_rollouts(tiny_vlm)
    [scored] = critic.values([group])
    longer = tuple(
        replace(
            rollout,
            completion=replace(
                rollout.completion,
                token_ids=(*rollout.completion.token_ids, 5),
                sampling_logprobs=(*rollout.completion.sampling_logprobs, 0.0),
                turns=(),
            ),
        )
        for rollout in group.rollouts
    )
    [appended] = critic.values([replace(group, rollouts=longer)])
    for own, other in zip(scored, appended, strict=True):
        torch.testing.assert_close(own, other[:-1], atol=1e-5, rtol=0)


def test_micro_batches_change_nothing_but_rounding(tiny_vlm):
    groups = [*to_learn(make_rollouts(tiny_vlm), masked=[(0, 1), (2, 0), (2, 1), (2, 2)])]
    for averaging in ("token", "seq"):
        large, small = (make_critic(tiny_vlm, max_tokens=tokens, averaging=averaging) for tokens in (10_000, ONE_GROUP))
        metrics, others = values(large.step(groups)), values(small.step(groups))
        assert others["critic/micro_batches"] > metrics["critic/micro_batches"] == 1
        for key in ("critic/vf_loss", "critic/grad_norm", "critic/vf_clipfrac", "critic/vpred_mean"):
            assert others[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_values_come_close_to_the_returns(tiny_vlm):
    critic, rollouts = make_critic(tiny_vlm), make_rollouts(tiny_vlm)
    groups = to_learn(rollouts)
    losses = []
    for _ in range(20):
        before = critic.values(rollouts)
        moved = [
            replace(
                group, sequences=tuple(replace(s, values=v[:-1]) for s, v in zip(group.sequences, row, strict=True))
            )
            for group, row in zip(groups, before, strict=True)
        ]
        losses.append(values(critic.step(moved))["critic/vf_loss"])
    assert losses[-1] < 0.3 * losses[0]


def test_a_gradient_that_is_not_finite_is_skipped(tiny_vlm):
    critic, groups = make_critic(tiny_vlm), to_learn(make_rollouts(tiny_vlm))
    spoilt = replace(groups[0].sequences[0], returns=torch.full_like(groups[0].sequences[0].returns, torch.inf))
    groups[0] = replace(groups[0], sequences=(spoilt, *groups[0].sequences[1:]))
    before = {name: part.detach().clone() for name, part in critic.policy.named_parameters()}
    metrics = values(critic.step(groups))
    assert (metrics["critic/nonfinite_updates"], metrics["critic/skipped_updates"]) == (1, 1)
    assert all(torch.equal(part, before[name]) for name, part in critic.policy.named_parameters())


@pytest.mark.parametrize(
    "options",
    # The head is in float32 beside weights in bfloat16, and has other optimizer states than they.
    [{}, {"lora_rank": 4}, {"dtype": torch.bfloat16, "strategy": "adamw_bf16"}],
    ids=["full", "lora", "bf16"],
)
def test_a_restored_critic_continues_bit_for_bit(tiny_vlm, tmp_path, options):
    steps = [to_learn(make_rollouts(tiny_vlm, seed=seed)) for seed in (1, 20, 40)]
    critic = make_critic(tiny_vlm, **options)
    for groups in steps[:2]:
        critic.step(groups)
    critic.save_state(tmp_path, model_only=False)()
    resumed = make_critic(tiny_vlm, **options)
    resumed.load_state(tmp_path)
    probe = make_rollouts(tiny_vlm, seed=60)
    assert torch.equal(flat(resumed.values(probe)), flat(critic.values(probe)))
    assert values(resumed.step(steps[2])) == values(critic.step(steps[2]))
    assert torch.equal(flat(resumed.values(probe)), flat(critic.values(probe)))


def test_another_run_s_state_is_refused_by_the_name_of_the_critics_option(tiny_vlm, tmp_path):
    make_critic(tiny_vlm, strategy="adamw").save_state(tmp_path, model_only=False)()
    with pytest.raises(CheckpointError, match=r"worker\.critic\.optim\.strategy=adamw, this run has adamw_bf16"):
        make_critic(tiny_vlm, strategy="adamw_bf16").load_state(tmp_path)


def test_an_offloaded_policy_leaves_the_device_before_the_critic_takes_memory(tiny_vlm):
    calls = []
    critic = make_critic(tiny_vlm, before_use=lambda: calls.append("offloaded"))
    critic.values(make_rollouts(tiny_vlm))
    assert calls == ["offloaded"]
    critic.step(to_learn(make_rollouts(tiny_vlm)))
    assert len(calls) == 2


def test_images_that_are_shared_with_the_policy_are_counted_apart(tiny_vlm):
    policy, rollouts = make_engine(tiny_vlm, freeze=True), make_rollouts(tiny_vlm)
    critic = make_critic(tiny_vlm, freeze=True, features=policy.features)
    policy.logprobs(rollouts)  # remembers no image
    critic.values(rollouts)
    assert critic.step(to_learn(rollouts))["critic/vision_cached_fraction"].value == 1
    updated = policy.step(to_train(rollouts))["actor/vision_cached_fraction"]
    assert 0 < updated.value < 1


# -- ranks ----


def train_on_ranks(
    folder: Path,
    shares: Sequence[Sequence[int]],
    sharding: Sharding | None,
    saved: Path,
    *,
    on_trunk: bool,
    lora_rank: int = 0,
    ranks_per_row: int = 1,
):
    """Make two updates with this rank's groups: on a trunk of the head alone, and of both.

    Returns metrics, and values of other groups, on a trunk after their log-probabilities.
    """
    rank = 0 if sharding is None else torch.distributed.get_rank()
    options = {"max_tokens": ONE_GROUP, "sharding": sharding, "lora_rank": lora_rank}
    if on_trunk:
        trainer, critic = make_trunk(folder, sequence_parallel_size=ranks_per_row, **options)
    else:
        trainer = critic = make_critic(folder, ranks_per_row=ranks_per_row, **options)
    metrics = []
    for seed, engine in ((20, critic), (40, trainer)):
        groups: list[TrainGroup] = to_learn(make_rollouts(folder, seed=seed))
        metrics.append(engine.step([groups[index] for index in shares[rank]]))
    rollouts = make_rollouts(folder, seed=90)
    own = [rollouts[index] for index in shares[rank]]
    scored = critic.logprobs_and_values(own) if on_trunk else (critic.values(own),)
    for engine, name in ((critic, "critic"), *([(trainer, "actor")] if on_trunk else [])):
        (saved / name).mkdir(parents=True, exist_ok=True)
        engine.save_state(saved / name, model_only=False)()
    return metrics, [[[each.tolist() for each in group] for group in part] for part in scored]


APART, TOGETHER = ((2,), (0, 1)), ((0, 1, 2), (0, 1, 2))


@pytest.mark.extended
@pytest.mark.long(cases=["rows together-apart", "rows together-on the trunk"])
@pytest.mark.parametrize("on_trunk", [False, True], ids=["apart", "on the trunk"])
@pytest.mark.parametrize(
    ("shares", "options"),
    [(APART, {}), (APART, {"lora_rank": 4}), (TOGETHER, {"ranks_per_row": 2})],
    ids=["full", "lora", "rows together"],
)
def test_two_ranks_compute_what_one_process_does(processes, tiny_vlm, tmp_path, shares, options, on_trunk):
    train = partial(train_on_ranks, on_trunk=on_trunk, **options)
    results = processes.run(train, tiny_vlm, shares, FULL, tmp_path / "two", ranks=2)
    alone = partial(train_on_ranks, on_trunk=on_trunk, lora_rank=options.get("lora_rank", 0))
    metrics, scored = alone(tiny_vlm, ((0, 1, 2),), None, tmp_path / "one")
    tolerance = {"rel": 1e-3, "abs": 1e-5} if on_trunk else {"rel": 1e-4, "abs": 1e-6}
    of_rows = ("micro_batches", "packed_tokens", "packing_fill", "ratio_max")
    for update, expected in enumerate(map(values, metrics)):
        merged = values(merge(*(each[0][update] for each in results)))
        keys = [key for key in expected if key.startswith(("actor/", "critic/")) and not key.endswith(of_rows)]
        assert {"critic/vf_loss", "critic/grad_norm", "critic/vpred_mean", "critic/lr"} <= set(keys)
        for key in keys:
            assert merged[key] == pytest.approx(expected[key], **tolerance), key
    for part, of_part in enumerate(scored):
        by_index = {
            index: row
            for share, each in zip(shares, results, strict=True)
            for index, row in zip(share, each[1][part], strict=True)
        }
        for index, group in enumerate(of_part):
            for own, other in zip(group, by_index[index], strict=True):
                assert own == pytest.approx(other, abs=1e-4)
    for weights in sorted((tmp_path / "one").glob("*/weights")) + sorted((tmp_path / "one").glob("*/adapter")):
        one, two = tensors_in(weights), tensors_in(tmp_path / "two" / weights.relative_to(tmp_path / "one"))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=0)
        if not on_trunk:
            assert {name for name in one if "lm_head" in name} == {"lm_head.weight", "lm_head.bias"}
