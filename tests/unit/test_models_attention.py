"""Group attention and window attention, compared with attention under one dense mask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from support.device import DEVICE, HostWaits, OnDevice
from trigon.models import attention
from trigon.models.attention import group_attention, sliding_windows, window_attention
from trigon.models.attention_metadata import AttentionMetadata
from trigon.models.families.family import ImageLayers
from trigon.types import GroupSpan

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
SCALE = 0.3
CPU = torch.device("cpu")

TWO_GROUPS = (
    GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 9), (9, 11), (11, 12))),
    GroupSpan(prompt=(12, 13), completions=((13, 18),)),
)


def states(tokens: int, key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
        for heads in (HEADS, key_heads, key_heads)
    ]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def dense_mask(
    spans: tuple[GroupSpan, ...], window: int | None = None, images: tuple[tuple[int, int], ...] = ()
) -> Tensor:
    """Return the mask by definition: [T, T] bool, true where a token may attend.

    images: (first token, end) of those within which tokens attend in both directions.
    """
    tokens = spans[-1].completions[-1][1]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for span in spans:
        first, last = span.prompt
        mask[first:last, first:last] = True
        for start, end in span.completions:
            mask[start:end, first:last] = True
            mask[start:end, start:end] = True
            for token in range(start, end):  # as if the completion were alone after its prompt
                attended = mask[token].nonzero()[:, 0]
                attended = attended[attended <= token]
                if window is not None:
                    mask[token, attended[:-window]] = False
        if window is not None:
            mask[first:last, first:last] &= torch.ones(last - first, last - first, dtype=torch.bool).triu(1 - window)
    mask = mask.tril()
    for first, last in images:
        mask[first:last, first:last] |= torch.ones(last - first, last - first, dtype=torch.bool).triu(1)
    return mask


ONE_GROUP = (GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 7))),)


@pytest.mark.parametrize(
    ("spans", "window", "images", "rows"),
    [
        # drawn in the module's docstring
        (
            (GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 8))),),
            None,
            (),
            "10000000 11000000 11100000 11110000 11111000 11100100 11100110 11100111",
        ),
        (ONE_GROUP, 2, (), "1000000 1100000 0110000 0011000 0001100 0010010 0000011"),
        (
            (GroupSpan(prompt=(0, 4), completions=((4, 6),)),),
            None,
            ((1, 3),),
            "100000 111000 111000 111100 111110 111111",
        ),
    ],
    ids=["causal", "a window of two", "an image"],
)
def test_masks_by_hand(spans, window, images, rows) -> None:
    mask = dense_mask(spans, window, images)
    assert " ".join("".join(map(str, row)) for row in mask.int().tolist()) == rows


def check_gradients(output: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-13) -> None:
    """Compare the gradients of one random sum of the outputs."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = weights.to(output.device)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("key_heads", "window"),
    [(1, None), (KEY_HEADS, None), (HEADS, None), *((KEY_HEADS, window) for window in (1, 2, 3, 4, 6, 100))],
)
def test_group_attention_equals_a_dense_mask_in_values_and_gradients(key_heads: int, window: int | None) -> None:
    inputs = states(18, key_heads)
    metadata = AttentionMetadata(TWO_GROUPS, CPU, "sdpa")
    output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    expected = scaled_dot_product_attention(
        *inputs, attn_mask=dense_mask(TWO_GROUPS, window), scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    assert output.shape == (1, 18, HEADS, WIDTH)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


# Images in both prompts and in two completions. Of the two completions of two tokens in the first
# group one is an image. The prompts of the first and the last group have the same length.
WITH_IMAGES = (
    GroupSpan(prompt=(0, 6), completions=((6, 8), (8, 12), (12, 14), (14, 15))),
    GroupSpan(prompt=(15, 16), completions=((16, 21),)),
    GroupSpan(prompt=(21, 27), completions=((27, 29),)),
    GroupSpan(prompt=(29, 35), completions=((35, 37), (37, 41))),
)
IMAGES = ((1, 3), (4, 6), (9, 12), (12, 14), (15, 16), (16, 18), (29, 33))


def image_tokens(tokens: int) -> Tensor:
    places = torch.zeros(tokens, dtype=torch.bool)
    for first, last in IMAGES:
        places[first:last] = True
    return places


@pytest.mark.parametrize("layers", ["none", "sliding", "all"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_tokens_of_an_image_attend_to_each_other(layers: ImageLayers, window: int | None) -> None:
    inputs = states(41, KEY_HEADS)
    metadata = AttentionMetadata(WITH_IMAGES, CPU, "sdpa", image_tokens=image_tokens(41), image_layers=layers)
    output = group_attention(*inputs, metadata, scale=SCALE, window=window)
    both_ways = layers == "all" or (layers == "sliding" and window is not None)
    mask = dense_mask(WITH_IMAGES, window, IMAGES if both_ways else ())
    expected = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(output, expected, atol=1e-14, rtol=0)
    check_gradients(output, expected, inputs)


def test_sliding_windows_reads_the_window_of_each_layer() -> None:
    full = SimpleNamespace(num_hidden_layers=2, sliding_window=None)
    windowed = SimpleNamespace(num_hidden_layers=2, sliding_window=5)
    mixed = SimpleNamespace(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    off = SimpleNamespace(sliding_window=0, layer_types=["full_attention", "full_attention"])
    assert [sliding_windows(config) for config in (full, windowed, mixed, off)] == [
        (None, None),
        (5, 5),
        (5, None),
        (None, None),
    ]


@pytest.mark.parametrize("lengths", [[18], [6, 6, 6], [4, 4, 1, 4, 1, 4], [1, 17]])
def test_window_attention_equals_a_dense_mask(lengths: list[int]) -> None:
    inputs = states(18, HEADS)
    window = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    expected = scaled_dot_product_attention(*inputs, attn_mask=window[:, None] == window, scale=SCALE)
    output = window_attention(*inputs, starts_of(lengths), scale=SCALE)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-14, rtol=0)
    check_gradients(output, expected.transpose(1, 2), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_sdpa_has_a_kernel_for_every_call(monkeypatch, dtype):
    """torch's kernels: flash takes no mask and no float32, memory-efficient no fewer key heads."""
    calls = []

    def recorded(query, key, value, *, attn_mask, **options):
        calls.append((query.shape[1] == key.shape[1] == value.shape[1], attn_mask is None))
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    inputs = [state.detach() for state in states(18, KEY_HEADS, dtype)]
    expected = group_attention(*inputs, AttentionMetadata(TWO_GROUPS, CPU, "sdpa"), scale=SCALE)
    assert (False, False) in calls  # a mask and fewer key heads: only a CPU has a kernel
    calls.clear()
    with HostWaits() as waits:
        found = group_attention(*map(OnDevice, inputs), AttentionMetadata(TWO_GROUPS, DEVICE, "sdpa"), scale=SCALE)
    assert all(equal_heads or (no_mask and dtype == torch.bfloat16) for equal_heads, no_mask in calls), calls
    assert waits.waits == []
    torch.testing.assert_close(found.host, expected, atol=5e-3, rtol=2e-2)
