"""Each kernel against one dense mask: layout, shared keys, windows and gradients, and what each version of it takes."""

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
from trigon.models.attention import RowPlan, group_attention, window_attention
from trigon.models.kernels import adapt_varlen, lay_out, pieces_attention, resolve_kernel, takes
from trigon.types import GroupSpan

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
with_flash_attn = pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")

# Two prompts with as many completions each, and one with more: their copies are added up together.
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
    ours = torch.autograd.grad((output * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=tolerance, rtol=0)


def stand_in_for(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "flash":
        stand_in_flash_attn(monkeypatch)
    else:
        stand_in(monkeypatch, TORCH_VERSIONS[kernel])


def test_the_pieces_of_the_drawing() -> None:
    plan = RowPlan((GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 8))),), CPU, "varlen")
    pieces, keys = plan.pieces
    assert pieces.query_starts.tolist() == [0, 3, 5, 8]
    assert pieces.key_starts.tolist() == [0, 3, 8, 14]
    assert (pieces.longest_query, pieces.longest_keys) == (3, 6)
    assert keys.sources.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert keys.own.tolist() == [0, 1, 2, 6, 7, 11, 12, 13]
    [(tokens, copies)] = keys.shared
    assert tokens.tolist() == [0, 1, 2]
    assert copies.tolist() == [[0, 1, 2], [3, 4, 5], [8, 9, 10]]


def test_copies_of_keys_add_up_in_float32() -> None:
    """1 + 2^-9 + 2^-9 + ... is 1 to the end when every sum is rounded to bfloat16."""
    _, keys = RowPlan(
        (GroupSpan(prompt=(0, 1), completions=tuple((i, i + 1) for i in range(1, 9))),), CPU, "varlen"
    ).pieces
    rows = torch.zeros(9, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.zeros(17, 1, 1, dtype=torch.bfloat16)
    gradient[keys.sources == 0] = 2.0**-9
    gradient[0] = 1.0
    lay_out(rows, keys).backward(gradient)
    assert rows.grad is not None
    assert rows.grad[0].item() == 1 + 8 * 2.0**-9
    assert torch.count_nonzero(rows.grad[1:]) == 0


@pytest.mark.parametrize("spans", [TWO_GROUPS, FOUR_GROUPS], ids=["two", "four"])
@pytest.mark.parametrize("key_heads", [1, KEY_HEADS, HEADS])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_one_call_for_all_pieces_equals_a_dense_mask_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, kernel: str, key_heads: int, spans: tuple[GroupSpan, ...]
) -> None:
    stand_in_for(kernel, monkeypatch)
    inputs = states(spans[-1].completions[-1][1], key_heads)
    plan = RowPlan(spans, CPU, "flash" if kernel == "flash" else "varlen")
    output, expected = group_attention(*inputs, plan, scale=SCALE), expected_of(inputs, spans)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_windows_of_one_call_equal_a_dense_mask(monkeypatch: pytest.MonkeyPatch, kernel: str, window: int) -> None:
    stand_in_for(kernel, monkeypatch)
    inputs = states(18, KEY_HEADS)
    plan = RowPlan(TWO_GROUPS, CPU, "flash" if kernel == "flash" else "varlen")
    output = group_attention(*inputs, plan, scale=SCALE, window=window)
    expected = expected_of(inputs, TWO_GROUPS, window)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


