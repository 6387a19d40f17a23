"""Counts of operations, compared with the FlopCounterMode of torch and with counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_models_attention import dense_mask
from torch.utils.flop_counter import FlopCounterMode

from support.models import processors_of
from support.oracle import make_episode, make_group, make_prompt, pack_groups
from support.varlen import stand_in
from trigon.models.load import Processors, load_model
from trigon.models.policy import Policy
from trigon.models.sizes import GroupLengths, dimensions_of, forward_flops, peak_tflops, update_flops
from trigon.types import PackedGroups, Rollout, RolloutGroup, Score

TinyModel = Callable[..., Path]
GRIDS = [(6, 10), (4, 4)]  # neither is a multiple of a window of Qwen2.5-VL
COUNTED = [
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3", "qwen2_moe", "gemma3_text"),
]


def make_groups(processors: Processors) -> list[RolloutGroup]:
    grids = GRIDS if processors.family.has_vision else []
    return [
        make_group(make_prompt(processors, grids, seed=1), [3, 7, 7, 1], seed=11),
        make_group(make_prompt(processors, [], seed=2), [9, 30], seed=12),
    ]


def lengths_of(groups: list[RolloutGroup]) -> list[GroupLengths]:
    return [GroupLengths.of(group.prompt, [each.completion for each in group.rollouts]) for group in groups]


def packed(groups: list[RolloutGroup], processors: Processors) -> PackedGroups:
    [row] = pack_groups(processors, groups)
    return row.packed


def counted(compute: Callable[[], object]) -> tuple[int, int]:
    """Return what torch counts: (matrix products of linear layers, matrix products of attention).

    Attention is counted by its batched products; those of rotary embeddings are batched too, and
    are subtracted. torch does not count scaled_dot_product_attention on a CPU.
    """
    mode = FlopCounterMode(display=False)
    with mode:
        compute()
    counts = mode.get_flop_counts()
    rotary = sum(sum(by_op.values()) for module, by_op in counts.items() if module.endswith("rotary_emb"))
    by_op = {str(op): count for op, count in counts["Global"].items()}
    attention = sum(by_op.pop(op, 0) for op in ("aten.bmm", "aten.baddbmm"))
    return sum(by_op.values()), attention - rotary


def rectangles(processors: Processors, lengths: list[GroupLengths]) -> int:
    """Return the operations of attention over segments without causal masks and sliding windows."""
    config = processors.hf_config
    text = config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    pairs = sum(group.prompt**2 + sum(own * (group.prompt + own) for own in group.completions) for group in lengths)
    return 4 * text.num_hidden_layers * width * pairs


def open_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Processors, Policy]:
    """Return a policy whose attention and experts torch counts."""
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=torch.float32, device="cpu", attention_kernel="varlen")
    model.set_experts_implementation("eager")
    stand_in(monkeypatch)
    return processors, Policy(model, processors.family, temperature=1.0, banned_token_ids=())


@pytest.mark.extended(but=["gemma3_text"])
@pytest.mark.parametrize("model_type", COUNTED)
def test_forward_and_update_flops_equal_those_that_torch_counts(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Exactly, except for attention: torch counts masked pairs too."""
    processors, policy = open_pass(tiny_model(model_type), monkeypatch)
    groups = make_groups(processors)
    row, lengths = packed(groups, processors), lengths_of(groups)

    flops = forward_flops(dimensions_of(processors.hf_config), lengths)
    of_images = _attention_of_images(processors, lengths)
    with torch.no_grad():
        products, attention = counted(lambda: policy(row))
    assert products == flops.linear + flops.head + flops.vision + flops.patch_embedding - of_images
    assert attention == rectangles(processors, lengths) + of_images

    def update() -> None:
        policy(row).logprobs.sum().backward()

    both, attention = counted(update)
    # For the head (logprobs.py) torch counts the logits that the backward recomputes, but not the
    # gradient of the weight, which is accumulated in place.
    assert both == update_flops(dimensions_of(processors.hf_config), lengths) - 3 * (flops.attention + of_images)
    assert attention == 3 * (rectangles(processors, lengths) + of_images)

    if processors.family.has_vision:
        policy.freeze_vision_tower()
        both, _ = counted(update)
        frozen = update_flops(dimensions_of(processors.hf_config), lengths, trains_vision=False)
        assert both == frozen - 3 * flops.attention - of_images


