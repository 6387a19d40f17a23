"""The attention kernels of each device: availability, supported inputs, and how they are called.

    varlen, flash      One call for a packed row, whose segments are given by their first tokens.
                       A segment's queries belong to the last of its keys, so that the causal
                       mask is aligned at the bottom right:

        row       p p p a a b b b            queries    p p p | a a       | b b b
                                             keys       p p p | p p p a a | p p p b b b

    flex               One call with a mask function of two tokens, and a table of the blocks of
                       128 x 128 tokens in which it is true anywhere. No key is repeated.

What varlen and flash do not support (float32, some head dimensions, images whose tokens attend in
both directions) is computed by scaled_dot_product_attention, see attention.py.

This is the only module that imports torch.nn.attention and flash-attn. It does not depend on
models.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from trigon.errors import ModelError

Kernel = Literal["sdpa", "varlen", "flex", "flash"]
"""sdpa: torch's scaled_dot_product_attention, one call for each pair of lengths.
varlen: torch.nn.attention.varlen. flex: torch.nn.attention.flex_attention. flash: the package
flash-attn."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that varlen and flash support; sdpa computes in any other."""

_RECOMPILE_LIMIT = 64
_BLOCK = 128
_BLOCK_ROWS_PER_CHUNK = 8  # the [T, T] mask is reduced to blocks in chunks of [1024, T] bool


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The boundaries of the independent segments of a row, among its queries and among its keys.

    query_starts, key_starts: [segments + 1] int32, on the row's device; the last entry is the end
    of the last segment. flash-attn calls them cu_seqlens_q and cu_seqlens_k.
    max_queries, max_keys: the number of queries, and of keys, of the longest segment.
    """

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyLayout:
    """How the T keys of a row are repeated to form the K keys of its segments.

    All tensors are on the row's device.

    sources: [K] int64, the token of the row from which each key is taken.
    own: [T] int64, the index of each token's key within the segment of the token itself.
    shared: pairs (tokens [M], copies [C, M]) int64, for tokens whose key occurs C times, in all its
    places; the one in the token's own segment is among them.
    """

    sources: Tensor
    own: Tensor
    shared: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenIndices:
    """Where each token of a row belongs. All [T] int32, on the row's device.

    group: the index of its group. segment: 0 in a prompt, else the number of its completion.
    position: the number of tokens before it in its prompt and its completion.
    """

    group: Tensor
    segment: Tensor
    position: Tensor


def resolve_kernel(
    requested: Literal["auto", "sdpa", "varlen", "flex", "flash"],
    *,
    device: torch.device,
    dtype: torch.dtype,
    needs_mask: bool = False,
) -> Kernel:
    """Return the kernel for a policy that computes on this device in this dtype.

    "auto" is varlen (flex where a mask is needed) on a GPU of compute capability 8.0 or above in 16
    bits, and sdpa otherwise.

    needs_mask: whether the tokens of images attend in both directions, which varlen and flash leave
    to sdpa.
    Raises: ModelError if the requested kernel is not available.
    """
    match requested:
        case "sdpa":
            return "sdpa"
        case "auto":
            if device.type != "cuda" or dtype not in FLASH_DTYPES or torch.cuda.get_device_capability(device) < (8, 0):
                return "sdpa"
            return "flex" if needs_mask else "varlen"
        case "varlen" | "flex" | "flash":
            _require_available(requested, device, dtype)
            return requested
        case _:
            assert_never(requested)


def _require_available(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    key = f"worker.actor.model.attention_kernel={kernel}"
    if device.type != "cuda":
        raise ModelError(
            f"{key} needs a GPU, but this run trains on {device.type!r}. Set it to auto or sdpa, or set "
            "trainer.device=cuda on a machine with a GPU."
        )
    if kernel == "flex":
        return
    if dtype not in FLASH_DTYPES:
        raise ModelError(
            f"{key} computes in 16 bits only, but worker.actor.fsdp.mp_param_dtype is "
            f"{str(dtype).removeprefix('torch.')}. Set that to bf16, or attention_kernel to auto, flex or sdpa."
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise ModelError(
            f"{key} needs a GPU of compute capability 8.0 (Ampere) or above, which {torch.cuda.get_device_name(device)}"
            " is not. Set it to auto or sdpa."
        )
    if kernel == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ModelError(
            f"{key} needs the package flash-attn, which is not installed: run pip install flash-attn "
            "--no-build-isolation, or set it to auto."
        )


def supports(kernel: Kernel, dtype: torch.dtype, head_dim: int, *, has_images: bool = False) -> bool:
    """Return whether a kernel supports this dtype and head dimension.

    has_images: whether the tokens of images attend in both directions, which needs a mask.
    """
    match kernel:
        case "sdpa" | "flex":
            return True
        case "varlen" | "flash":
            return dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= 256 and not has_images
        case _:
            assert_never(kernel)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    kernel: Literal["varlen", "flash"],
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Compute attention within each segment, in one call.

    Gradient flows into query, key and value.

    Args:
        query: [T, H, D], in one of FLASH_DTYPES.
        key, value: [K, heads, D] in the same dtype, where the number of heads divides H.
        segments: the boundaries of the segments in T and in K.
        scale: factor of the scores before the softmax.
        causal: mask aligned at the bottom right: the queries of a segment are the last of its keys.
        window: a token attends to itself and the window - 1 tokens before it; only with causal.
    Returns: [T, H, D].
    """
    assert causal or window is None
    attention: Any
    options: dict[str, Any]
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        attention, options = flash_attn_varlen_func, {"softmax_scale": scale, "causal": causal}
        if window is not None:
            options["window_size"] = (window - 1, 0)
    else:
        from torch.nn.attention.varlen import varlen_attn

        attention, options = varlen_attn, {"scale": scale}
        if causal:  # (-1, 0): no bound but the diagonal
            options["window_size"] = (-1 if window is None else window - 1, 0)
        heads_per_key = query.shape[1] // key.shape[1]
        if heads_per_key > 1 and _takes_fewer_key_heads(attention):
            options["enable_gqa"] = True
        elif heads_per_key > 1:
            key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    output: Tensor = attention(
        query,
        key,
        value,
        segments.query_starts,
        segments.key_starts,
        segments.max_queries,
        segments.max_keys,
        **options,
    )
    return output


