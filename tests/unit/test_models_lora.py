"""LoRA: what adapters change, which layers get them, and that peft and merging agree with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.models import processors_of
from support.oracle import concatenated, load_hugging_face, make_group, make_prompt, packed_logprobs, padded_logprobs
from trigon.errors import ModelError
from trigon.models.load import Processors, load_model
from trigon.models.lora import (
    LoraConfig,
    adapter_config,
    adapter_tensors,
    adapters_of,
    adapters_off,
    add_lora,
    merge_names,
    merged_weight,
)
from trigon.models.policy import Policy, full_tensor
from trigon.types import RolloutGroup

TinyModel = Callable[..., Path]
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3_5"]
VISION_FAMILIES = FAMILIES[:2]


def settings(targets: str = "all-linear", exclude: str | None = None) -> LoraConfig:
    return LoraConfig(rank=3, alpha=6, target_modules=targets, exclude_modules=exclude)


def make_policy(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Policy, Processors]:
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=dtype, device="cpu")
    banned = processors.banned_token_ids
    return Policy(model, processors.family, temperature=1.0, banned_token_ids=banned), processors


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


def write_adapter(policy: Policy, folder: Path, base: Path) -> None:
    config = adapter_config(policy.model, base_model=str(base))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach() for name, tensor in adapter_tensors(policy.model)}, folder / "adapter_model.safetensors"
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_untrained_adapters_change_nothing(tiny_model: TinyModel, model_type: str) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    adapted, _ = with_lora(tiny_model(model_type), trained=False)
    assert type(adapted.model) is type(plain.model)
    assert adapted.has_adapters
    assert not plain.has_adapters
    assert torch.equal(logprobs(adapted, processors), logprobs(plain, processors))
    before = dict(plain.named_weights())
    after = dict(adapted.named_weights())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_merged_weights_give_the_same_logprobs_without_adapters(tiny_model: TinyModel, model_type: str) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    adapted, _ = with_lora(tiny_model(model_type))
    with torch.no_grad():
        expected, base = logprobs(adapted, processors), logprobs(plain, processors)
        assert (expected - base).abs().max() > 0.01
        plain.load_named_weights(dict(adapted.named_weights()))
        torch.testing.assert_close(logprobs(plain, processors), expected, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, None])
def test_merged_weights_are_rounded_once_to_the_dtype_that_is_read(
    tiny_model: TinyModel, base: torch.dtype, wanted: torch.dtype | None
) -> None:
    adapted, _ = with_lora(tiny_model("qwen2"), dtype=base)
    merged = dict(adapted.named_weights(wanted))
    with torch.no_grad():
        for name, adapter in adapters_of(adapted.model).items():
            weight = adapted.model.get_submodule(name).base_layer.weight
            exact = weight.float() + adapter.scaling * (adapter.lora_b @ adapter.lora_a)
            expected = exact.to(wanted or base)
            assert merged[f"{name}.weight"].dtype == expected.dtype
            torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=2**-8, atol=1e-6)
            if expected.dtype == torch.float32:
                assert not torch.equal(merged[f"{name}.weight"], expected.bfloat16().float())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_adapters_off_a_policy_computes_as_without_lora(tiny_model: TinyModel, model_type: str) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    adapted, _ = with_lora(tiny_model(model_type))
    trainable = [weight.requires_grad for weight in adapted.parameters()]
    with torch.no_grad():
        with_adapters, base = logprobs(adapted, processors), logprobs(plain, processors)
        with adapters_off(adapted):
            assert torch.equal(logprobs(adapted, processors), base)
            with adapters_off(adapted):
                pass
            assert torch.equal(logprobs(adapted, processors), base)
            assert [weight.requires_grad for weight in adapted.parameters()] == trainable
        assert torch.equal(logprobs(adapted, processors), with_adapters)
        with pytest.raises(KeyError), adapters_off(adapted):
            raise KeyError
        assert torch.equal(logprobs(adapted, processors), with_adapters)
    with pytest.raises(ModelError, match="no adapters to disable"), adapters_off(plain):
        pass


@pytest.mark.parametrize("model_type", FAMILIES)
def test_only_adapters_have_gradients_and_checkpointing_does_not_change_them(
    tiny_model: TinyModel, model_type: str
) -> None:
    adapted, processors = with_lora(tiny_model(model_type))
    found = gradients(adapted, processors)
    assert {name.split(".")[-2] for name in found} == {"default"}
    assert found.keys() == {name for name, weight in adapted.model.named_parameters() if weight.requires_grad}
    # The tiny Qwen3-VL has two layers; deepstack features of the last one do not affect
    # completions.
    with_effect = [name for name in found if ".deepstack_merger_list.1." not in name]
    assert all(found[name].abs().max() > 0 for name in with_effect)

    recomputing, _ = with_lora(tiny_model(model_type))
    recomputing.enable_gradient_checkpointing()
    recomputed = gradients(recomputing, processors)
    assert recomputed.keys() == found.keys()
    assert all(torch.equal(recomputed[name], found[name]) for name in found)


@pytest.mark.parametrize(
    "lora_settings", [settings(), settings(exclude=".*visual.*")], ids=["all", "without the tower"]
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_peft_loads_a_written_adapter_and_computes_the_same(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, lora_settings: LoraConfig
) -> None:
    from peft import PeftModel

    adapted, processors = with_lora(tiny_model(model_type), lora_settings)
    write_adapter(adapted, tmp_path, tiny_model(model_type))
    peft_model = PeftModel.from_pretrained(load_hugging_face(tiny_model(model_type), torch.float32), tmp_path)
    assert {name.replace(".default.", ".") for name, _ in peft_model.named_parameters() if ".lora_" in name} == {
        name for name, _ in adapter_tensors(adapted.model)
    }
    with torch.no_grad():
        padded = [
            padded_logprobs(
                peft_model,
                group.prompt,
                [rollout.completion.token_ids for rollout in group.rollouts],
                temperature=1.0,
                banned_token_ids=processors.banned_token_ids,
            )[0]
            for group in make_groups(processors)
        ]
        torch.testing.assert_close(logprobs(adapted, processors), torch.cat(padded), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["base_model.model.model.norm.weight"], "norm.weight is not the name of an adapter tensor"),
        (["base_model.model.q_proj.lora_A.weight"], "lora_A.weight has no counterpart"),
    ],
)
def test_invalid_names_of_adapter_tensors_are_an_error(tiny_vlm: Path, names: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        merge_names(names, processors_of(tiny_vlm).family)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_checkpoint_with_lora_contains_only_adapters_and_restores_them(
    tiny_model: TinyModel, model_type: str
) -> None:
    source, processors = with_lora(tiny_model(model_type))
    target, _ = with_lora(tiny_model(model_type), trained=False)
    saved = {name: tensor.detach().clone() for name, tensor in source.saved_tensors()}
    assert all(name.startswith("base_model.model.model.") and ".lora_" in name for name in saved)
    with torch.no_grad():
        for name, tensor in target.saved_tensors():
            tensor.copy_(saved[name])
        assert torch.equal(logprobs(target, processors), logprobs(source, processors))
    with pytest.raises(ModelError, match="Merged weights cannot be loaded into a model with LoRA adapters"):
        target.load_named_weights(dict(source.named_weights()))


def test_a_checkpoint_without_lora_contains_every_parameter(tiny_vlm: Path) -> None:
    policy, _ = make_policy(tiny_vlm)
    saved = dict(policy.saved_tensors())
    assert list(saved) == [name for name, _ in policy.named_weights()]
    assert set(saved.values()) == set(policy.parameters())


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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_on_the_meta_device_gets_the_same_adapters(tiny_model: TinyModel, model_type: str) -> None:
    policy, _ = with_lora(tiny_model(model_type), trained=False, dtype=torch.bfloat16)
    meta_model = load_model(str(tiny_model(model_type)), dtype=torch.bfloat16, device="meta")
    add_lora(meta_model, settings(), seed=0)

    def properties(model) -> dict[str, object]:
        return {name: (weight.shape, weight.dtype, weight.requires_grad) for name, weight in model.named_parameters()}

    assert properties(meta_model) == properties(policy.model)
    assert all(weight.is_meta for weight in meta_model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_of_a_bfloat16_model_are_in_float32(tiny_model: TinyModel, model_type: str) -> None:
    adapted, processors = with_lora(tiny_model(model_type), dtype=torch.bfloat16)
    dtypes = {(".lora_" in name, weight.dtype) for name, weight in adapted.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert {weight.dtype for _, weight in adapted.named_weights()} == {torch.bfloat16}
    exact, _ = with_lora(tiny_model(model_type))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(adapted, processors)
        scores = logprobs(adapted, processors)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert 0 < (scores - logprobs(exact, processors)).abs().max() < 0.1


def test_layers_are_selected_and_excluded_by_names_or_by_a_regular_expression(tiny_vlm: Path) -> None:
    def adapted(targets: str, exclude: str | None = None) -> set[str]:
        policy, _ = with_lora(tiny_vlm, settings(targets, exclude))
        return set(adapters_of(policy.model))

    all_linear = adapted("all-linear")
    language = {name for name in all_linear if name.startswith("model.language_model.")}
    tower = {name for name in all_linear if name.startswith("model.visual.")}
    assert all_linear == language | tower
    assert language
    assert tower
    assert {name.rpartition(".")[2] for name in language} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert adapted("all-linear", ".*visual.*") == language
    assert adapted(".*language_model.*") == language  # embeddings and norms are not linear layers
    queries = {name for name in language if name.endswith(".q_proj")}
    assert adapted("q_proj") == adapted(r".*\.q_proj") == queries
    up = {name for name in all_linear if name.endswith(".up_proj")}
    assert adapted(" q_proj , mlp.up_proj") == queries | up
    assert adapted("q_proj,up_proj", "mlp.up_proj") == queries
    assert adapted("up_proj", r"model\.visual\..*") == up & language


def test_layers_of_linear_attention_get_adapters(tiny_model: TinyModel) -> None:
    policy, _ = with_lora(tiny_model("qwen3_5"), settings(".*linear_attn.*"))
    names = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    assert {name.rpartition(".")[2] for name in adapters_of(policy.model)} == names


def test_excluding_modules_that_a_model_does_not_have_is_allowed(tiny_model: TinyModel) -> None:
    policy, _ = with_lora(tiny_model("qwen2"), settings(exclude=".*visual.*"))
    all_linear, _ = with_lora(tiny_model("qwen2"))
    assert adapters_of(policy.model).keys() == adapters_of(all_linear.model).keys()


@pytest.mark.parametrize(
    ("lora_settings", "message"),
    [
        (
            settings("query_proj"),
            r"No linear layer matches 'query_proj'.*named .*q_proj, k_proj.* a full name is model\.",
        ),
        (settings("q_proj, embed_tokens"), "No linear layer matches 'embed_tokens'"),
        (settings("all_linear"), "No linear layer matches 'all_linear'"),
        (settings(".*"), "select the head"),
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


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_a_vision_tower_frozen_before_gets_no_adapters(tiny_model: TinyModel, model_type: str) -> None:
    policy, processors = make_policy(tiny_model(model_type))
    policy.freeze_vision_tower()
    add_lora(policy.model, settings(), seed=0)
    adapted = adapters_of(policy.model)
    assert adapted
    assert not any("visual" in name for name in adapted)
    assert gradients(policy, processors).keys() == {
        f"{name}.lora_{half}.default.weight" for name in adapted for half in "AB"
    }
    with pytest.raises(ModelError, match="'qkv', are all frozen"):
        add_lora(_frozen_tower(tiny_model(model_type)), settings("qkv"), seed=0)


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_a_vision_tower_frozen_afterwards_keeps_its_adapters_at_zero(tiny_model: TinyModel, model_type: str) -> None:
    policy, processors = with_lora(tiny_model(model_type), trained=False)
    policy.freeze_vision_tower()
    with adapters_off(policy):
        pass
    found = gradients(policy, processors)
    assert found
    assert not any("visual" in name for name in found)


def _frozen_tower(folder: Path):
    policy, _ = make_policy(folder)
    policy.freeze_vision_tower()
    return policy.model


def test_a_model_without_adapters_has_no_adapter_config(tiny_vlm: Path) -> None:
    policy, _ = make_policy(tiny_vlm)
    with pytest.raises(ModelError, match="there is no adapter config"):
        adapter_config(policy.model, base_model="somewhere")


def test_full_tensor_returns_a_tensor_that_is_not_sharded_unchanged() -> None:
    tensor = torch.zeros(2)
    assert full_tensor(tensor) is tensor


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_in_an_moe_model_only_attention_gets_adapters(tiny_model: TinyModel, model_type: str) -> None:
    """Both tiny models have a dense MLP too: a shared expert, or the MLP of the first layer."""
    policy, _ = with_lora(tiny_model(model_type))
    adapted = {name.rpartition(".")[2] for name in adapters_of(policy.model)}
    assert adapted - {"shared_expert_gate"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name, weight in policy.model.named_parameters() if "experts" in name and weight.requires_grad]


@pytest.mark.parametrize("targets", ["gate_proj", "q_proj,mlp.down_proj", r".*\.up_proj", r".*_proj"], ids=str)
def test_adapters_for_experts_are_an_error_with_nothing_changed(tiny_model: TinyModel, targets: str) -> None:
    policy, _ = make_policy(tiny_model("qwen3_moe"))
    with pytest.raises(ModelError, match=r"matches MLPs of a 'qwen3_moe' model, whose experts are stacked"):
        add_lora(policy.model, settings(targets), seed=0)
    assert all(weight.requires_grad for weight in policy.model.parameters())
