"""Each attention kernel compared with a dense mask, and the options of its versions.

Covers segments, shared keys, sliding windows and gradients.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from test_models_attention import CPU, HEADS, KEY_HEADS, SCALE, TWO_GROUPS, dense_mask, starts_of, states
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from support.varlen import TORCH_VERSIONS, stand_in, stand_in_flash_attn, torch_2_10, torch_2_11, torch_2_13
from trigon.errors import ModelError
from trigon.models.attention import group_attention, window_attention
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.kernels import adapt_varlen, gather_keys, resolve_kernel, supports, varlen_attention
from trigon.types import GroupSpan

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
with_flash_attn = pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")

# Two groups with two completions each, one with three and one with one: keys are shared by
# different numbers of completions.
FOUR_GROUPS = (
    GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 9))),
    GroupSpan(prompt=(9, 10), completions=((10, 15), (15, 16))),
    GroupSpan(prompt=(16, 20), completions=((20, 21), (21, 24), (24, 26))),
    GroupSpan(prompt=(26, 27), completions=((27, 30),)),
)


def expected_of(inputs: list[Tensor], spans: tuple[GroupSpan, ...], window: int | None = None) -> Tensor:
    mask = dense_mask(spans, window).to(inputs[0].device)
    return scaled_dot_product_attention(*inputs, attn_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)


def check_gradients(output: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-13) -> None:
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = weights.to(output.device)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=tolerance, rtol=0)


def stand_in_for(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "flash":
        stand_in_flash_attn(monkeypatch)
    else:
        stand_in(monkeypatch, TORCH_VERSIONS[kernel])


def test_the_segments_drawn_in_the_module_docstring() -> None:
    metadata = AttentionMetadata((GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 8))),), CPU, "varlen")
    segments, layout = metadata.segments
    assert segments.query_starts.tolist() == [0, 3, 5, 8]
    assert segments.key_starts.tolist() == [0, 3, 8, 14]
    assert (segments.max_queries, segments.max_keys) == (3, 6)
    assert layout.sources.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert layout.own.tolist() == [0, 1, 2, 6, 7, 11, 12, 13]
    [(tokens, copies)] = layout.shared
    assert tokens.tolist() == [0, 1, 2]
    assert copies.tolist() == [[0, 1, 2], [3, 4, 5], [8, 9, 10]]


def test_gradients_of_repeated_keys_are_summed_in_float32() -> None:
    """1 + 2^-9 + 2^-9 + ... stays 1 if every sum is rounded to bfloat16."""
    _, layout = AttentionMetadata(
        (GroupSpan(prompt=(0, 1), completions=tuple((i, i + 1) for i in range(1, 9))),), CPU, "varlen"
    ).segments
    rows = torch.zeros(9, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.zeros(17, 1, 1, dtype=torch.bfloat16)
    gradient[layout.sources == 0] = 2.0**-9
    gradient[0] = 1.0
    gather_keys(rows, layout).backward(gradient)
    assert rows.grad is not None
    assert rows.grad[0].item() == 1 + 8 * 2.0**-9
    assert torch.count_nonzero(rows.grad[1:]) == 0


@pytest.mark.parametrize("spans", [TWO_GROUPS, FOUR_GROUPS], ids=["two", "four"])
@pytest.mark.parametrize("key_heads", [1, KEY_HEADS, HEADS])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_one_call_for_all_segments_equals_a_dense_mask_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, kernel: str, key_heads: int, spans: tuple[GroupSpan, ...]
) -> None:
    stand_in_for(kernel, monkeypatch)
    inputs = states(spans[-1].completions[-1][1], key_heads)
    metadata = AttentionMetadata(spans, CPU, "flash" if kernel == "flash" else "varlen")
    output, expected = group_attention(*inputs, metadata, scale=SCALE), expected_of(inputs, spans)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_sliding_windows_in_one_call_equal_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, kernel: str, window: int
) -> None:
    stand_in_for(kernel, monkeypatch)
    inputs = states(18, KEY_HEADS)
    metadata = AttentionMetadata(TWO_GROUPS, CPU, "flash" if kernel == "flash" else "varlen")
    output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    expected = expected_of(inputs, TWO_GROUPS, window)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


@pytest.mark.parametrize("lengths", [[18], [6, 6, 6], [4, 4, 1, 4, 1, 4]])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_the_windows_of_a_vision_tower_are_computed_in_one_call(
    monkeypatch: pytest.MonkeyPatch, kernel: str, lengths: list[int]
) -> None:
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    function = TORCH_VERSIONS.get(kernel, torch_2_13)
    counted.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    stand_in_for(kernel, monkeypatch)
    if kernel != "flash":
        stand_in(monkeypatch, counted)
    inputs = states(18, HEADS)
    name = "flash" if kernel == "flash" else "varlen"
    output = window_attention(*inputs, starts_of(lengths), scale=SCALE, kernel=name)
    expected = window_attention(*inputs, starts_of(lengths), scale=SCALE)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)
    assert len(calls) == (name == "varlen")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_flex_equals_a_dense_mask(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    inputs = [part.detach() for part in states(30, KEY_HEADS, dtype)]
    metadata = AttentionMetadata(FOUR_GROUPS, CPU, "flex")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    torch.testing.assert_close(output, expected_of(inputs, FOUR_GROUPS, window), atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_the_block_mask_equals_the_one_that_torch_makes_of_the_mask_function(window: int | None) -> None:
    """A row of several blocks of 128 tokens; some are empty, and the last is not full."""
    from torch.nn.attention.flex_attention import create_block_mask

    spans = (
        GroupSpan(prompt=(0, 300), completions=((300, 700), (700, 900))),
        GroupSpan(prompt=(900, 1040), completions=((1040, 1300), (1300, 1417))),
    )
    mask = AttentionMetadata(spans, CPU, "flex").block_mask(window)
    expected = create_block_mask(mask.mask_mod, None, None, 1417, 1417, device="cpu")
    assert mask.shape == expected.shape == (1, 1, 1417, 1417)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for count, columns in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, number in enumerate(getattr(mask, count)[0, 0].tolist()):
            indices, expected_indices = (getattr(each, columns)[0, 0, row, :number] for each in (mask, expected))
            assert torch.equal(indices, expected_indices)
    assert mask.full_kv_num_blocks.sum() > 0
    dense = torch.tensor(
        [[bool(mask.mask_mod(0, 0, torch.tensor(q), torch.tensor(k))) for k in (0, 299, 305, 899)] for q in (305, 899)]
    )
    assert dense.tolist() == dense_mask(spans, window)[[305, 899]][:, [0, 299, 305, 899]].tolist()


def test_the_options_of_each_version_of_varlen_attn() -> None:
    options = {
        version: (adapted.supports_scale, adapted.supports_window, adapted.supports_gqa)
        for version, function in TORCH_VERSIONS.items()
        for adapted in [adapt_varlen(function)]
    }
    assert options == {
        "2.10": (False, False, False),
        "2.11": (True, True, False),
        "2.13": (True, True, True),
    }


def test_the_installed_varlen_attn_has_a_known_signature() -> None:
    adapted = adapt_varlen(varlen.varlen_attn)
    assert adapted.supports_window or not adapted.supports_scale


@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_varlen_attn_accepts_the_call_and_has_a_backward(window: int | None) -> None:
    """On the meta device, where only shapes are computed."""
    if window is not None and not adapt_varlen(varlen.varlen_attn).supports_window:
        pytest.skip("the installed varlen_attn has no sliding window")
    meta = torch.device("meta")
    inputs = [torch.empty(18, heads, 64, dtype=torch.bfloat16, device=meta, requires_grad=True) for heads in (4, 2, 2)]
    segments, layout = AttentionMetadata(TWO_GROUPS, meta, "varlen").segments
    query, key, value = inputs[0], gather_keys(inputs[1], layout), gather_keys(inputs[2], layout)
    output = varlen_attention(query, key, value, segments, kernel="varlen", scale=SCALE, causal=True, window=window)
    assert output.shape == (18, 4, 64)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert [gradient.shape for gradient in gradients] == [part.shape for part in inputs]


def test_a_varlen_attn_with_an_unknown_signature_is_an_error() -> None:
    def varlen_attn(query, key, value, mask):
        raise AssertionError

    with pytest.raises(ModelError, match=r"varlen_attn\(query, key, value, mask\), which is not a known signature"):
        adapt_varlen(varlen_attn)


def test_inputs_that_the_flash_kernels_do_not_support_are_computed_by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_, is_causal=False):
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", never)
    inputs = states(18, KEY_HEADS, torch.float32)
    metadata = AttentionMetadata(TWO_GROUPS, CPU, "varlen")
    output = group_attention(*inputs, metadata, scale=SCALE)
    assert torch.equal(output, group_attention(*inputs, AttentionMetadata(TWO_GROUPS, CPU, "sdpa"), scale=SCALE))
    starts = starts_of([6, 12])
    repeated = [part.repeat_interleave(HEADS // part.shape[1], 1) for part in inputs]
    output = window_attention(*repeated, starts, scale=SCALE, kernel="varlen")
    assert torch.equal(output, window_attention(*repeated, starts, scale=SCALE))


def test_which_heads_the_flash_kernels_support(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    for kernel in ("varlen", "flash"):
        assert supports(kernel, half, 80, None)
        assert not supports(kernel, torch.float32, 80, None)
        assert not supports(kernel, half, 4, None)
        assert not supports(kernel, half, 264, None)
    assert supports("flash", half, 64, 100)
    assert supports("flex", torch.float32, 264, 100)
    for function, supports_windows in ((torch_2_10, False), (torch_2_11, True), (torch_2_13, True)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        assert supports("varlen", half, 64, 100) == supports_windows


def test_a_cpu_has_sdpa_only() -> None:
    resolve = partial(resolve_kernel, device=CPU, dtype=torch.bfloat16)
    assert resolve("auto") == resolve("sdpa") == "sdpa"
    for requested in ("varlen", "flex", "flash"):
        with pytest.raises(
            ModelError, match=rf"attention_kernel={requested} needs a GPU, but this run trains on 'cpu'"
        ):
            resolve(requested)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A cuda device whose properties are replaced, for machines without a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return torch.device("cuda")


def test_the_kernels_of_a_gpu_depend_on_dtype_and_capability(
    ampere: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_kernel("auto", device=ampere, dtype=torch.bfloat16) == "varlen"
    assert resolve_kernel("auto", device=ampere, dtype=torch.float32) == "sdpa"
    assert resolve_kernel("flex", device=ampere, dtype=torch.float32) == "flex"
    assert resolve_kernel("varlen", device=ampere, dtype=torch.float16) == "varlen"
    for requested in ("varlen", "flash"):
        with pytest.raises(ModelError, match=r"computes in 16 bits only.*mp_param_dtype"):
            resolve_kernel(requested, device=ampere, dtype=torch.float32)
    with pytest.raises(ModelError, match="pip install flash-attn"):
        resolve_kernel("flash", device=ampere, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert resolve_kernel("auto", device=ampere, dtype=torch.bfloat16) == "sdpa"
    with pytest.raises(ModelError, match=r"compute capability 8\.0 .* which Some GPU"):
        resolve_kernel("varlen", device=ampere, dtype=torch.bfloat16)


def long_row() -> tuple[GroupSpan, ...]:
    """Return three groups of 450 + 5 x about 275 tokens."""
    generator = torch.Generator().manual_seed(3)
    spans, end = [], 0
    for _ in range(3):
        prompt, parts = (end, end := end + 450), []
        for length in torch.randint(150, 400, (5,), generator=generator).tolist():
            parts.append((end, end := end + length))
        spans.append(GroupSpan(prompt, tuple(parts)))
    return tuple(spans)


@on_gpu
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(
    "kernel",
    ["varlen", "flex", pytest.param("flash", marks=with_flash_attn)],
)
def test_gpu_kernels_agree_with_float64_up_to_the_precision_of_bfloat16(kernel: str, window: int | None) -> None:
    spans, device = long_row(), torch.device("cuda")
    tokens = spans[-1].completions[-1][1]
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, heads, tokens, 128, generator=generator).bfloat16().double().to(device).requires_grad_()
        for heads in (16, 2, 2)
    ]
    inputs = [part.detach().bfloat16().requires_grad_() for part in exact]
    metadata = AttentionMetadata(spans, device, kernel)
    output = group_attention(*inputs, metadata, scale=128**-0.5, window=window)
    expected = scaled_dot_product_attention(
        *exact, attn_mask=dense_mask(spans, window).to(device), enable_gqa=True
    ).transpose(1, 2)
    assert output.dtype == torch.bfloat16
    assert float((output.double() - expected).norm() / expected.norm()) < 0.01
    gradients = torch.autograd.grad(output.float().pow(2).sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.pow(2).sum(), exact)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert float((gradient.double() - expected_gradient).norm() / expected_gradient.norm()) < 0.02


@on_gpu
def test_gpu_window_attention_agrees_with_float64_up_to_the_precision_of_bfloat16() -> None:
    lengths = [64] * 40 + [32, 16, 48]
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, 16, sum(lengths), 80, generator=generator).bfloat16().double().cuda().requires_grad_()
        for _ in range(3)
    ]
    inputs = [part.detach().bfloat16().requires_grad_() for part in exact]
    starts = starts_of(lengths).cuda()
    output = window_attention(*inputs, starts, scale=80**-0.5, kernel="varlen")
    expected = window_attention(*exact, starts, scale=80**-0.5)
    assert float((output.double() - expected).norm() / expected.norm()) < 0.01
    gradients = torch.autograd.grad(output.float().pow(2).sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.pow(2).sum(), exact)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert float((gradient.double() - expected_gradient).norm() / expected_gradient.norm()) < 0.02
