"""LoRA: what adapters change, which layers get them, and that peft and merging agree with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.models import policy_of, processors_of
from support.oracle import concatenated, make_group, make_prompt, packed_logprobs
from trigon.errors import ModelError
from trigon.models.load import Processors, load_model
from trigon.models.lora import (
    LoraConfig,
    adapter_tensors,
    adapters_of,
    adapters_off,
    add_lora,
    merge_names,
    merged_weight,
)
from trigon.models.policy import Policy
from trigon.types import RolloutGroup

TinyModel = Callable[..., Path]
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3_5", "gemma3", "gemma4"]
VISION_FAMILIES = FAMILIES[:2]


def settings(targets: str = "all-linear", exclude: str | None = None) -> LoraConfig:
    return LoraConfig(rank=3, alpha=6, target_modules=targets, exclude_modules=exclude)


def make_policy(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Policy, Processors]:
    return policy_of(folder, dtype=dtype), processors_of(folder)


def with_lora(
    folder: Path, lora_settings: LoraConfig | None = None, *, trained: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Policy, Processors]:
    """Return a policy with adapters, whose B is random if trained, else zero as initialized."""
    policy, processors = make_policy(folder, dtype)
    add_lora(policy.model, lora_settings or settings(), seed=0)
    if trained:
        generator = torch.Generator().manual_seed(7)
        for adapter in adapters_of(policy.model).values():
            torch.nn.init.normal_(adapter.lora_b, std=0.1, generator=generator)
    return policy, processors


def make_groups(processors: Processors) -> list[RolloutGroup]:
    grids = [(4, 6)] if processors.family.has_vision else []
    return [
        make_group(make_prompt(processors, grids, seed=1), [3, 5], seed=11),
        make_group(make_prompt(processors, [], seed=2), [4, 1], seed=12),
    ]


def logprobs(policy: Policy, processors: Processors) -> Tensor:
    return concatenated(packed_logprobs(policy, processors, make_groups(processors)))


def gradients(policy: Policy, processors: Processors) -> dict[str, Tensor]:
    scores = logprobs(policy, processors)
    (scores * torch.linspace(-1, 1, len(scores))).sum().backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}


@pytest.mark.extended(but=["qwen2_5_vl"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_change_nothing_untrained_or_off_and_equal_merged_weights(
    tiny_model: TinyModel, model_type: str
) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    untrained, _ = with_lora(tiny_model(model_type), trained=False)
    adapted, _ = with_lora(tiny_model(model_type))
    assert (adapted.has_adapters, plain.has_adapters) == (True, False)
    with torch.no_grad():
        base, trained = logprobs(plain, processors), logprobs(adapted, processors)
        assert (trained - base).abs().max() > 0.01
        assert torch.equal(logprobs(untrained, processors), base)
        before, after = dict(plain.named_weights()), dict(untrained.named_weights())
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        trainable = [weight.requires_grad for weight in adapted.parameters()]
        with adapters_off(adapted):
            with adapters_off(adapted):
                pass
            assert torch.equal(logprobs(adapted, processors), base)
            assert [weight.requires_grad for weight in adapted.parameters()] == trainable
        with pytest.raises(KeyError), adapters_off(adapted):
            raise KeyError
        assert torch.equal(logprobs(adapted, processors), trained)
        with pytest.raises(ModelError, match="no adapters to disable"), adapters_off(plain):
            pass
        plain.load_named_weights(dict(adapted.named_weights()))
        torch.testing.assert_close(logprobs(plain, processors), trained, atol=1e-5, rtol=0)


def test_merged_weight_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    lora_a, lora_b = torch.tensor([[1.0, -1.0]]), torch.tensor([[10.0], [20.0]])
    assert merged_weight(weight, lora_a, lora_b, 0.5).tolist() == [[6.0, -3.0], [13.0, -6.0]]
    # The sum is slightly above the midpoint of two bfloat16 numbers, 1 and 1 + 1/128. Rounded once,
    # it is rounded up; if the product were rounded first, the sum would be the midpoint and rounded
    # down.
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    merged = merged_weight(one, torch.full((1, 1), 1 / 256 + 2**-20), torch.ones(1, 1), 1.0)
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1 + 1 / 128


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_merge_names_maps_adapter_tensors_to_the_weights_that_they_change(
    tiny_model: TinyModel, model_type: str
) -> None:
    adapted, processors = with_lora(tiny_model(model_type))
    base = load_file(tiny_model(model_type) / "model.safetensors")
    halves = dict(adapter_tensors(adapted.model))
    pairs = merge_names(halves, processors.family)
    assert len(pairs) == len(adapters_of(adapted.model)) == len(halves) / 2
    for name, weight in adapted.named_weights():
        merged = base[name]
        if name in pairs:
            lora_a, lora_b = (halves[half] for half in pairs[name])
            merged = merged_weight(merged, lora_a, lora_b, 6 / 3)
        assert torch.equal(merged, weight), name
    with pytest.raises(ModelError, match=r"norm\.weight is not the name of an adapter tensor"):
        merge_names(["base_model.model.model.norm.weight"], processors.family)
    with pytest.raises(ModelError, match=r"lora_A\.weight has no counterpart"):
        merge_names(["base_model.model.q_proj.lora_A.weight"], processors.family)


def test_adapters_are_initialized_from_their_seed_alone(tiny_vlm: Path) -> None:
    def adapters(seed: int) -> dict[str, Tensor]:
        policy, _ = make_policy(tiny_vlm)
        before = torch.get_rng_state()
        add_lora(policy.model, settings(), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return dict(policy.saved_tensors())

    torch.manual_seed(1)
    first = adapters(seed=3)
    torch.manual_seed(2)
    again, other = adapters(seed=3), adapters(seed=4)
    assert first.keys() == again.keys() == other.keys()
    for name in first:
        assert torch.equal(first[name], again[name])
        if name.endswith("lora_A.weight"):
            assert not torch.equal(first[name], other[name])
            bound = first[name].shape[1] ** -0.5  # as torch initializes a linear layer of this width
            assert 0.5 * bound < first[name].abs().max() <= bound
        else:
            assert torch.count_nonzero(first[name]) == 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5"])
def test_adapters_of_a_bfloat16_model_are_in_float32_also_on_the_meta_device(
    tiny_model: TinyModel, model_type: str
) -> None:
    adapted, _ = with_lora(tiny_model(model_type), dtype=torch.bfloat16)
    meta_model = load_model(str(tiny_model(model_type)), dtype=torch.bfloat16, device="meta")
    add_lora(meta_model, settings(), seed=0)

    def properties(model) -> dict[str, object]:
        return {name: (weight.shape, weight.dtype, weight.requires_grad) for name, weight in model.named_parameters()}

    assert properties(meta_model) == properties(adapted.model)
    assert all(weight.is_meta for weight in meta_model.parameters())
    dtypes = {(".lora_" in name, weight.dtype) for name, weight in adapted.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert {weight.dtype for _, weight in adapted.named_weights()} == {torch.bfloat16}


def test_layers_are_selected_and_excluded_by_names_or_by_a_regular_expression(tiny_model: TinyModel) -> None:
    def adapted(targets: str, exclude: str | None = None, *, family: str = "qwen2_5_vl") -> set[str]:
        policy, _ = with_lora(tiny_model(family), settings(targets, exclude))
        return set(adapters_of(policy.model))

    all_linear = adapted("all-linear")
    language = {name for name in all_linear if name.startswith("model.language_model.")}
    tower = {name for name in all_linear if name.startswith("model.visual.")}
    assert all_linear == language | tower
    assert tower
    projections = {name.rpartition(".")[2] for name in language}
    assert projections == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted("all-linear", ".*visual.*") == language
    assert adapted(".*language_model.*") == language  # embeddings and norms are not linear layers
    queries = {name for name in language if name.endswith(".q_proj")}
    assert adapted("q_proj") == adapted(r".*\.q_proj") == queries
    up = {name for name in all_linear if name.endswith(".up_proj")}
    assert adapted(" q_proj , mlp.up_proj") == queries | up
    assert adapted("q_proj,up_proj", "mlp.up_proj") == queries
    assert adapted("up_proj", r"model\.visual\..*") == up & language
    assert adapted("all-linear", ".*visual.*", family="qwen2") == adapted("all-linear", family="qwen2")
    without_tower = adapted("all-linear", ".*(vision_tower|multi_modal_projector).*", family="internvl")
    assert without_tower
    assert all(name.startswith("model.language_model.") for name in without_tower)
    linear_attention = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    assert {name.rpartition(".")[2] for name in adapted(".*linear_attn.*", family="qwen3_5")} == linear_attention


@pytest.mark.parametrize(
    ("lora_settings", "message"),
    [
        (
            settings("query_proj"),
            r"No linear layer matches 'query_proj'.*named .*q_proj, k_proj.* a full name is model\.",
        ),
        (settings("q_proj, embed_tokens"), "No linear layer matches 'embed_tokens'"),
        (settings("lm_head"), "select the head"),
        (settings("(q_proj"), "neither names separated by commas nor a regular expression: missing"),
        (settings(exclude="visual"), r"matches model\.visual, which is not a linear layer.*write '\.\*visual\.\*'"),
        (settings("qkv", ".*visual.*"), r"are all excluded by exclude_modules, '\.\*visual\.\*'"),
        (LoraConfig(rank=0, alpha=64), "rank of at least 1, not 0"),
    ],
)
def test_settings_that_match_no_layer_are_an_error_with_nothing_changed(
    tiny_vlm: Path, lora_settings: LoraConfig, message: str
) -> None:
    policy, _ = make_policy(tiny_vlm)
    with pytest.raises(ModelError, match=message):
        add_lora(policy.model, lora_settings, seed=0)
    assert not policy.has_adapters
    assert all(weight.requires_grad for weight in policy.parameters())


def test_an_exclusion_that_matches_nothing_names_the_vision_tower_of_the_model(tiny_model: TinyModel) -> None:
    policy, _ = make_policy(tiny_model("internvl"))
    remedy = r"'\.\*\(vision_tower\|multi_modal_projector\)\.\*'.*freeze_vision_tower=true"
    with pytest.raises(ModelError, match=rf"'\.\*visual\.\*'.*matches nothing in a 'internvl' model.*{remedy}"):
        add_lora(policy.model, settings(exclude=".*visual.*"), seed=0)
    assert not policy.has_adapters


@pytest.mark.parametrize("before", [True, False], ids=["before", "afterwards"])
@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_a_frozen_vision_tower_is_not_trained_by_adapters(tiny_model: TinyModel, model_type: str, before: bool) -> None:
    policy, processors = make_policy(tiny_model(model_type))
    if before:
        policy.freeze_vision_tower()
        with pytest.raises(ModelError, match="'qkv', are all frozen"):
            add_lora(policy.model, settings("qkv"), seed=0)
    add_lora(policy.model, settings(), seed=0)
    assert any("visual" in name for name in adapters_of(policy.model)) != before
    policy.freeze_vision_tower()
    with adapters_off(policy):
        pass
    found = gradients(policy, processors)
    assert found
    assert not any("visual" in name for name in found)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_in_an_moe_model_only_attention_gets_adapters(tiny_model: TinyModel, model_type: str) -> None:
    """Both tiny models have a dense MLP too: a shared expert with a gate, or the first layer's."""
    policy, _ = with_lora(tiny_model(model_type))
    adapted = {name.rpartition(".")[2] for name in adapters_of(policy.model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name, weight in policy.model.named_parameters() if "experts" in name and weight.requires_grad]
    if model_type == "qwen3_moe":
        for targets in ("gate_proj", "q_proj,mlp.down_proj", r".*\.up_proj", r".*_proj"):
            policy, _ = make_policy(tiny_model(model_type))
            with pytest.raises(ModelError, match=r"matches MLPs of a 'qwen3_moe' model, whose experts are stacked"):
                add_lora(policy.model, settings(targets), seed=0)
            assert all(weight.requires_grad for weight in policy.model.parameters())
