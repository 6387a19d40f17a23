"""All attention kernels give a policy the same log-probabilities and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_packed_equals_padded import (
    ONE_ROW,
    TEMPERATURE,
    flat,
    gradients_of,
    largest_relative_error,
    make_groups,
    packed_gradients,
    packed_scores,
    padded_scores,
    some_loss,
)

from support.oracle import load_hugging_face
from support.varlen import TORCH_VERSIONS, stand_in, stand_in_flash_attn
from trigon.models.attention import use_group_attention
from trigon.models.kernels import Kernel
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy

TinyModel = Callable[..., Path]


def make_policy(folder: Path, kernel: Kernel, dtype: torch.dtype = torch.float64) -> tuple[Policy, Processors]:
    processors = load_processors(str(folder))
    model = load_model(str(folder), dtype=dtype, device="cpu", attention_kernel=kernel)
    model.set_experts_implementation("eager")  # the default has no float64 kernel
    policy = Policy(model, processors.family, temperature=TEMPERATURE, banned_token_ids=processors.banned_token_ids)
    return policy, processors


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which every call of a varlen kernel appends (query heads, key heads)."""
    calls: list[tuple[int, int]] = []

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append((query.shape[1], key.shape[1]))
        return TORCH_VERSIONS["2.13"](
            query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=enable_gqa
        )

    stand_in(monkeypatch, varlen_attn)
    return calls


@pytest.mark.extended(but=["qwen2_5_vl-varlen"])
@pytest.mark.parametrize("kernel", ["varlen", "flash"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3"])
def test_one_kernel_call_per_row_equals_the_padded_forward_in_float64(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, model_type: str, kernel: Kernel
) -> None:
    policy, processors = make_policy(tiny_model(model_type), kernel)
    oracle = load_hugging_face(tiny_model(model_type), torch.float64)
    stand_in_flash_attn(monkeypatch)
    groups = make_groups(processors)
    logprobs, entropy = packed_scores(policy, processors, groups, ONE_ROW)
    some_loss(flat(logprobs), flat(entropy)).backward()

    expected, expected_entropy = padded_scores(oracle, processors, groups)
    some_loss(expected, expected_entropy).backward()
    torch.testing.assert_close(flat(logprobs), expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(flat(entropy), expected_entropy, atol=1e-13, rtol=0)
    # transformers computes norms in float32 for every model dtype, which limits the precision of
    # gradients
    assert largest_relative_error(gradients_of(policy.model), gradients_of(oracle)) <= 1e-6


# Sliding windows in all layers and in one of two; image windows, with and without deepstack; MoE.
@pytest.mark.extended(but=["qwen2_5_vl"])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_varlen_equals_sdpa_with_and_without_gradient_checkpointing(
    tiny_model: TinyModel, count_calls: list[tuple[int, int]], model_type: str
) -> None:
    policy, processors = make_policy(tiny_model(model_type), "sdpa")
    groups = make_groups(processors)
    expected = packed_gradients(policy, processors, groups, ONE_ROW)
    expected_logprobs, _ = packed_scores(policy, processors, groups, ONE_ROW)
    assert count_calls == []

    policy, _ = make_policy(tiny_model(model_type), "varlen")
    layers = len(policy.layers())
    logprobs, _ = packed_scores(policy, processors, groups, ONE_ROW)
    assert len(count_calls) == layers  # one call per row in each decoder layer and vision block
    assert {keys < queries for queries, keys in count_calls} == (
        {True, False} if processors.family.has_vision else {True}
    )
    torch.testing.assert_close(flat(logprobs), flat(expected_logprobs), atol=1e-13, rtol=0)
    gradients = packed_gradients(policy, processors, groups, ONE_ROW)
    assert largest_relative_error(gradients, expected) <= 1e-6

    policy.enable_gradient_checkpointing()
    count_calls.clear()
    recomputed = packed_gradients(policy, processors, groups, ONE_ROW)
    assert len(count_calls) == 2 * layers
    assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)


def test_layers_with_and_without_a_sliding_window_are_computed_by_varlen(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        windows.append(window_size)
        return TORCH_VERSIONS["2.11"](query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)

    stand_in(monkeypatch, varlen_attn)
    policy, processors = make_policy(tiny_model("gemma3_text"), "sdpa")
    groups = make_groups(processors)
    expected, _ = packed_scores(policy, processors, groups, ONE_ROW)
    policy, _ = make_policy(tiny_model("gemma3_text"), "varlen")
    logprobs, _ = packed_scores(policy, processors, groups, ONE_ROW)
    torch.testing.assert_close(flat(logprobs), flat(expected), atol=1e-13, rtol=0)
    assert len(windows) == 2
    assert (-1, 0) in windows
    assert any(left >= 0 for left, _ in windows)


@pytest.mark.extended(but=["qwen3"])
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen2_5_vl", "qwen3"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_sdpa(tiny_model: TinyModel, model_type: str) -> None:
    policy, processors = make_policy(tiny_model(model_type), "sdpa")
    groups = make_groups(processors)
    with torch.no_grad():
        expected, _ = packed_scores(policy, processors, groups, ONE_ROW)
        policy, _ = make_policy(tiny_model(model_type), "flex")
        logprobs, _ = packed_scores(policy, processors, groups, ONE_ROW)
    torch.testing.assert_close(flat(logprobs), flat(expected), atol=1e-13, rtol=0)


def test_under_autocast_a_kernel_gets_inputs_of_the_autocast_dtype(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary embeddings of a float32 model return float32.

    Queries and keys pass through them, values do not.
    """
    dtypes: set[tuple[torch.dtype, ...]] = set()

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        dtypes.add((query.dtype, key.dtype, value.dtype))
        return TORCH_VERSIONS["2.13"](
            query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=enable_gqa
        )

    stand_in(monkeypatch, varlen_attn)
    policy, processors = make_policy(tiny_vlm, "varlen", torch.float32)
    exact, _ = make_policy(tiny_vlm, "sdpa", torch.float32)
    groups = make_groups(processors)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = packed_scores(policy, processors, groups, ONE_ROW)
        expected, _ = packed_scores(exact, processors, groups, ONE_ROW)
    assert dtypes == {(torch.bfloat16,) * 3}
    assert (flat(logprobs) - flat(expected)).abs().max() < 0.1


def test_the_configuration_of_a_model_names_its_attention_kernel(tiny_vlm: Path) -> None:
    policy, processors = make_policy(tiny_vlm, "varlen", torch.float32)
    family, model = processors.family, policy.model
    assert family.language_model(model).config._attn_implementation == "trigon_groups_varlen"
    assert family.vision_tower(model).config._attn_implementation == "trigon_flash_windows_varlen"
    use_group_attention(model, family)
    assert family.vision_tower(model).config._attn_implementation == "trigon_flash_windows"
    family.language_model(model).set_attn_implementation("sdpa")
    row = make_groups(processors)
    with pytest.raises(RuntimeError, match="'sdpa' attention cannot score packed rows"):
        packed_scores(policy, processors, row, ONE_ROW)
