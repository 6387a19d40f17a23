"""The memory of passes by arithmetic, against peaks of live tensors measured on the CPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.engines import make_engine
from support.varlen import stand_in
from trigon.models.activation_memory import Pass, PassBytes
from trigon.models.attention import GROUP_ATTENTION
from trigon.models.sizes import GroupLengths, dimensions_of
from trigon.training.budget import Lengths, as_rollouts, dummy_group
from trigon.training.device_memory import HostMemory

GROUPS, PROMPT, COMPLETIONS, RESPONSE = 2, 100, 4, 60


class Peaks(NamedTuple):
    """Peaks of an update and of a pass without gradient, in bytes: measured, and by arithmetic."""

    update: int
    score: int
    update_counted: PassBytes
    score_counted: PassBytes


def measure(engine, *, checkpointing, compute_dtype, kernel="sdpa", has_adapters=False, offloads=False) -> Peaks:
    """Measure passes over a row of equal groups with prompts full of images, and count them."""
    policy, memory = engine.policy, HostMemory(shared_by=1)
    group = dummy_group(policy, Lengths(PROMPT, RESPONSE, None, 0, 0), num_completions=COMPLETIONS)
    groups = [group] * GROUPS
    with engine.dry_run_updates() as update:
        update(groups)  # allocates the gradients
        update_peak = memory.peak_bytes(lambda: update(groups))
    rollouts = as_rollouts(groups)
    engine.logprobs(rollouts)
    score_peak = memory.peak_bytes(lambda: engine.logprobs(rollouts))

    vision = policy.family.vision_parameters(policy.model)
    weight = policy.model.dtype
    counted = Pass(
        model=dimensions_of(policy.model.config),
        groups=[GroupLengths.of(each.prompt, each.sequences) for each in groups],
        weight=weight.itemsize,
        compute=(compute_dtype or weight).itemsize,
        checkpointing=checkpointing,
        trains_weights=not has_adapters,
        trains_vision=any(parameter.requires_grad for parameter in vision),
        kernel=kernel,
        chunk_rows=policy.logprob_chunk,
        tied=policy.has_tied_head,
        on_cpu=True,
        offloads=offloads,
    )
    return Peaks(update_peak, score_peak, counted.update_bytes(), counted.score_bytes())


TOLERANCE = 0.15
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
FORMATS = {"float32": (FLOAT32, None), "autocast": (FLOAT32, BFLOAT16), "bfloat16": (BFLOAT16, None)}
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama"),
)


def check(peaks) -> None:
    assert peaks.update_counted.total == pytest.approx(peaks.update, rel=TOLERANCE), peaks.update_counted
    assert peaks.score_counted.total == pytest.approx(peaks.score, rel=TOLERANCE), peaks.score_counted


@pytest.mark.extended
@pytest.mark.long(but=["autocast-checkpointing", "qwen3_5-frozen vision", "qwen3_5-lora"])
@pytest.mark.parametrize(
    ("model_type", "part", "formats", "checkpointing"),
    [
        *product(FAMILIES, ["all"], FORMATS, ["", "checkpointing"]),
        *product(["qwen2_5_vl"], ["frozen vision", "lora", "tied"], ["float32", "autocast"], ["", "checkpointing"]),
        *product(["qwen3_5"], ["frozen vision", "lora"], ["float32", "autocast"], [""]),
    ],
)
def test_the_arithmetic_of_a_pass_agrees_with_its_measured_peak(tiny_model, model_type, part, formats, checkpointing):
    dtype, compute_dtype = FORMATS[formats]
    engine = make_engine(
        tiny_model(model_type, tie_word_embeddings=part == "tied"),
        dtype=dtype,
        compute_dtype=compute_dtype,
        checkpointing=bool(checkpointing),
        freeze=part == "frozen vision",
        lora_rank=4 if part == "lora" else 0,
    )
    options = {"checkpointing": bool(checkpointing), "compute_dtype": compute_dtype}
    check(measure(engine, **options, has_adapters=part == "lora"))


def test_the_load_of_the_experts_keeps_their_probabilities(tiny_model):
    counted = Pass(
        model=dimensions_of(make_engine(tiny_model("qwen2_moe")).policy.model.config),
        groups=[GroupLengths(prompt=100, completions=(50,) * 4)],
        weight=4,
        compute=4,
        checkpointing=False,
        trains_weights=True,
        trains_vision=False,
        kernel="sdpa",
        chunk_rows=64,
        tied=False,
        on_cpu=True,
    )
    without, balanced = (
        replace(counted, balances_experts=balances).update_bytes().activations for balances in (False, True)
    )
    assert balanced - without == 2 * 300 * 4 * 4  # two layers, 300 tokens, four experts, float32


LAYERS = 24


@pytest.fixture(scope="module")
def deep(tiny_model, tmp_path_factory):
    """Return a tiny model with more layers than have their inputs on the device."""
    folder = tmp_path_factory.mktemp("deep")
    shutil.copytree(tiny_model("qwen2_5_vl"), folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = config.vision_config.depth = LAYERS
    config.text_config.layer_types = ["full_attention"] * LAYERS
    AutoModelForImageTextToText.from_config(config, dtype=FLOAT32).save_pretrained(folder)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"freeze": True}, {"lora_rank": 4}], ids=["all", "frozen vision", "lora"])
def test_offloaded_inputs_are_counted(deep, options):
    engine = make_engine(deep, offloads_activations=True, **options)
    peaks = measure(engine, checkpointing=True, offloads=True, compute_dtype=None, has_adapters="lora_rank" in options)
    # On the CPU both are host memory. The inputs are about half of it.
    counted = peaks.update_counted.total + peaks.update_counted.host
    assert counted == pytest.approx(peaks.update, rel=TOLERANCE), peaks.update_counted
    blocks = 0 if "freeze" in options else LAYERS * 2 * 4 * 81 * 64  # 81 of 100 tokens are an image
    assert peaks.update_counted.host == 4 * (LAYERS * 2 * (100 + 4 * 60) * 128 + blocks)


class _KeepsWhatTheKernelKeeps(torch.autograd.Function):
    """Not attention, but with the output and the saved tensors of varlen_attn."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = query.clone()
        ctx.save_for_backward(query, key, value, output, torch.zeros(query.shape[:2]))
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, _ = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def fake_varlen(
    query, key, value, starts, key_starts, longest, longest_keys, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    return _KeepsWhatTheKernelKeeps.apply(query, key, value)


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_kernel_of_variable_lengths_is_counted(tiny_model, monkeypatch, checkpointing):
    stand_in(monkeypatch, fake_varlen)
    engine = make_engine(tiny_model("qwen3"), dtype=BFLOAT16, checkpointing=checkpointing)
    language = engine.policy.family.language_model(engine.policy.model)
    language.set_attn_implementation(GROUP_ATTENTION["varlen"])
    check(measure(engine, checkpointing=checkpointing, compute_dtype=None, kernel="varlen"))
