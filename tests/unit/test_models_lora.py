"""LoRA: what adapters change, what they leave alone, and that others read them as they were meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.oracle import load_hugging_face, make_group, make_prompt, padded_logprobs
from trigon.data.packing import by_group, pack_rollouts
from trigon.errors import ModelError
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.lora import (
    LoraSettings,
    adapter_config,
    adapter_tensors,
    adapters_of,
    adapters_off,
    add_lora,
    merge_names,
    merged_weight,
)
from trigon.models.policy import Policy, full_tensor
from trigon.models.positions import positions_of
from trigon.types import RolloutGroup

TinyModel = Callable[..., Path]
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen2"]
VISION_FAMILIES = FAMILIES[:2]


def settings(
    targets: str | tuple[str, ...] = "all-linear", exclude: str | tuple[str, ...] | None = None
) -> LoraSettings:
    return LoraSettings(rank=3, alpha=6, target_modules=targets, exclude_modules=exclude)


def make_policy(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Policy, Processors]:
    processors = load_processors(str(folder))
    model = load_model(str(folder), dtype=dtype, device="cpu")
    banned = processors.banned_token_ids
    return Policy(model, processors.family, temperature=1.0, banned_token_ids=banned), processors


def with_lora(
    folder: Path, wishes: LoraSettings | None = None, *, trained: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Policy, Processors]:
    """Return a policy with adapters, which have learnt something unless `trained` is False."""
    policy, processors = make_policy(folder, dtype)
    add_lora(policy.model, wishes or settings(), seed=0)
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
    positions = positions_of(processors.family, processors.hf_config)
    rows = pack_rollouts(make_groups(processors), max_tokens=1000, positions=positions)
    scores = by_group(rows, [policy(row.packed).logprobs for row in rows])
    return torch.cat([values for group in scores for values in group])


def gradients(policy: Policy, processors: Processors) -> dict[str, Tensor]:
    said = logprobs(policy, processors)
    (said * torch.linspace(-1, 1, len(said))).sum().backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}


def write_adapter(policy: Policy, folder: Path, base: Path) -> None:
    config = adapter_config(policy.model, base_model=str(base))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach() for name, tensor in adapter_tensors(policy.model)}, folder / "adapter_model.safetensors"
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fresh_adapters_change_nothing(tiny_model: TinyModel, model_type: str) -> None:
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
def test_merged_weights_make_a_plain_policy_say_the_same(tiny_model: TinyModel, model_type: str) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    adapted, _ = with_lora(tiny_model(model_type))
    with torch.no_grad():
        expected, base = logprobs(adapted, processors), logprobs(plain, processors)
        assert (expected - base).abs().max() > 0.01
        plain.load_named_weights(dict(adapted.named_weights()))
        torch.testing.assert_close(logprobs(plain, processors), expected, atol=1e-5, rtol=0)


def test_merging_is_what_it_says() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    lora_a, lora_b = torch.tensor([[1.0, -1.0]]), torch.tensor([[10.0], [20.0]])
    assert merged_weight(weight, lora_a, lora_b, 0.5).tolist() == [[6.0, -3.0], [13.0, -6.0]]
    # The sum lies a little above the middle of two bfloat16 numbers, 1 and 1 + 1/128. Rounded once, it goes up;
    # rounded before the addition as well, it would be the very middle, and go down.
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    merged = merged_weight(one, torch.full((1, 1), 1 / 256 + 2**-20), torch.ones(1, 1), 1.0)
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 1 + 1 / 128


@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_its_adapters_off_a_policy_is_its_own_reference(tiny_model: TinyModel, model_type: str) -> None:
    plain, processors = make_policy(tiny_model(model_type))
    adapted, _ = with_lora(tiny_model(model_type))
    trainable = [weight.requires_grad for weight in adapted.parameters()]
    with torch.no_grad():
        learnt, base = logprobs(adapted, processors), logprobs(plain, processors)
        with adapters_off(adapted):
            assert torch.equal(logprobs(adapted, processors), base)
            with adapters_off(adapted):
                pass
            assert torch.equal(logprobs(adapted, processors), base)
            assert [weight.requires_grad for weight in adapted.parameters()] == trainable
        assert torch.equal(logprobs(adapted, processors), learnt)
        with pytest.raises(KeyError), adapters_off(adapted):
            raise KeyError
        assert torch.equal(logprobs(adapted, processors), learnt)
    with pytest.raises(ModelError, match="no adapters to turn off"), adapters_off(plain):
        pass


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_alone_learn_and_checkpointing_their_layers_changes_nothing(
    tiny_model: TinyModel, model_type: str
) -> None:
    adapted, processors = with_lora(tiny_model(model_type))
    found = gradients(adapted, processors)
    assert {name.split(".")[-2] for name in found} == {"default"}
    assert found.keys() == {name for name, weight in adapted.model.named_parameters() if weight.requires_grad}
    # The tiny Qwen3-VL has two layers, and what is added behind the last one reaches no completion.
    reached = [name for name in found if ".deepstack_merger_list.1." not in name]
    assert all(found[name].abs().max() > 0 for name in reached)

    again, _ = with_lora(tiny_model(model_type))
    again.enable_gradient_checkpointing()
    recomputed = gradients(again, processors)
    assert recomputed.keys() == found.keys()
    assert all(torch.equal(recomputed[name], found[name]) for name in found)


@pytest.mark.parametrize("wishes", [settings(), settings(exclude=".*visual.*")], ids=["all", "without the tower"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_peft_loads_what_was_written_and_computes_the_same(
    tiny_model: TinyModel, tmp_path: Path, model_type: str, wishes: LoraSettings
) -> None:
    from peft import PeftModel

    adapted, processors = with_lora(tiny_model(model_type), wishes)
    write_adapter(adapted, tmp_path, tiny_model(model_type))
    theirs = PeftModel.from_pretrained(load_hugging_face(tiny_model(model_type), torch.float32), tmp_path)
    assert {name.replace(".default.", ".") for name, _ in theirs.named_parameters() if ".lora_" in name} == {
        name for name, _ in adapter_tensors(adapted.model)
    }
    with torch.no_grad():
        said = [
            padded_logprobs(
                theirs,
                group.prompt,
                [rollout.completion.token_ids for rollout in group.rollouts],
                temperature=1.0,
                banned_token_ids=processors.banned_token_ids,
            )[0]
            for group in make_groups(processors)
        ]
        torch.testing.assert_close(logprobs(adapted, processors), torch.cat(said), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_written_adapter_says_which_weights_of_the_base_checkpoint_it_changes(
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
    ("names", "complaint"),
    [
        (["base_model.model.model.norm.weight"], "norm.weight is not the name of an adapter's weight"),
        (["base_model.model.q_proj.lora_A.weight"], "lora_A.weight lacks its other half"),
    ],
)
def test_a_damaged_adapter_is_refused(tiny_vlm: Path, names: list[str], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        merge_names(names, load_processors(str(tiny_vlm)).family)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_checkpoint_of_a_run_with_lora_holds_its_adapters_alone_and_gives_them_back(
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
    with pytest.raises(ModelError, match="Merged weights cannot be loaded below LoRA's adapters"):
        target.load_named_weights(dict(source.named_weights()))


def test_a_checkpoint_of_a_run_without_lora_holds_every_weight_itself(tiny_vlm: Path) -> None:
    policy, _ = make_policy(tiny_vlm)
    saved = dict(policy.saved_tensors())
    assert list(saved) == [name for name, _ in policy.named_weights()]
    assert set(saved.values()) == set(policy.parameters())


def test_adapters_begin_the_same_whatever_was_drawn_before(tiny_vlm: Path) -> None:
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
            bound = first[name].shape[1] ** -0.5  # as a linear layer of that width begins
            assert 0.5 * bound < first[name].abs().max() <= bound
        else:
            assert torch.count_nonzero(first[name]) == 0


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_without_weights_gets_the_same_adapters_in_outline(tiny_model: TinyModel, model_type: str) -> None:
    policy, _ = with_lora(tiny_model(model_type), trained=False, dtype=torch.bfloat16)
    outline = load_model(str(tiny_model(model_type)), dtype=torch.bfloat16, device="meta")
    add_lora(outline, settings(), seed=0)

    def facts(model) -> dict[str, object]:
        return {name: (weight.shape, weight.dtype, weight.requires_grad) for name, weight in model.named_parameters()}

    assert facts(outline) == facts(policy.model)
    assert all(weight.is_meta for weight in outline.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_of_a_bfloat16_model_learn_in_float32(tiny_model: TinyModel, model_type: str) -> None:
    adapted, processors = with_lora(tiny_model(model_type), dtype=torch.bfloat16)
    dtypes = {(".lora_" in name, weight.dtype) for name, weight in adapted.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert {weight.dtype for _, weight in adapted.named_weights()} == {torch.bfloat16}
    exact, _ = with_lora(tiny_model(model_type))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(adapted, processors)
        said = logprobs(adapted, processors)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert 0 < (said - logprobs(exact, processors)).abs().max() < 0.1


def test_layers_are_chosen_and_excluded_by_names_or_by_a_regular_expression(tiny_vlm: Path) -> None:
    def adapted(targets: str | tuple[str, ...], exclude: str | tuple[str, ...] | None = None) -> set[str]:
        policy, _ = with_lora(tiny_vlm, settings(targets, exclude))
        return set(adapters_of(policy.model))

    everything = adapted("all-linear")
    language = {name for name in everything if name.startswith("model.language_model.")}
    tower = {name for name in everything if name.startswith("model.visual.")}
    assert everything == language | tower
    assert language
    assert tower
    assert {name.rpartition(".")[2] for name in language} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert adapted("all-linear", ".*visual.*") == language
    assert adapted(".*language_model.*") == language  # embeddings and norms are no linear layers
    queries = {name for name in language if name.endswith(".q_proj")}
    assert adapted("q_proj") == adapted(("q_proj",)) == adapted(r".*\.q_proj") == queries
    up = {name for name in everything if name.endswith(".up_proj")}
    assert adapted(" q_proj , mlp.up_proj") == adapted(("q_proj", "mlp.up_proj")) == queries | up
    assert adapted("q_proj,up_proj", "mlp.up_proj") == queries
    assert adapted("up_proj", r"model\.visual\..*") == up & language


def test_excluding_what_a_model_does_not_have_is_fine(tiny_model: TinyModel) -> None:
    policy, _ = with_lora(tiny_model("qwen2"), settings(exclude=".*visual.*"))
    everything, _ = with_lora(tiny_model("qwen2"))
    assert adapters_of(policy.model).keys() == adapters_of(everything.model).keys()


@pytest.mark.parametrize(
    ("wishes", "complaint"),
    [
        (settings("query_proj"), r"No linear layer fits 'query_proj'.*named .*q_proj, k_proj.* in full is model\."),
        (settings(("q_proj", "embed_tokens")), "No linear layer fits 'embed_tokens'"),
        (settings("all_linear"), "No linear layer fits 'all_linear'"),
        (settings(".*"), "choose the head"),
        (settings("lm_head"), "choose the head"),
        (settings("(q_proj"), "neither names separated by commas nor a regular expression: missing"),
        (settings(exclude="visual"), r"fits model\.visual, which is no linear layer.*write '\.\*visual\.\*'"),
        (settings("qkv", ".*visual.*"), r"are all excluded by exclude_modules, '\.\*visual\.\*'"),
        (LoraSettings(0, 64, "all-linear", None), "rank of at least 1, not 0"),
    ],
)
def test_settings_that_fit_nothing_are_refused_with_nothing_changed(
    tiny_vlm: Path, wishes: LoraSettings, complaint: str
) -> None:
    policy, _ = make_policy(tiny_vlm)
    with pytest.raises(ModelError, match=complaint):
        add_lora(policy.model, wishes, seed=0)
    assert not policy.has_adapters
    assert all(weight.requires_grad for weight in policy.parameters())


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_a_vision_tower_frozen_first_gets_no_adapters(tiny_model: TinyModel, model_type: str) -> None:
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


def test_a_model_without_adapters_has_none_to_describe(tiny_vlm: Path) -> None:
    policy, _ = make_policy(tiny_vlm)
    with pytest.raises(ModelError, match="no adapters to describe"):
        adapter_config(policy.model, base_model="somewhere")


def test_whole_returns_a_tensor_that_is_no_shard_itself() -> None:
    tensor = torch.zeros(2)
    assert full_tensor(tensor) is tensor


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_beside_experts_the_attention_alone_gets_adapters(tiny_model: TinyModel, model_type: str) -> None:
    """Both tiny models have a dense MLP as well: beside the experts, or instead of them in the first layer."""
    policy, _ = with_lora(tiny_model(model_type))
    adapted = {name.rpartition(".")[2] for name in adapters_of(policy.model)}
    assert adapted - {"shared_expert_gate"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not [name for name, weight in policy.model.named_parameters() if "experts" in name and weight.requires_grad]


@pytest.mark.parametrize("targets", [("gate_proj",), ("q_proj", "mlp.down_proj"), r".*\.up_proj", r".*_proj"], ids=str)
def test_adapters_for_experts_are_refused_with_nothing_changed(
    tiny_model: TinyModel, targets: str | tuple[str, ...]
) -> None:
    policy, _ = make_policy(tiny_model("qwen3_moe"))
    with pytest.raises(ModelError, match=r"fits MLPs of a 'qwen3_moe' model, whose experts are stacked"):
        add_lora(policy.model, settings(targets), seed=0)
    assert all(weight.requires_grad for weight in policy.model.parameters())
