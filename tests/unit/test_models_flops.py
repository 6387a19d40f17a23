"""Counts of operations, against what torch counts while it computes, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_models_attention import dense_mask
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from support.oracle import load_hugging_face, make_group, make_prompt, padded_logprobs
from support.varlen import stand_in
from trigon.data.packing import pack_rollouts
from trigon.models.flops import GroupLengths, forward_flops, peak_tflops, update_flops
from trigon.models.load import Processors, load_model, load_processors
from trigon.models.policy import Policy
from trigon.models.positions import prompt_positions
from trigon.types import PackedGroups, Prompt, RolloutGroup

TinyModel = Callable[..., Path]
GRIDS = [(6, 10), (4, 4)]  # neither is a whole number of windows of Qwen2.5-VL
COUNTED = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma3_text",
]


def make_groups(processors: Processors) -> list[RolloutGroup]:
    grids = GRIDS if processors.family.has_vision else []
    return [
        make_group(make_prompt(processors, grids, seed=1), [3, 7, 7, 1], seed=11),
        make_group(make_prompt(processors, [], seed=2), [9, 30], seed=12),
    ]


def lengths_of(groups: list[RolloutGroup]) -> list[GroupLengths]:
    return [
        GroupLengths(
            prompt=len(group.prompt.token_ids),
            completions=tuple(len(rollout.completion.token_ids) for rollout in group.rollouts),
            grids=() if group.prompt.vision is None else tuple(map(tuple, group.prompt.vision.grid_thw.tolist())),
        )
        for group in groups
    ]


def packed(groups: list[RolloutGroup], processors: Processors) -> PackedGroups:
    def positions(prompt: Prompt) -> Tensor:
        grid_thw = None if prompt.vision is None else prompt.vision.grid_thw
        return prompt_positions(torch.tensor(prompt.token_ids), grid_thw, processors.family, processors.hf_config)

    [row] = pack_rollouts(groups, max_tokens=10_000, positions=positions)
    return row.packed


def counted(compute: Callable[[], object]) -> tuple[int, int]:
    """Return what torch counts: (products of matrices with weights, products of attention).

    The latter are batched; so are those of rotary positions, which are left out. What torch does as one operation on a
    CPU, its own attention, it does not count there.
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
    """What attention takes piece by piece when nothing is left out for being in the future, or out of a window."""
    config = processors.hf_config
    text = config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    pairs = sum(group.prompt**2 + sum(own * (group.prompt + own) for own in group.completions) for group in lengths)
    return 4 * text.num_hidden_layers * width * pairs


