"""The policy's weights by name, its errors and metrics; tests/invariants test its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.critics import make_value_model
from support.models import policy_of, processors_of
from support.oracle import make_group, make_prompt
from trigon.data.packing import pack_rollouts
from trigon.errors import ModelError
from trigon.models.policy import computing_device
from trigon.models.sizes import GroupLengths, dimensions_of, update_flops
from trigon.types import TrainGroup, TrainSequence

TinyModel = Callable[..., Path]


def test_named_weights_are_rounded_to_a_narrower_dtype_and_never_widened(tiny_model: TinyModel) -> None:
    policy = policy_of(tiny_model("qwen2"))
    exact, rounded = dict(policy.named_weights()), dict(policy.named_weights(torch.bfloat16))
    assert list(rounded) == list(exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    policy.model.bfloat16()
    assert {weight.dtype for _, weight in policy.named_weights(torch.float32)} == {torch.bfloat16}


@pytest.mark.parametrize(("model_type", "tied"), [("qwen2_5_vl", False), ("qwen3_vl", False), ("qwen2", True)])
def test_load_named_weights_restores_named_weights(tiny_model: TinyModel, model_type: str, tied: bool) -> None:
    source = policy_of(tiny_model(model_type, seed=1, tie_word_embeddings=tied))
    target = policy_of(tiny_model(model_type, seed=2, tie_word_embeddings=tied))
    weights = {name: weight.clone() for name, weight in source.named_weights()}
    target.load_named_weights(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.named_weights())
    assert (target.model.lm_head.weight is target.model.get_input_embeddings().weight) is tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), r"lm_head\.weight is missing \(1 differences"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is unexpected"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(2)}), r"lm_head\.weight is \(2,\) instead of"),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_weights_of_another_model_are_an_error_with_nothing_changed(
    tiny_vlm: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    policy = policy_of(tiny_vlm)
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    weights = {name: weight + 1.0 for name, weight in before.items()}
    change(weights)
    with pytest.raises(ModelError, match=message):
        policy.load_named_weights(weights)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_weights())


def test_images_that_do_not_match_the_placeholders_are_an_error(tiny_vlm: Path) -> None:
    policy = policy_of(tiny_vlm)
    processors = processors_of(tiny_vlm)
    group = make_group(make_prompt(processors, [(4, 4)], seed=0), [2], seed=1)
    (row,) = pack_rollouts([group], max_tokens=100, positions=lambda prompt: torch.zeros(3, len(prompt.token_ids)))
    doubled = replace(row.packed, visions=row.packed.visions * 2)
    with pytest.raises(ModelError, match="has 4 placeholder tokens, but its 2 images and videos give 8 features"):
        policy(doubled)


def test_update_work_counts_the_operations_of_an_update(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen2_5_vl")
    policy, processors = policy_of(folder), processors_of(folder)
    prompt = make_prompt(processors, [(4, 6)], seed=1)
    sequence = TrainSequence((1, 2, 3), *(torch.zeros(3),) * 3, None, None)
    groups = [TrainGroup(prompt, (sequence,) * 2)]
    lengths = [GroupLengths(prompt=len(prompt.token_ids), completions=(3, 3), grids=((1, 4, 6),))]
    [(name, work)] = policy.update_work(groups).items()
    assert name == "actor/model_tflops"
    assert work.value * 1e12 == pytest.approx(update_flops(dimensions_of(policy.model.config), lengths))
    policy.freeze_vision_tower()
    frozen = policy.update_work(groups)["actor/model_tflops"]
    assert frozen.value * 1e12 == pytest.approx(
        update_flops(dimensions_of(policy.model.config), lengths, trains_vision=False)
    )
    assert policy_of(tiny_model("internvl")).update_work([]) == {}


def test_a_critic_has_no_operations_of_a_head_over_the_vocabulary(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    policy, critic = policy_of(folder), make_value_model(folder)
    prompt = make_prompt(processors_of(folder), [], seed=1)
    groups = [TrainGroup(prompt, (TrainSequence((1, 2, 3), *(torch.zeros(3),) * 3, None, None),))]
    own, other = (each.update_work(groups)["actor/model_tflops"].value * 1e12 for each in (critic, policy))
    text = policy.model.config.get_text_config()
    assert other - own == pytest.approx(3 * 2 * 3 * text.hidden_size * (text.vocab_size - 1))


@pytest.mark.parametrize(
    ("mesh", "weight", "expected"),
    [(None, "cuda:1", "cuda:1"), (None, "cpu", "cpu"), ("cuda", "cuda:1", "cuda:1"), ("cuda", "cpu", "cuda")],
)
def test_a_shard_that_is_kept_on_the_cpu_is_used_on_the_device_of_its_mesh(
    mesh: str | None, weight: str, expected: str
) -> None:
    shard = SimpleNamespace(device=torch.device(weight))
    if mesh is not None:
        shard.device_mesh = SimpleNamespace(device_type=mesh)
    assert computing_device(shard) == torch.device(expected)  # type: ignore[arg-type]
