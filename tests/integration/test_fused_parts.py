"""Compiled and fused modules compute what the model computes and keep the names of weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from support.models import policy_of, processors_of
from support.oracle import make_group, make_prompt, pack_groups
from trigon.config.schema import LoraConfig
from trigon.errors import ModelError
from trigon.models.fused import compile_layers, use_liger
from trigon.models.lora import add_lora
from trigon.models.policy import Policy
from trigon.types import PackedGroups

pytestmark = pytest.mark.extended

TinyModel = Callable[..., Path]


def make_rows(folder: Path) -> list[PackedGroups]:
    """Return two rows of different lengths."""
    processors = processors_of(folder)
    image = [(4, 6)] if processors.family.has_vision else []
    groups = [
        make_group(make_prompt(processors, image, seed=1), [3, 7, 7], seed=11),
        make_group(make_prompt(processors, [], seed=2), [4, 9], seed=12),
    ]
    return [pack_groups(processors, [group])[0].packed for group in groups]


def scores_and_gradients(policy: Policy, rows: list[PackedGroups]) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    scores = []
    for row in rows:
        logprobs = policy(row).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        scores.append(logprobs.detach())
    gradients = {name: part.grad for name, part in policy.model.named_parameters() if part.grad is not None}
    return torch.cat(scores), gradients


def check_same(result: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=0)
    assert result[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((result[1][name] - gradient).norm()) <= 1e-5 * (float(gradient.norm()) or 1.0), name


def with_adapters(policy: Policy) -> Policy:
    add_lora(policy.model, LoraConfig(rank=4, alpha=8), seed=1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return policy


@pytest.mark.long(cases=["all weights"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
# torch's own warnings while it compiles.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("model_type", "adapted"),
    [("qwen3_moe", False), ("qwen2", True)],  # one of its two layers is dense
    ids=["all weights", "LoRA"],
)
def test_compiled_modules_compute_the_same_under_gradient_checkpointing(
    tiny_model: TinyModel, model_type: str, adapted: bool
) -> None:
    folder = tiny_model(model_type)
    rows = make_rows(folder)
    plain, compiled = policy_of(folder), policy_of(folder)
    compile_layers(compiled.layers())
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for policy in (plain, compiled):
        if adapted:
            with_adapters(policy)
        policy.enable_gradient_checkpointing()
    check_same(scores_and_gradients(compiled, rows), scores_and_gradients(plain, rows))
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows[0]).logprobs, plain(rows[0]).logprobs, atol=1e-5, rtol=0)
    assert [name for name, _ in compiled.named_weights()] == [name for name, _ in plain.named_weights()]
    assert [name for name, _ in compiled.saved_tensors()] == [name for name, _ in plain.saved_tensors()]


def test_norms_and_dense_mlps_are_compiled(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def compile_nothing(function, *, dynamic):
        assert dynamic
        compiled.append(function.__self__)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    policy = policy_of(tiny_model("qwen3_moe"))
    compile_layers(policy.layers())
    names = {module: name for name, module in policy.model.named_modules()}
    first, second = "model.layers.0.", "model.layers.1."
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    expected = {layer + norm for layer in (first, second) for norm in norms} | {first + "mlp"}
    assert {names[part] for part in compiled} == expected

    compiled.clear()
    policy = policy_of(tiny_model("qwen2_5_vl"))
    compile_layers(policy.layers())
    names = {module: name for name, module in policy.model.named_modules()}
    seen = {names[part].removeprefix("model.visual.blocks.0.") for part in compiled}
    assert {"norm1", "norm2", "mlp"} <= seen
    assert "attn" not in seen


def liger_functions(calls: list[str]) -> ModuleType:
    """Return liger-kernel's functions written in torch, since its kernels need a GPU."""

    def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        assert not in_place
        calls.append(casting_mode)
        X32 = X.float()
        normed = X32 * torch.rsqrt(X32.pow(2).mean(-1, keepdim=True) + eps)
        if casting_mode == "llama":
            return (offset + W) * normed.to(X.dtype)
        return ((offset + W.float()) * normed).to(X.dtype)

    def liger_swiglu(a, b):
        calls.append("swiglu")
        return nn.functional.silu(a) * b

    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_rms_norm, module.liger_swiglu = liger_rms_norm, liger_swiglu  # type: ignore[attr-defined]
    return module


@pytest.fixture
def liger_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", liger_functions(calls))
    return calls


# Number of norms and gated MLPs. Qwen2.5-VL: two decoder layers, three vision blocks and the
# merger.
# Qwen3: norms of queries and keys too. Gemma 3: six norms in each layer. Gemma 4: six too, norms
# of keys in the two layers that have keys, and one before all layers. Qwen3.5: norms of queries and
# keys in one of its two layers; the norm with a gate in the other one is not replaced. The same in
# Qwen3-Next, with a dense MLP and two shared experts in three layers.
@pytest.mark.parametrize(
    ("model_type", "norms", "mlps", "casting"),
    [
        ("qwen2_5_vl", 2 * 2 + 1 + 3 * 2 + 1, 2 + 3, "llama"),
        ("qwen3", 2 * 4 + 1, 2, "llama"),
        ("qwen3_moe", 2 * 4 + 1, 1, "llama"),
        ("gemma3_text", 2 * 6 + 1, 0, "gemma"),
        ("gemma4_text", 4 * 6 + 2 + 2, 0, "gemma"),
        ("qwen3_5", 2 + 4 + 1, 2, "gemma"),
        ("qwen3_next", 2 + 6 + 1, 1 + 2, "gemma"),
    ],
)
def test_fused_functions_compute_the_same(
    tiny_model: TinyModel, liger_calls: list[str], model_type: str, norms: int, mlps: int, casting: str
) -> None:
    folder = tiny_model(model_type)
    rows = make_rows(folder)
    plain, fused = policy_of(folder), policy_of(folder)
    use_liger(fused.model)
    assert list(fused.state_dict()) == list(plain.state_dict())
    for policy in (plain, fused):
        if model_type not in ("qwen3_moe", "qwen3_next"):
            with_adapters(policy)
    check_same(scores_and_gradients(fused, rows[:1]), scores_and_gradients(plain, rows[:1]))
    assert (liger_calls.count(casting), liger_calls.count("swiglu")) == (norms, mlps)


def test_a_model_without_norms_and_mlps_is_an_error(liger_calls: list[str]) -> None:
    with pytest.raises(ModelError, match="A Linear has neither RMS norms nor MLPs"):
        use_liger(nn.Linear(2, 2))