@pytest.mark.parametrize("lengths", [[18], [6, 6, 6], [4, 4, 1, 4, 1, 4]])
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_windows_of_a_tower_take_one_call(monkeypatch: pytest.MonkeyPatch, kernel: str, lengths: list[int]) -> None:
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
    by = "flash" if kernel == "flash" else "varlen"
    output = window_attention(*inputs, starts_of(lengths), scale=SCALE, kernel=by)
    expected = window_attention(*inputs, starts_of(lengths), scale=SCALE)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)
    assert len(calls) == (by == "varlen")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_flex_equals_a_dense_mask(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    inputs = [part.detach() for part in states(30, KEY_HEADS, dtype)]
    plan = RowPlan(FOUR_GROUPS, CPU, "flex")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output = group_attention(*inputs, plan, scale=SCALE, window=window)
    torch.testing.assert_close(output, expected_of(inputs, FOUR_GROUPS, window), atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_the_blocks_of_flex_are_those_that_torch_makes_of_the_mask(window: int | None) -> None:
    """Rows of several blocks of 128 tokens, one of them empty for most queries, and one that is not full."""
    from torch.nn.attention.flex_attention import create_block_mask

    spans = (
        GroupSpan(prompt=(0, 300), completions=((300, 700), (700, 900))),
        GroupSpan(prompt=(900, 1040), completions=((1040, 1300), (1300, 1417))),
    )
    mask = RowPlan(spans, CPU, "flex").flex_mask(window)
    expected = create_block_mask(mask.mask_mod, None, None, 1417, 1417, device="cpu")
    assert mask.shape == expected.shape == (1, 1, 1417, 1417)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for count, columns in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, number in enumerate(getattr(mask, count)[0, 0].tolist()):
            ours, theirs = (getattr(each, columns)[0, 0, row, :number] for each in (mask, expected))
            assert torch.equal(ours, theirs)
    assert mask.full_kv_num_blocks.sum() > 0
    dense = torch.tensor(
        [[bool(mask.mask_mod(0, 0, torch.tensor(q), torch.tensor(k))) for k in (0, 299, 305, 899)] for q in (305, 899)]
    )
    assert dense.tolist() == dense_mask(spans, window)[[305, 899]][:, [0, 299, 305, 899]].tolist()


def test_how_each_version_of_varlen_is_called() -> None:
    facts = {
        version: (adapted.takes_scale, adapted.takes_window, adapted.takes_fewer_keys)
        for version, function in TORCH_VERSIONS.items()
        for adapted in [adapt_varlen(function)]
    }
    assert facts == {
        "2.10": (False, False, False),
        "2.11": (True, True, False),
        "2.13": (True, True, True),
    }


def test_the_installed_varlen_is_one_that_is_known() -> None:
    adapted = adapt_varlen(varlen.varlen_attn)
    assert adapted.takes_window or not adapted.takes_scale


@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_varlen_takes_the_call_and_gives_gradients(window: int | None) -> None:
    """On a device without memory, where it computes nothing but shapes."""
    if window is not None and not adapt_varlen(varlen.varlen_attn).takes_window:
        pytest.skip("this torch's varlen_attn takes no windows")
    meta = torch.device("meta")
    inputs = [torch.empty(18, heads, 64, dtype=torch.bfloat16, device=meta, requires_grad=True) for heads in (4, 2, 2)]
    pieces, keys = RowPlan(TWO_GROUPS, meta, "varlen").pieces
    query, key, value = inputs[0], lay_out(inputs[1], keys), lay_out(inputs[2], keys)
    output = pieces_attention(query, key, value, pieces, kernel="varlen", scale=SCALE, causal=True, window=window)
    assert output.shape == (18, 4, 64)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert [gradient.shape for gradient in gradients] == [part.shape for part in inputs]


def test_a_varlen_of_an_unknown_signature_is_refused() -> None:
    def varlen_attn(query, key, value, mask):
        raise AssertionError

    with pytest.raises(ModelError, match=r"varlen_attn\(query, key, value, mask\), which is not known"):
        adapt_varlen(varlen_attn)


def test_what_the_flash_kernels_do_not_take_goes_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_, is_causal=False):
        raise AssertionError

    monkeypatch.setattr(varlen, "varlen_attn", never)
    inputs = states(18, KEY_HEADS, torch.float32)
    plan = RowPlan(TWO_GROUPS, CPU, "varlen")
    output = group_attention(*inputs, plan, scale=SCALE)
    assert torch.equal(output, group_attention(*inputs, RowPlan(TWO_GROUPS, CPU, "sdpa"), scale=SCALE))
    starts = starts_of([6, 12])
    whole = [part.repeat_interleave(HEADS // part.shape[1], 1) for part in inputs]
    output = window_attention(*whole, starts, scale=SCALE, kernel="varlen")
    assert torch.equal(output, window_attention(*whole, starts, scale=SCALE))


def test_which_heads_the_flash_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    for kernel in ("varlen", "flash"):
        assert takes(kernel, half, 80, None)
        assert not takes(kernel, torch.float32, 80, None)
        assert not takes(kernel, half, 4, None)
        assert not takes(kernel, half, 264, None)
    assert takes("flash", half, 64, 100)
    assert takes("flex", torch.float32, 264, 100)
    for function, takes_windows in ((torch_2_10, False), (torch_2_11, True), (torch_2_13, True)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        assert takes("varlen", half, 64, 100) == takes_windows


def test_the_kernels_of_a_cpu() -> None:
    resolve = partial(resolve_kernel, device=CPU, dtype=torch.bfloat16)
    assert resolve("auto") == resolve("sdpa") == "sdpa"
    for wanted in ("varlen", "flex", "flash"):
        with pytest.raises(ModelError, match=rf"attention_kernel={wanted} needs a GPU, but this run trains on 'cpu'"):
            resolve(wanted)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, as far as can be asked of it without one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return torch.device("cuda")


def test_the_kernels_of_a_gpu(ampere: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_kernel("auto", device=ampere, dtype=torch.bfloat16) == "varlen"
    assert resolve_kernel("auto", device=ampere, dtype=torch.float32) == "sdpa"
    assert resolve_kernel("flex", device=ampere, dtype=torch.float32) == "flex"
    assert resolve_kernel("varlen", device=ampere, dtype=torch.float16) == "varlen"
    for wanted in ("varlen", "flash"):
        with pytest.raises(ModelError, match=r"computes in 16 bits only.*mp_param_dtype"):
            resolve_kernel(wanted, device=ampere, dtype=torch.float32)
    with pytest.raises(ModelError, match="pip install flash-attn"):
        resolve_kernel("flash", device=ampere, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert resolve_kernel("auto", device=ampere, dtype=torch.bfloat16) == "sdpa"
    with pytest.raises(ModelError, match=r"compute capability 8\.0 .* which Some GPU"):
        resolve_kernel("varlen", device=ampere, dtype=torch.bfloat16)


def long_row() -> tuple[GroupSpan, ...]:
    """Three groups of 450 + 5 x about 275 tokens."""
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
def test_gpu_kernels_are_no_further_from_float64_than_their_dtype(kernel: str, window: int | None) -> None:
    spans, device = long_row(), torch.device("cuda")
    tokens = spans[-1].completions[-1][1]
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, heads, tokens, 128, generator=generator).bfloat16().double().to(device).requires_grad_()
        for heads in (16, 2, 2)
    ]
    inputs = [part.detach().bfloat16().requires_grad_() for part in exact]
    plan = RowPlan(spans, device, kernel)
    output = group_attention(*inputs, plan, scale=128**-0.5, window=window)
    expected = scaled_dot_product_attention(
        *exact, attn_mask=dense_mask(spans, window).to(device), enable_gqa=True
    ).transpose(1, 2)
    assert output.dtype == torch.bfloat16
    assert float((output.double() - expected).norm() / expected.norm()) < 0.01
    ours = torch.autograd.grad(output.float().pow(2).sum(), inputs)
    theirs = torch.autograd.grad(expected.pow(2).sum(), exact)
    for our, their in zip(ours, theirs, strict=True):
        assert float((our.double() - their).norm() / their.norm()) < 0.02


@on_gpu
def test_gpu_windows_of_a_tower_are_no_further_from_float64_than_their_dtype() -> None:
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
    ours = torch.autograd.grad(output.float().pow(2).sum(), inputs)
    theirs = torch.autograd.grad(expected.pow(2).sum(), exact)
    for our, their in zip(ours, theirs, strict=True):
        assert float((our.double() - their).norm() / their.norm()) < 0.02