@cache
def _takes_fewer_key_heads(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether varlen_attn takes fewer key heads than query heads: not in torch 2.11."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def gather_keys(states: Tensor, layout: KeyLayout) -> Tensor:
    """Repeat the keys, or values, of a row as its segments need them.

    Args: states: [T, heads, D]. Returns: [K, heads, D].

    Gradient flows into states. The gradients of the copies of a key are added in float32 (float64
    for float64) and in a fixed order, and rounded once; index_add would add them in 16 bits, and on
    a GPU in an arbitrary order.
    """
    gathered: Tensor = _GatherKeys.apply(states, layout)  # type: ignore[no-untyped-call]
    return gathered


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: KeyLayout) -> Tensor:
        ctx.layout = layout
        return states.index_select(0, layout.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (key_gradient,) = gradients
        layout: KeyLayout = ctx.layout
        gradient = key_gradient.index_select(0, layout.own)
        sum_dtype = torch.float64 if key_gradient.dtype == torch.float64 else torch.float32
        for tokens, copies in layout.shared:
            of_copies = key_gradient.index_select(0, copies.flatten()).view(*copies.shape, *key_gradient.shape[1:])
            gradient.index_copy_(0, tokens, of_copies.sum(0, dtype=sum_dtype).to(key_gradient.dtype))
        return gradient, None


def make_block_mask(tokens: TokenIndices, window: int | None, *, images: Tensor | None = None) -> Any:
    """Return the torch BlockMask of a row.

    A token attends to its own prompt and its own completion, to no later token except tokens of its
    own image, and with a sliding window of W to no token that is W or more tokens before it.

    images: [T] int32 on the row's device, which image each token is of, -1 if of none; None if the
    tokens of an image attend to no later ones either.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens = len(tokens.group)
    # Padded to whole blocks, so that no kernel reads past the end; the padding belongs to no group.
    padding = -num_tokens % _BLOCK
    group, segment, position = (
        torch.nn.functional.pad(each, (0, padding), value=-1)
        for each in (tokens.group, tokens.segment, tokens.position)
    )
    image = None if images is None else torch.nn.functional.pad(images, (0, padding), value=-1)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_segment = (segment[key] == 0) | (segment[key] == segment[query])
        visible = (group[query] == group[key]) & same_segment & (position[key] <= position[query])
        if image is not None:
            visible = visible | ((image[query] == image[key]) & (image[key] >= 0))
        return visible if window is None else visible & (position[query] - position[key] < window)

    blocks = (num_tokens + padding) // _BLOCK
    unused, indices = torch.zeros((), dtype=torch.int32), torch.arange(num_tokens + padding, device=group.device)
    counts = []
    for rows in torch.split(indices, _BLOCK * _BLOCK_ROWS_PER_CHUNK):
        mask = attends(unused, unused, rows[:, None], indices[None]) & (group[rows, None] >= 0)
        counts.append(mask.view(-1, _BLOCK, blocks, _BLOCK).sum((1, 3)))
    count = torch.cat(counts)
    full = count == _BLOCK**2
    return BlockMask.from_kv_blocks(
        *_dense_to_ordered((count > 0) & ~full),
        *_dense_to_ordered(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=attends,
        seq_lengths=(num_tokens, num_tokens),
    )


def _dense_to_ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true columns of each row, and all columns with the true ones first.

    Args: blocks: [rows, columns] bool.
    Returns: [1, 1, rows] int32, and column indices [1, 1, rows, columns] int32.
    """
    columns = blocks.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


def flex_group_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scale: float) -> Tensor:
    """Compute attention under a BlockMask with torch's flex_attention, compiled on a GPU.

    On a CPU it is not compiled: it makes the whole table of scores, and has no backward.

    Args:
        query: [1, H, T, D].
        key, value: [1, heads, T, D], where the number of heads divides H.
        mask: the result of make_block_mask.
        scale: factor of the scores before the softmax.
    Returns: [1, H, T, D].
    """
    attention = _compiled_flex_attention() if query.is_cuda else _flex_attention()
    enable_gqa = query.shape[1] != key.shape[1]
    output: Tensor = attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return output


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # Its versions: with and without a window, images and gradient, for each width of heads, and for
    # rows of one block and of more.
    return compiled(_flex_attention())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch compiles, for any sizes and in as many versions as it needs.

    Above its limit, which is 8 versions, torch continues without compilation: flex_attention would
    then make the table of all scores of a row.
    """
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(function, dynamic=True)