@pytest.mark.extended(but=["qwen3_5"])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_linear_attention_counts_its_matrices_its_convolution_and_its_states(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    processors, policy = open_pass(tiny_model(model_type), monkeypatch)
    groups = make_groups(processors)
    row, lengths = packed(groups, processors), lengths_of(groups)
    flops = forward_flops(dimensions_of(processors.hf_config), lengths)
    tokens = len(row.token_ids)

    mode = FlopCounterMode(display=False)
    with torch.no_grad(), mode:
        policy(row)
    found = {str(op): count for op, count in mode.get_flop_counts()["Global"].items()}
    matrices = sum(found[op] for op in ("aten.mm", "aten.addmm") if op in found)
    attention_of_images = 4 * 48 * 3 * (60**2 + 16**2) if processors.family.has_vision else 0
    assert matrices == flops.linear + flops.head + flops.vision + flops.patch_embedding - attention_of_images
    # 2 x 16 queries and as many keys, 4 x 24 values; a layer reads 4 tokens, three before each
    # prompt and each completion.
    kinds, channels, segments = processors.hf_config.get_text_config().layer_types, 2 * 32 + 96, 8
    linear, full = kinds.count("linear_attention"), kinds.count("full_attention")
    assert found["aten.convolution"] == linear * 2 * 4 * channels * (tokens + 3 * segments - 3)
    pairs = int(dense_mask(row.spans, None).sum())
    recurrence = tokens * (2 * 4 * channels + 6 * 4 * 16 * 24)
    assert flops.attention == full * 4 * pairs * 4 * 32 + linear * recurrence


def test_a_token_of_linear_attention_needs_three_products_with_the_state() -> None:
    state, key, query = torch.zeros(4, 16, 24), torch.zeros(4, 16, 1), torch.zeros(4, 16, 1)
    mode = FlopCounterMode(display=False)
    with mode:
        written = -(state.mT @ key)
        state = state + key @ written.mT
        state.mT @ query
    assert mode.get_total_flops() == 6 * state.numel()


def test_what_completions_observe_is_counted_without_logits_and_with_its_images(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors, policy = open_pass(tiny_model("qwen3_vl"), monkeypatch)
    prompt = make_prompt(processors, [(6, 10)], seed=1)
    score = Score(0.0, {}, "ok", "")
    episodes = [make_episode(processors, each, seed=2) for each in ([(None, 3), ([(4, 6)], 2)], [([], 4)])]
    lengths = GroupLengths.of(prompt, episodes)
    assert lengths.observed_grids == ((1, 4, 6),)
    assert lengths.observed == sum(map(len, (each.token_ids for each in episodes))) - 9
    row = packed([RolloutGroup(prompt, tuple(Rollout(each, score) for each in episodes))], processors)
    flops = forward_flops(dimensions_of(processors.hf_config), [lengths])
    with torch.no_grad():
        products, attention = counted(lambda: policy(row))
    of_parts = flops.linear + flops.head + flops.vision + flops.patch_embedding
    assert products + attention == of_parts + rectangles(processors, [lengths])


def _attention_of_images(processors: Processors, lengths: list[GroupLengths]) -> int:
    """Return the operations of attention in the vision tower for GRIDS, counted by hand.

    Full attention is within an image; windows of Qwen2.5-VL are 2 x 2 tokens.
    """
    if not processors.family.has_vision:
        return 0
    vision = processors.hf_config.vision_config
    width = vision.embed_dim if processors.family.model_type == "qwen2_vl" else vision.hidden_size
    full = 60**2 + 16**2
    if processors.family.model_type != "qwen2_5_vl":
        return 4 * width * 3 * full
    # 3 x 5 tokens of 4 patches: 2 + 1 high, 2 + 2 + 1 wide; 2 x 2 tokens are one window.
    windows = 2 * 16**2 + 8**2 + 2 * 8**2 + 4**2 + 16**2
    return 4 * width * (full + 2 * windows)


@pytest.mark.parametrize("window", [None, 1, 8])
def test_attention_counts_the_pairs_of_the_mask(tiny_model: TinyModel, window: int | None) -> None:
    processors = processors_of(tiny_model("mistral"))
    config = processors.hf_config
    config.sliding_window = window
    groups = make_groups(processors)
    row = packed(groups, processors)
    flops = forward_flops(dimensions_of(config), lengths_of(groups))
    pairs = int(dense_mask(row.spans, window).sum())
    assert flops.attention == 2 * 4 * pairs * 4 * 32  # layers, operations, pairs, heads, head dimension


def test_peak_tflops_by_device_name() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165,
        # MIG slices, and slower variants of similar names.
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
        "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA L40": None,
    }
    assert {name: peak_tflops(name) for name in peaks} == peaks
