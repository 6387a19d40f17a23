"""An update makes the host wait for its device once, however many micro-batches it has.

On a machine without a GPU the device is the one of support.device.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from support.device import DEVICE, HostWaits, OnDevice, move_module
from support.engines import (
    CONFIG,
    FULL_KL,
    KL,
    ONE_ROW,
    make_rollouts,
    plan_for,
    processors_of,
    to_train,
    with_loss,
)
from support.varlen import stand_in
from trigon.config.options import with_options
from trigon.config.schema import Config, LoraConfig
from trigon.metrics import values
from trigon.models.attention import use_group_attention
from trigon.models.features import VisionFeatureCache
from trigon.models.load import load_model
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.models.transfer import to_device
from trigon.training.device_memory import Placement
from trigon.training.local import LocalTrainEngine

CORRECTED = with_loss(
    KL,
    entropy_coeff=0.01,
    mismatch_correction="truncate",
    mismatch_level="sequence",
    mismatch_low=0.5,
    mismatch_high=2.0,
)
FEW_TOKENS, FEWER_TOKENS = 45, 20  # of a row; the groups of make_rollouts take 2 rows, and 6 or 7


@pytest.fixture(autouse=True)
def treated_as_a_gpu(monkeypatch):
    """Let torch's fused AdamW accept the type of the device."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *arguments, **options: None)


def make_engine(
    folder: Path,
    *,
    max_tokens: int,
    device: torch.device = DEVICE,
    config: Config = CONFIG,
    kernel: str = "sdpa",
    freeze: bool = False,
    lora: bool = False,
    strategy: str = "adamw",
    dtype: torch.dtype = torch.float32,
) -> LocalTrainEngine:
    """Return the engine of a model folder on the device, with gradient checkpointing."""
    processors = processors_of(folder)
    model = load_model(str(folder), dtype=dtype, device=torch.device("cpu"))
    use_group_attention(model, processors.family, kernel)
    policy = Policy(
        model, processors.family, temperature=0.7, banned_token_ids=processors.banned_token_ids, logprob_chunk=16
    )
    if freeze:
        policy.freeze_vision_tower()
    if lora:
        add_lora(policy.model, LoraConfig(rank=4, alpha=8), seed=0)
    policy.enable_gradient_checkpointing()
    if device == DEVICE:
        move_module(policy)
    else:
        policy.to(device)
    return LocalTrainEngine(
        policy,
        with_options(config, {"worker.actor.optim.strategy": strategy}),
        plan_for(max_tokens),
        Placement(device=device, compute_dtype=None),
        features=VisionFeatureCache(2**20) if policy.has_frozen_vision else None,
    )


def varlen_attn(
    query, key, value, query_starts, key_starts, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa=False
):
    """Compute varlen attention by one masked table, without reading the starts on the host."""
    rows, columns = (
        torch.searchsorted(starts, torch.arange(len(states), device=states.device), right=True)
        for states, starts in ((query, query_starts), (key, key_starts))
    )
    visible = rows[:, None] == columns
    if window_size == (-1, 0):  # causal, aligned at the end of each segment
        query_left, key_left = (
            starts.long().gather(0, segment) - torch.arange(len(states), device=states.device)
            for states, starts, segment in ((query, query_starts, rows), (key, key_starts, columns))
        )
        visible = visible & (key_left >= query_left[:, None])
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen2_5_vl", {"config": CORRECTED}),
        ("qwen2_5_vl", {"kernel": "varlen"}),
        ("qwen2_5_vl", {"freeze": True}),
        ("qwen2_5_vl", {"lora": True, "config": FULL_KL}),
        ("qwen3_vl_moe", {"strategy": "adamw_bf16", "dtype": torch.bfloat16}),
        ("internvl", {}),
        ("llava_onevision", {}),
        ("mistral3", {"kernel": "varlen"}),
        ("gemma3", {}),
    ],
)
def test_an_update_waits_once_for_any_number_of_micro_batches(tiny_model, monkeypatch, model_type, options):
    if options.get("kernel") == "varlen":
        stand_in(monkeypatch, varlen_attn)
    folder = tiny_model(model_type)
    rollouts = make_rollouts(folder)
    reference = [[torch.full((len(each.completion.token_ids),), -6.0) for each in group.rollouts] for group in rollouts]
    groups = to_train(rollouts, masked=[(0, 1)], ref=reference if options.get("config") is CORRECTED else None)
    micro_batches = []
    few_tokens = 80 if model_type == "llava_onevision" else FEW_TOKENS  # its images have more tokens
    for max_tokens in (few_tokens, FEWER_TOKENS):
        engine = make_engine(folder, max_tokens=max_tokens, **options)
        with HostWaits() as recorded:
            micro_batches.append(values(engine.step(groups))["actor/micro_batches"])
        assert len(recorded.waits) == 1, "\n".join(recorded.waits)
    assert micro_batches[0] == 2
    assert micro_batches[1] in (6, 7)


@pytest.mark.extended
def test_scoring_waits_once_for_any_number_of_rows(tiny_model):
    folder = tiny_model("qwen2_5_vl")
    rollouts = make_rollouts(folder)
    for max_tokens in (ONE_ROW, FEWER_TOKENS):
        engine = make_engine(folder, max_tokens=max_tokens)
        with HostWaits() as recorded:
            scored = engine.logprobs(rollouts)
        assert not isinstance(scored[0][0], OnDevice)
        assert len(recorded.waits) == 1, "\n".join(recorded.waits)


@pytest.mark.extended
def test_an_update_on_the_device_is_that_of_the_cpu(tiny_model):
    folder = tiny_model("qwen2_5_vl")
    groups = to_train(make_rollouts(folder))
    on_cpu = make_engine(folder, max_tokens=FEW_TOKENS, device=torch.device("cpu"))
    expected = values(on_cpu.step(groups))
    engine = make_engine(folder, max_tokens=FEW_TOKENS)
    with HostWaits():
        found = values(engine.step(groups))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()),
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.ones(2).to(x.device),
        lambda x: torch.ones(2).to(x.device, non_blocking=True),
        lambda x: x.repeat_interleave(torch.tensor([1, 2], device=x.device)),
        lambda x: x.masked_scatter(x > 0, x).sum() + x.unique().sum(),
    ],
)
def test_what_waits_for_a_device_is_recorded(wait):
    x = OnDevice(torch.tensor([1.0, 2.0]))
    with HostWaits() as recorded:
        wait(x)
    assert recorded.waits


def test_work_of_the_device_and_copies_from_pinned_memory_do_not_wait():
    x = OnDevice(torch.tensor([1.0, 2.0]))
    with HostWaits() as recorded:
        y = to_device(torch.tensor([1, 0]), DEVICE)
        z = x[y] + x.index_select(0, y) * 2 + torch.zeros(2, device=DEVICE)
        z.masked_fill_(z > 0, 1.0)
    assert recorded.waits == []
    assert isinstance(z, OnDevice)
    assert z.host.tolist() == [1.0, 1.0]
