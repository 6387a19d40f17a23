"""The cache of vision features: its limit, its metrics, and unchanged results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engines import make_engine, make_rollouts, to_train, weights_of
from support.models import policy_of, processors_of
from support.oracle import make_group, make_prompt, pack_groups
from trigon.metrics import values
from trigon.models.features import VisionFeatureCache
from trigon.models.policy import Policy
from trigon.types import PackedGroups

CPU = torch.device("cpu")
TOWERS = ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "gemma3", "gemma4", "mistral3"]


def test_beyond_the_limit_the_least_recently_used_are_evicted() -> None:
    cache, features = VisionFeatureCache(3 * 24), torch.zeros(2, 3)  # 24 bytes
    for name in "abc":
        cache.store(name, features)
    cache.lookup("a", CPU)
    cache.store("d", features)
    assert list(cache.lookup("abcd", CPU)) == ["a", "c", "d"]
    cache.store("large", torch.arange(18.0).view(6, 3))
    found = cache.lookup(["a", "c", "d", "large"], CPU)
    assert list(found) == ["large"]
    assert torch.equal(found["large"], torch.arange(18.0).view(6, 3))
    cache.store("larger than the limit", torch.zeros(7, 3))
    assert list(cache.lookup(["large", "larger than the limit"], CPU)) == ["large"]


# -- the policy ------------------------------------------------------------------------------------


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
    policy = policy_of(folder)
    policy.freeze_vision_tower()
    return policy


def row_of(folder: Path, *prompts: tuple[list[tuple[int, int]], int]) -> PackedGroups:
    """Pack groups into one row. prompts: the grids of the images, and a seed, for each prompt."""
    processors = processors_of(folder)
    groups = [make_group(make_prompt(processors, grids, seed=seed), [3, 4], seed=seed) for grids, seed in prompts]
    [row] = pack_groups(processors, groups)
    return row.packed


def logprobs_of(policy: Policy, packed: PackedGroups) -> Tensor:
    with torch.no_grad():
        logprobs: Tensor = policy(packed).logprobs
    return logprobs


@pytest.mark.extended(but=["qwen2_5_vl"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_an_image_is_encoded_once_and_its_features_do_not_depend_on_the_rest_of_its_row(
    tiny_model, model_type: str
) -> None:
    folder = tiny_model(model_type)
    first, second = ([(4, 6), (4, 4)], 1), ([(4, 4)], 2)
    policy = open_policy(folder)
    uncached = logprobs_of(policy, row_of(folder, first, second))
    cache = VisionFeatureCache(2**20)
    policy.use_feature_cache(cache, all_reduce_max=int)
    with tower_runs(policy) as runs:
        cached = logprobs_of(policy, row_of(folder, first, second))
        assert len(runs) == 3
        assert torch.equal(logprobs_of(policy, row_of(folder, first, second)), cached)
        alone = logprobs_of(policy, row_of(folder, second))
        assert len(runs) == 3
        logprobs_of(policy, row_of(folder, second, ([(4, 4)], 3)))
        assert len(runs) == 4
    assert cache.pop_metrics() == (5, 9)
    torch.testing.assert_close(cached, uncached, rtol=1e-5, atol=2e-5)

    policy.clear_features()
    assert torch.equal(logprobs_of(policy, row_of(folder, second)), alone)


def test_an_image_of_two_groups_of_a_row_is_encoded_once_but_never_without_a_hash(tiny_vlm) -> None:
    policy = open_policy(tiny_vlm)
    packed = row_of(tiny_vlm, ([(4, 6)], 1), ([(4, 6)], 1))
    expected = logprobs_of(policy, packed)
    without_hashes = replace(packed, visions=tuple(replace(vision, hashes=()) for vision in packed.visions))
    policy.use_feature_cache(VisionFeatureCache(0), all_reduce_max=int)
    for row, num_runs in ((packed, 1), (without_hashes, 2), (without_hashes, 2)):
        with tower_runs(policy) as runs:
            torch.testing.assert_close(logprobs_of(policy, row), expected, rtol=1e-5, atol=2e-5)
        assert len(runs) == num_runs


def test_the_tower_runs_as_often_as_on_the_rank_with_the_most_images_to_encode(tiny_vlm) -> None:
    policy = open_policy(tiny_vlm)
    packed, text = row_of(tiny_vlm, ([(4, 4)], 1)), row_of(tiny_vlm, ([], 2))
    expected, expected_of_text = logprobs_of(policy, packed), logprobs_of(policy, text)
    reduced: list[int] = []

    def all_reduce_max(number: int) -> int:
        reduced.append(number)
        return 3

    policy.use_feature_cache(VisionFeatureCache(2**20), all_reduce_max=all_reduce_max)
    for row, expected_logprobs in ((packed, expected), (packed, expected), (text, expected_of_text)):
        with tower_runs(policy) as runs, torch.no_grad():
            torch.testing.assert_close(
                policy(row, run_dummy_vision=True).logprobs, expected_logprobs, rtol=1e-5, atol=2e-5
            )
        assert len(runs) == 3
    assert reduced == [1, 0, 0]
    with tower_runs(policy) as runs:
        logprobs_of(policy, text)
    assert runs == []


# -- the engine ------------------------------------------------------------------------------------


def concatenated(logprobs: list[list[Tensor]]) -> Tensor:
    return torch.cat([tokens for group in logprobs for tokens in group])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model_type", "checkpointing"), [("qwen2_5_vl", False), ("qwen3_vl", True), ("internvl", True)]
)
def test_runs_with_a_cache_without_one_and_resumed_learn_bit_for_bit_the_same(
    tiny_model, tmp_path, model_type: str, checkpointing: bool
) -> None:
    folder = tiny_model(model_type)
    epochs = [make_rollouts(folder, seed=seed) for seed in (0, 20, 0)]
    options = {"freeze": True, "checkpointing": checkpointing, "max_tokens": 60}
    caching = make_engine(folder, **options)
    uncached_engine = make_engine(folder, vision_cache_bytes=0, **options)
    fractions = []
    for number, rollouts in enumerate(epochs):
        if number == 2:
            caching.save_state(tmp_path, model_only=False)()
            resumed = make_engine(folder, **options)
            resumed.load_state(tmp_path)
        cached, uncached = (concatenated(engine.logprobs(rollouts)) for engine in (caching, uncached_engine))
        assert torch.equal(cached, uncached)
        metrics, uncached_metrics = (values(engine.step(to_train(rollouts))) for engine in (caching, uncached_engine))
        fractions.append(metrics.pop("actor/vision_cached_fraction"))
        assert uncached_metrics.pop("actor/vision_cached_fraction") == 0.0
        assert metrics == uncached_metrics
    assert fractions == [0.5, 0.5, 1.0]
    again = values(resumed.step(to_train(epochs[2])))
    assert again.pop("actor/vision_cached_fraction") == 0.0
    assert again == metrics
    weights = [weights_of(engine) for engine in (caching, uncached_engine, resumed)]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])


def test_an_update_returns_the_log_probabilities_and_entropies_it_computed_and_changes_no_number(tiny_vlm) -> None:
    rollouts = make_rollouts(tiny_vlm)
    # Rows too small for a group, so that its completions are in several of them.
    recording, plain = (make_engine(tiny_vlm, freeze=True, max_tokens=60) for _ in range(2))
    expected = plain.logprobs(rollouts)
    recording.logprobs(rollouts)
    groups = to_train(rollouts)
    groups[1] = replace(
        groups[1],
        sequences=tuple(replace(each, advantages=torch.zeros_like(each.advantages)) for each in groups[1].sequences),
    )
    outputs = dict.fromkeys((1, 2))
    metrics = recording.step(groups, outputs)
    assert outputs[1] is None  # it has no gradient, and so no pass
    assert list(outputs) == [1, 2]
    for each, logprobs in zip(outputs[2], expected[2], strict=True):
        torch.testing.assert_close(each.logprobs, logprobs, atol=1e-5, rtol=0)
        assert each.entropy.shape == logprobs.shape
        assert not each.entropy.requires_grad
        assert bool((each.entropy > 0).all())
    plain_metrics = plain.step(groups)
    assert values(metrics) == values(plain_metrics)
    weights = [weights_of(engine) for engine in (recording, plain)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
