"""Each attention kernel compared with a dense mask, and the options of its versions.

Covers segments, shared keys, sliding windows and gradients.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from test_models_attention import (
    CPU,
    HEADS,
    IMAGES,
    KEY_HEADS,
    SCALE,
    TWO_GROUPS,
    WITH_IMAGES,
    check_gradients,
    dense_mask,
    image_tokens,
    starts_of,
    states,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from support.varlen import TORCH_VERSIONS, stand_in, stand_in_flash_attn, torch_2_13
from trigon.errors import ModelError
from trigon.models.attention import group_attention, window_attention
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.kernels import _compiled_flex_attention, gather_keys, resolve_kernel, supports, varlen_attention
from trigon.types import GroupSpan

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


@pytest.mark.extended
def test_flex_stays_compiled_for_all_kinds_of_rows_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=versions))
    short, long = (GroupSpan(prompt=(0, 1), completions=((1, 2),)),), (GroupSpan((0, 150), ((150, 260), (260, 300))),)
    # As a Gemma 4: layers with a window have narrower heads. With gradient and without.
    layers = ((8, 16), (None, 32))
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        attention = _compiled_flex_attention.__wrapped__()
        for spans, (window, width), has_images, with_gradient in product(
            (short, long), layers, (False, True), (False, True)
        ):
            tokens = spans[-1].completions[-1][1]
            images = torch.zeros(tokens, dtype=torch.bool)
            images[:1] = has_images
            mask = AttentionMetadata(spans, CPU, "flex", image_tokens=images, image_layers="all").block_mask(window)
            query, key, value = (torch.randn(1, heads, tokens, width) for heads in (4, 2, 2))
            with torch.set_grad_enabled(with_gradient):
                attention(query, key, value, block_mask=mask, scale=SCALE, enable_gqa=True)
    assert versions.frame_count > 8, "with so few versions torch's limit would be enough"


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


@pytest.mark.parametrize(
    ("spans", "key_heads", "window"),
    [
        (FOUR_GROUPS, 1, None),
        (FOUR_GROUPS, HEADS, None),
        *((spans, KEY_HEADS, None) for spans in (TWO_GROUPS, FOUR_GROUPS)),
        *((TWO_GROUPS, KEY_HEADS, window) for window in (1, 3, 100)),
    ],
)
@pytest.mark.parametrize("kernel", ["flash", *TORCH_VERSIONS])
def test_one_call_for_all_segments_equals_a_dense_mask_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, kernel: str, spans: tuple[GroupSpan, ...], key_heads: int, window: int | None
) -> None:
    stand_in_for(kernel, monkeypatch)
    inputs = states(spans[-1].completions[-1][1], key_heads)
    metadata = AttentionMetadata(spans, CPU, "flash" if kernel == "flash" else "varlen")
    output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    expected = expected_of(inputs, spans, window)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


@pytest.mark.parametrize("lengths", [[18], [4, 4, 1, 4, 1, 4]])
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


@pytest.mark.extended(but=["None"])
@pytest.mark.parametrize("window", [None, 3])
def test_flex_equals_a_dense_mask(window: int | None) -> None:
    inputs = [part.detach() for part in states(30, KEY_HEADS, torch.float64)]
    metadata = AttentionMetadata(FOUR_GROUPS, CPU, "flex")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    torch.testing.assert_close(output, expected_of(inputs, FOUR_GROUPS, window), atol=1e-14, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("window", [None, 3])
def test_flex_equals_a_dense_mask_with_images(window: int | None) -> None:
    inputs = [part.detach() for part in states(41, KEY_HEADS, torch.float64)]
    metadata = AttentionMetadata(WITH_IMAGES, CPU, "flex", image_tokens=image_tokens(41), image_layers="all")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    expected = scaled_dot_product_attention(
        *inputs, attn_mask=dense_mask(WITH_IMAGES, window, IMAGES), scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-14, rtol=0)


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


def test_what_each_kernel_supports() -> None:
    half = torch.bfloat16
    for kernel in ("varlen", "flash"):
        assert supports(kernel, half, 80)
        assert not any(supports(kernel, *each) for each in ((torch.float32, 80), (half, 4), (half, 264)))
        assert not supports(kernel, half, 80, has_images=True)
    assert supports("flex", torch.float32, 264)


@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_varlen_attn_accepts_the_call_and_has_a_backward(window: int | None) -> None:
    """On the meta device, where only shapes are computed."""
    meta = torch.device("meta")
    inputs = [torch.empty(18, heads, 64, dtype=torch.bfloat16, device=meta, requires_grad=True) for heads in (4, 2, 2)]
    segments, layout = AttentionMetadata(TWO_GROUPS, meta, "varlen").segments
    query, key, value = inputs[0], gather_keys(inputs[1], layout), gather_keys(inputs[2], layout)
    output = varlen_attention(query, key, value, segments, kernel="varlen", scale=SCALE, causal=True, window=window)
    assert output.shape == (18, 4, 64)
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert [gradient.shape for gradient in gradients] == [part.shape for part in inputs]


def test_images_whose_tokens_attend_to_each_other_are_computed_by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", torch_2_13)
    inputs = [part.detach() for part in states(41, KEY_HEADS, torch.bfloat16)]
    outputs = [
        group_attention(
            *inputs,
            AttentionMetadata(WITH_IMAGES, CPU, kernel, image_tokens=image_tokens(41), image_layers="all"),
            scale=SCALE,
        )
        for kernel in ("varlen", "sdpa")
    ]
    assert torch.equal(*outputs)


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
    assert resolve_kernel("auto", device=ampere, dtype=torch.bfloat16, needs_mask=True) == "flex"
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
