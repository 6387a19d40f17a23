"""What a frozen vision tower made of images: remembered within its limit, and the same bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engines import make_engine, make_rollouts, to_train, weights_of
from support.oracle import make_group, make_prompt
from trigon.data.packing import pack_rollouts
from trigon.metrics import values
from trigon.models.features import FeatureMemory, Features
from trigon.models.load import load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import positions_of
from trigon.types import PackedGroups

CPU = torch.device("cpu")
TOWERS = ["qwen2_5_vl", "qwen3_vl", "internvl"]


def features(value: float, tokens: int = 2, layers: int = 0) -> Features:
    """Of 12 bytes a token and layer."""
    return Features(torch.full((tokens, 3), value), tuple(torch.full((tokens, 3), -value) for _ in range(layers)))


# -- the memory ---------------------------------------------------------------------------------------------------


def test_what_is_remembered_comes_back_whole() -> None:
    memory = FeatureMemory(1000)
    memory.remember("a", features(1.0, layers=2))
    found = memory.recall(["a", "b"], CPU)
    assert list(found) == ["a"]
    assert found["a"].tokens.tolist() == [[1.0] * 3] * 2
    assert [part.tolist() for part in found["a"].layered] == [[[-1.0] * 3] * 2] * 2


def test_beyond_the_limit_those_used_longest_ago_are_forgotten() -> None:
    memory = FeatureMemory(3 * 24)
    for name in "abc":
        memory.remember(name, features(0.0))
    memory.recall("a", CPU)
    memory.remember("d", features(0.0))
    assert list(memory.recall("abcd", CPU)) == ["a", "c", "d"]
    memory.remember("large", features(0.0, layers=2))
    assert list(memory.recall(["a", "c", "d", "large"], CPU)) == ["large"]


def test_what_is_larger_than_the_limit_is_not_kept_and_costs_nothing_else() -> None:
    memory = FeatureMemory(24)
    memory.remember("a", features(0.0))
    memory.remember("large", features(0.0, tokens=3))
    assert list(memory.recall(["a", "large"], CPU)) == ["a"]
    nothing = FeatureMemory(0)
    nothing.remember("a", features(0.0))
    assert nothing.recall("a", CPU) == {}


def test_it_holds_a_copy() -> None:
    memory, mine = FeatureMemory(100), features(1.0)
    memory.remember("a", mine)
    mine.tokens.zero_()
    assert memory.recall("a", CPU)["a"].tokens.sum() == 6.0


def test_it_counts_what_was_asked_for_since_it_last_told() -> None:
    memory = FeatureMemory(100)
    memory.remember("a", features(0.0))
    memory.recall(["a", "b", "a"], CPU)
    memory.recall(["c"], CPU)
    assert memory.pop_metrics() == (2, 4)
    assert memory.pop_metrics() == (0, 0)
    memory.forget()
    assert memory.recall(["a"], CPU) == {}


# -- the policy ---------------------------------------------------------------------------------------------------


@contextmanager
def tower_runs(policy: Policy) -> Iterator[list[int]]:
    """Count the runs of the vision tower: one entry each."""
    runs: list[int] = []
    tower: nn.Module = policy.family.vision_tower(policy.model)
    hook = tower.register_forward_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        hook.remove()


def open_policy(folder: Path) -> Policy:
    processors = load_processors(str(folder))
    policy = Policy(
        load_model(str(folder), dtype=torch.float32, device="cpu"),
        processors.family,
        temperature=1.0,
        banned_token_ids=processors.banned_token_ids,
    )
    policy.freeze_vision_tower()
    return policy


def row_of(folder: Path, *prompts: tuple[list[tuple[int, int]], int]) -> PackedGroups:
    """Pack groups whose prompts show images of such grids, drawn by such a seed, into one row."""
    processors = load_processors(str(folder))
    groups = [make_group(make_prompt(processors, grids, seed=seed), [3, 4], seed=seed) for grids, seed in prompts]
    positions = positions_of(processors.family, processors.hf_config)
    [row] = pack_rollouts(groups, max_tokens=10_000, positions=positions)
    return row.packed


def said(policy: Policy, packed: PackedGroups) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = policy(packed).logprobs
    return logprobs


@pytest.mark.parametrize("model_type", TOWERS)
def test_an_image_is_seen_once_and_by_itself_whatever_else_is_in_its_row(tiny_model, model_type: str) -> None:
    folder = tiny_model(model_type)
    first, second = ([(4, 6), (4, 4)], 1), ([(4, 4)], 2)
    policy = open_policy(folder)
    whole = said(policy, row_of(folder, first, second))
    memory = FeatureMemory(2**20)
    policy.remember_features(memory, most=int)
    with tower_runs(policy) as runs:
        apart = said(policy, row_of(folder, first, second))
        assert len(runs) == 3
        assert torch.equal(said(policy, row_of(folder, first, second)), apart)
        alone = said(policy, row_of(folder, second))
        assert len(runs) == 3
        said(policy, row_of(folder, second, ([(4, 4)], 3)))
        assert len(runs) == 4
    assert memory.pop_metrics() == (5, 9)
    torch.testing.assert_close(apart, whole, rtol=1e-5, atol=2e-5)

    policy.forget_features()
    assert torch.equal(said(policy, row_of(folder, second)), alone)


def test_two_groups_of_a_row_that_show_the_same_image_have_it_seen_once(tiny_vlm) -> None:
    policy = open_policy(tiny_vlm)
    packed = row_of(tiny_vlm, ([(4, 6)], 1), ([(4, 6)], 1))
    expected = said(policy, packed)
    policy.remember_features(FeatureMemory(0), most=int)
    with tower_runs(policy) as runs:
        torch.testing.assert_close(said(policy, packed), expected, rtol=1e-5, atol=2e-5)
    assert len(runs) == 1


def test_images_of_which_no_hash_is_known_are_not_taken_for_each_other(tiny_vlm) -> None:
    policy = open_policy(tiny_vlm)
    packed = row_of(tiny_vlm, ([(4, 4)], 1), ([(4, 4)], 2))
    expected = said(policy, packed)
    policy.remember_features(FeatureMemory(2**20), most=int)
    with tower_runs(policy) as runs:
        for _ in range(2):
            nameless = PackedGroups(
                packed.token_ids, packed.position_ids, packed.spans, packed.pixel_values, packed.grid_thw
            )
            torch.testing.assert_close(said(policy, nameless), expected, rtol=1e-5, atol=2e-5)
    assert len(runs) == 4


def test_the_tower_runs_as_often_as_on_the_rank_that_has_most_to_see(tiny_vlm) -> None:
    policy = open_policy(tiny_vlm)
    packed, text = row_of(tiny_vlm, ([(4, 4)], 1)), row_of(tiny_vlm, ([], 2))
    expected, of_text = said(policy, packed), said(policy, text)
    told: list[int] = []

    def most(number: int) -> int:
        told.append(number)
        return 3

    policy.remember_features(FeatureMemory(2**20), most=most)
    for row, says in ((packed, expected), (packed, expected), (text, of_text)):
        with tower_runs(policy) as runs, torch.no_grad():
            torch.testing.assert_close(policy(row, run_dummy_vision=True).logprobs, says, rtol=1e-5, atol=2e-5)
        assert len(runs) == 3
    assert told == [1, 0, 0]
    with tower_runs(policy) as runs:
        said(policy, text)
    assert runs == []


# -- the engine ---------------------------------------------------------------------------------------------------


def in_a_row(logprobs: list[list[Tensor]]) -> Tensor:
    return torch.cat([tokens for group in logprobs for tokens in group])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_a_run_that_remembers_one_that_does_not_and_one_that_is_resumed_learn_the_same(
    tiny_model, tmp_path, model_type: str, checkpointing: bool
) -> None:
    folder = tiny_model(model_type)
    epochs = [make_rollouts(folder, seed=seed) for seed in (0, 20, 0)]
    options = {"freeze": True, "checkpointing": checkpointing, "max_tokens": 60}
    remembering = make_engine(folder, **options)
    forgetful = make_engine(folder, vision_cache_bytes=0, **options)
    shares = []
    for number, rollouts in enumerate(epochs):
        if number == 2:
            remembering.save_state(tmp_path, model_only=False)()
            resumed = make_engine(folder, **options)
            resumed.load_state(tmp_path)
        ours, theirs = (in_a_row(engine.logprobs(rollouts)) for engine in (remembering, forgetful))
        assert torch.equal(ours, theirs)
        metrics, others = (values(engine.step(to_train(rollouts))) for engine in (remembering, forgetful))
        shares.append(metrics.pop("actor/vision_remembered"))
        assert others.pop("actor/vision_remembered") == 0.0
        assert metrics == others
    assert shares == [0.5, 0.5, 1.0]
    again = values(resumed.step(to_train(epochs[2])))
    assert again.pop("actor/vision_remembered") == 0.0
    assert again == metrics
    weights = [weights_of(engine) for engine in (remembering, forgetful, resumed)]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])


def test_with_lora_outside_the_tower_features_are_remembered_and_below_the_adapters_too(tiny_vlm) -> None:
    engine = make_engine(tiny_vlm, freeze=True, lora_rank=2)
    rollouts = make_rollouts(tiny_vlm)
    engine.logprobs(rollouts)
    engine.reference_without_adapters().logprobs(rollouts)
    metrics = values(engine.step(to_train(rollouts)))
    assert metrics["actor/vision_remembered"] == pytest.approx(2 / 3)


def test_a_tower_that_learns_remembers_nothing(tiny_vlm) -> None:
    for options in ({}, {"lora_rank": 2}):
        metrics = values(make_engine(tiny_vlm, **options).step(to_train(make_rollouts(tiny_vlm))))
        assert "actor/vision_remembered" not in metrics


def test_other_weights_are_not_answered_for_by_what_was_remembered(tiny_model, tmp_path) -> None:
    folder, other = tiny_model("qwen2_5_vl"), tiny_model("qwen2_5_vl", seed=1)
    rollouts = make_rollouts(folder)
    engine, saved = make_engine(folder, freeze=True), make_engine(other, freeze=True)
    engine.logprobs(rollouts)
    expected = in_a_row(saved.logprobs(rollouts))
    saved.save_state(tmp_path, model_only=False)()
    engine.load_state(tmp_path)
    assert torch.equal(in_a_row(engine.logprobs(rollouts)), expected)