@pytest.mark.parametrize("model_type", COUNTED)
def test_a_forward_and_an_update_take_what_torch_counts(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Exactly, but for attention: torch counts whole rectangles, we the pairs that look at each other."""
    folder = tiny_model(model_type)
    processors = load_processors(str(folder))
    model = load_model(str(folder), dtype=torch.float32, device="cpu", attention_kernel="varlen")
    model.set_experts_implementation("eager")
    stand_in(monkeypatch)
    policy = Policy(model, processors.family, temperature=1.0, banned_token_ids=())
    groups = make_groups(processors)
    row, lengths = packed(groups, processors), lengths_of(groups)

    ours = forward_flops(processors.hf_config, lengths, "honest")
    assert ours is not None
    of_images = _attention_of_images(processors, lengths)
    with torch.no_grad():
        products, attention = counted(lambda: policy(row))
    assert products == ours.linear + ours.head + ours.vision + ours.pixels - of_images
    assert attention == rectangles(processors, lengths) + of_images

    def update() -> None:
        policy(row).logprobs.sum().backward()

    both, attention = counted(update)
    # Of the head (logprobs.py) torch counts the logits that are computed again in the backward, and not the gradient of
    # the weight, which is added in place.
    assert both == update_flops(processors.hf_config, lengths, "honest") - 3 * (ours.attention + of_images)
    assert attention == 3 * (rectangles(processors, lengths) + of_images)

    if processors.family.has_vision:
        policy.freeze_vision_tower()
        both, _ = counted(update)
        frozen = update_flops(processors.hf_config, lengths, "honest", vision_learns=False)
        assert both == frozen - 3 * ours.attention - of_images


def _attention_of_images(processors: Processors, lengths: list[GroupLengths]) -> int:
    """By hand, for the two images above: within each of them, and within the windows of 2 x 2 tokens of Qwen2.5-VL."""
    if not processors.family.has_vision:
        return 0
    vision = processors.hf_config.vision_config
    width = vision.embed_dim if processors.family.model_type == "qwen2_vl" else vision.hidden_size
    whole = 60**2 + 16**2
    if processors.family.model_type != "qwen2_5_vl":
        return 4 * width * 3 * whole
    # 3 x 5 tokens of 4 patches: 2 + 1 high, 2 + 2 + 1 wide; 2 x 2 tokens are one window.
    windows = 2 * 16**2 + 8**2 + 2 * 8**2 + 4**2 + 16**2
    return 4 * width * (whole + 2 * windows)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3"])
def test_credited_is_what_a_padded_forward_takes_without_its_padding(tiny_model: TinyModel, model_type: str) -> None:
    folder = tiny_model(model_type)
    processors = load_processors(str(folder))
    prompt = make_groups(processors)[0].prompt
    group = make_group(prompt, [8, 8, 8], seed=3)
    lengths = lengths_of([group])
    model = load_hugging_face(folder, torch.float32)
    completions = [rollout.completion.token_ids for rollout in group.rollouts]
    with torch.no_grad():
        products, _ = counted(lambda: padded_logprobs(model, prompt, completions, temperature=1.0, banned_token_ids=()))
    ours = forward_flops(processors.hf_config, lengths, "credited")
    assert ours is not None
    at_answers = 3 * 2 * 8 * 128 * 1024  # where the padded forward has logits
    at_all = 3 * 2 * (len(prompt.token_ids) + 8) * 128 * 1024
    assert ours.head == at_all
    of_images = 3 * _attention_of_images(processors, lengths)
    assert products - at_answers == ours.linear + ours.vision + ours.pixels - of_images


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_attention_counts_the_pairs_that_look_at_each_other(tiny_model: TinyModel, window: int | None) -> None:
    processors = load_processors(str(tiny_model("mistral")))
    config = processors.hf_config
    config.sliding_window = window
    groups = make_groups(processors)
    row = packed(groups, processors)
    ours = forward_flops(config, lengths_of(groups), "honest")
    assert ours is not None
    pairs = int(dense_mask(row.spans, window).sum())
    assert ours.attention == 2 * 4 * pairs * 4 * 32  # layers, operations, heads and their width


def test_shared_prompts_and_images_count_once_or_for_each_completion(tiny_model: TinyModel) -> None:
    config = load_processors(str(tiny_model("qwen2_5_vl"))).hf_config
    [group] = [GroupLengths(prompt=20, completions=(5, 5, 5), grids=((1, 4, 4),))]
    alone = GroupLengths(prompt=20, completions=(5,), grids=((1, 4, 4),))
    honest, credited = (forward_flops(config, [group], sharing) for sharing in ("honest", "credited"))
    one = forward_flops(config, [alone], "honest")
    assert honest is not None
    assert credited is not None
    assert one is not None
    assert honest.linear * 25 == one.linear * 35
    assert (honest.vision, honest.pixels, honest.head) == (one.vision, one.pixels, 3 * one.head)
    assert (credited.linear, credited.attention) == (3 * one.linear, 3 * one.attention)
    assert (credited.vision, credited.pixels) == (3 * one.vision, 3 * one.pixels)
    assert credited.head == 3 * 25 * 2 * 128 * 1024


def test_frames_of_a_video_do_not_look_at_each_other(tiny_model: TinyModel) -> None:
    config = load_processors(str(tiny_model("qwen2_5_vl"))).hf_config
    video, image = (
        forward_flops(config, [GroupLengths(prompt=40, completions=(5,), grids=((time, 6, 10),))], "honest")
        for time in (4, 1)
    )
    assert video is not None
    assert image is not None
    assert (video.vision, video.pixels) == (4 * image.vision, 4 * image.pixels)


@pytest.mark.parametrize("model_type", ["internvl", "llava"])
def test_a_family_that_is_not_written_out_is_not_counted(tiny_model: TinyModel, model_type: str) -> None:
    config = load_processors(str(tiny_model(model_type))).hf_config
    lengths = [GroupLengths(prompt=20, completions=(5,))]
    assert forward_flops(config, lengths, "honest") is None
    assert update_flops(config, lengths, "credited") is None


def test_the_peaks_of_gpus() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H200": 989,
        "NVIDIA H800": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA A100-PCIE-40GB": 312,
        "NVIDIA A800-SXM4-80GB": 312,
        "NVIDIA L40S": 362,
        "NVIDIA L20": 119.5,
        "NVIDIA GeForce RTX 4090": 165,
        # Slices, and parts that are slower than their namesakes.
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
        "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA L40": None,
        "Tesla T4": None,
    }
    assert {name: peak_tflops(name) for name in peaks} == peaks
