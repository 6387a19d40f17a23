"""Checksums of weights, and the comparison of vLLM's parameters with the trainer's tensors."""

import math
from collections import Counter

import pytest
import torch

from trigon.errors import ParityError
from trigon.rollout.vllm.weight_check import Checksum, RankSums, add, compare, read_sums, sum_values

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (0.02 * torch.randn(size, 64, generator=GENERATOR) for size in (128, 32, 32))
NORM = torch.ones(64) + 0.1 * torch.randn(64, generator=GENERATOR)


def checksum(tensor):
    return read_sums({"": (sum_values(tensor), tensor.numel())})[""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_float64(dtype):
    assert checksum(torch.tensor([[1.0, -2.0], [0.5, 0.0]])) == Checksum(-0.5, 5.25, 4)
    tensor = torch.randn(700, 301, generator=GENERATOR).to(dtype)  # more than one chunk
    assert math.isclose(checksum(tensor).total, math.fsum(tensor.double().flatten().tolist()), rel_tol=1e-12)
    squares = math.fsum((tensor.double() ** 2).flatten().tolist())
    assert math.isclose(checksum(tensor).squares, squares, rel_tol=1e-13)
    assert checksum(tensor).equals(checksum(tensor.T.contiguous()))


def test_fused_and_padded_tensors_have_the_sums_of_their_parts():
    parts = [checksum(tensor) for tensor in (Q, K, V)]
    assert checksum(torch.cat([Q, torch.zeros(5, 64), V, K])).equals(add((1, part) for part in parts))


@pytest.mark.parametrize("shape", [(8,), (1024, 1024)])
def test_one_value_that_differs_in_its_last_bit_is_found(shape):
    weights = 0.02 * torch.randn(shape, generator=GENERATOR)
    changed = weights.clone()
    index = changed.view(-1).abs().argmax()
    changed.view(-1)[index] = torch.nextafter(changed.view(-1)[index], torch.tensor(1.0))
    assert not checksum(changed).equals(checksum(weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_update_with_a_learning_rate_of_1e_6_is_found(dtype):
    weights = 0.02 * torch.randn(512, 512, generator=GENERATOR)
    update = 1e-6 * torch.randn(512, 512, generator=GENERATOR).sign()
    assert not checksum((weights + update).to(dtype)).equals(checksum(weights.to(dtype)))


def rank(tensors, parameters):
    """Return the sums of a rank.

    parameters: name -> (its values, the names of what was loaded into it, one for each place).
    """
    return RankSums(
        tensors={(name, "torch.float32"): checksum(tensor) for name, tensor in tensors.items()},
        sources={
            name: Counter((source, "torch.float32") for source in sources)
            for name, (_, sources) in parameters.items()
            if sources
        },
        parameters={name: checksum(values) for name, (values, _) in parameters.items()},
        not_taken=frozenset(tensors) - {source for _, sources in parameters.values() for source in sources},
    )


TENSORS = {"q": Q, "k": K, "v": V, "norm": NORM}
FUSED = ("q", "k", "v")


def shards(num_ranks, *, key_copies=1):
    """Return the sums of ranks that shard queries and hold each key and norm several times."""
    ranks = []
    for index in range(num_ranks):
        keys = num_ranks // key_copies
        parts = [Q.chunk(num_ranks)[index], K.chunk(keys)[index % keys], V.chunk(keys)[index % keys]]
        ranks.append(rank(TENSORS, {"qkv": (torch.cat(parts), FUSED), "norm": (NORM, ("norm",))}))
    return ranks


def test_keys_that_are_values_too_are_those_of_the_trainer():
    fused = torch.cat([Q, K, K])
    compare([rank({"q": Q, "k": K}, {"qkv": (fused, ("q", "k", "k"))})], version=3)
    with pytest.raises(ParityError, match="1 differ"):
        compare([rank({"q": Q, "k": K}, {"qkv": (torch.cat([Q, K, V]), ("q", "k", "k"))})], version=3)


@pytest.mark.parametrize(("num_ranks", "key_copies"), [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (8, 4)])
def test_fused_sharded_and_replicated_parameters_are_those_of_the_trainer(num_ranks, key_copies):
    compare(shards(num_ranks, key_copies=key_copies), version=3)


@pytest.mark.faults
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_stale_shard_of_one_rank_raises_with_the_parameter_and_what_to_do(num_ranks):
    ranks = shards(num_ranks)
    stale = torch.cat([Q.chunk(num_ranks)[-1] + 1e-6, K.chunk(num_ranks)[-1], V.chunk(num_ranks)[-1]])
    ranks[-1] = rank(TENSORS, {"qkv": (stale, FUSED), "norm": (NORM, ("norm",))})
    with pytest.raises(ParityError) as caught:
        compare(ranks, version=3)
    for part in ("policy version 3", "of 2 parameters, 1 differ (qkv has sum ", "worker.rollout.weight_check_freq=0"):
        assert part in str(caught.value)


def test_a_parameter_that_received_nothing_raises():
    with pytest.raises(ParityError, match=r"1 received nothing \(norm\)"):
        compare([rank(TENSORS, {"qkv": (torch.cat([Q, K, V]), FUSED), "norm": (NORM, ())})], version=3)


def test_a_tensor_for_which_vllm_has_no_place_raises_unless_another_rank_took_it():
    """vLLM passes over a bias that its config does not announce, without a word."""
    tensors, bias = {"norm": NORM}, {"norm": NORM, "q_proj.bias": Q[0]}
    loaded = {"norm": (NORM, ("norm",))}
    with pytest.raises(ParityError, match=r"none took 1 tensors \(q_proj\.bias\)"):
        compare([rank(bias, loaded), rank(bias, loaded)], version=3)
    compare([rank(tensors, loaded), rank(bias, loaded)], version=3)
