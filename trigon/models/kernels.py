"""The kernels of each device for attention over pieces of a row: which there are, and how each of them is called.

        varlen, flash      One call for a whole row, whose pieces are told by where they begin. A piece's queries are
                           the last of its keys, so a causal mask is aligned at the bottom right:

            row       p p p a a b b b            queries    p p p | a a       | b b b
                                                 keys       p p p | p p p a a | p p p b b b

        flex               One call with a mask that is a function of two tokens, and a table of the blocks of 128 x 128
                           in which it is true anywhere. No key is laid out twice.

What a flash kernel does not take, float32 and odd widths, is left to scaled_dot_product_attention (attention.py).

Knows torch's and flash-attn's functions, what they take, and in which version. Refuses to know models, and what the
pieces are. Nothing else calls these functions.
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
"""sdpa: torch's scaled_dot_product_attention, piece by piece. varlen: torch.nn.attention.varlen. flex:
torch.nn.attention.flex_attention. flash: the package flash-attn."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""What varlen and flash compute in; anything else goes to sdpa."""

_BLOCK = 128
_BLOCK_ROWS_AT_ONCE = 8  # of the mask, so that it never exists as a whole: [1024, T] bool


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Where the pieces of a row begin and end, among queries and among keys.

    query_starts, key_starts: [pieces + 1] int32, on the device of the row, the last being the end of the last piece.
    longest_query, longest_keys: tokens of the longest piece.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeys:
    """How a row's keys are laid out for its pieces, some of them several times.

    sources: [K] int64, the token of the row of which each laid out key is. own: [T] int64, where a token's key lies in
    the piece of which the token is itself. shared: pairs (tokens [M], copies [c, M]) of those whose key lies elsewhere
    too: all its c places, its own among them. All on the device of the row.
    """

    sources: Tensor
    own: Tensor
    shared: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """What a token's neighbours in a row are to it. All [T] int32, on the device of the row.

    group: of which group it is. part: 0 in a prompt, else the number of its completion. place: how many tokens it has
    before it in its prompt, and in its completion.
    """

    group: Tensor
    part: Tensor
    place: Tensor


def resolve_kernel(
    wanted: Literal["auto", "sdpa", "varlen", "flex", "flash"], *, device: torch.device, dtype: torch.dtype
) -> Kernel:
    """Return the kernel that a policy attends by which computes on this device, in this dtype.

    Raises: ModelError if the one that was asked for cannot run there.
    """
    match wanted:
        case "sdpa":
            return "sdpa"
        case "auto":
            if device.type != "cuda" or dtype not in FLASH_DTYPES or torch.cuda.get_device_capability(device) < (8, 0):
                return "sdpa"
            return "varlen" if _has("torch.nn.attention.varlen") else "flex"
        case "varlen" | "flex" | "flash":
            _refuse(wanted, device, dtype)
            return wanted
        case _:
            assert_never(wanted)


def _refuse(wanted: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    key = f"worker.actor.model.attention_kernel={wanted}"
    if device.type != "cuda":
        raise ModelError(
            f"{key} needs a GPU, but this run trains on {device.type!r}. Set it to auto or sdpa, or set "
            "trainer.device=cuda on a machine that has one."
        )
    if wanted == "flex":
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
    if wanted == "varlen" and not _has("torch.nn.attention.varlen"):
        raise ModelError(f"{key} needs torch 2.10 or later, this is {torch.__version__}. Set it to auto or flex.")
    if wanted == "flash" and not _has("flash_attn"):
        raise ModelError(
            f"{key} needs the package flash-attn, which is not installed: run pip install flash-attn "
            "--no-build-isolation, or set it to auto."
        )


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def takes(kernel: Kernel, dtype: torch.dtype, width: int, window: int | None) -> bool:
    """Tell whether a kernel takes heads of this dtype and width, with this window; what it does not, sdpa does."""
    match kernel:
        case "sdpa" | "flex":
            return True
        case "varlen" | "flash":
            if dtype not in FLASH_DTYPES or width % 8 or width > 256:
                return False
            return kernel == "flash" or window is None or _torch_varlen().takes_window
        case _:
            assert_never(kernel)


def pieces_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    *,
    kernel: Literal["varlen", "flash"],
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attend within each piece, in one call.

    Args: query: [T, H, D]; key, value: [K, heads, D], where their number of heads divides H. causal: a piece's queries
    are the last of its keys, and none looks ahead. window: a token looks at itself and the window - 1 before it.
    Returns: [T, H, D].
    """
    assert causal or window is None
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        output: Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            pieces.query_starts,
            pieces.key_starts,
            pieces.longest_query,
            pieces.longest_keys,
            softmax_scale=scale,
            causal=causal,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return output
    return _torch_varlen()(query, key, value, pieces, scale=scale, causal=causal, window=window)


@dataclass(frozen=True, slots=True)
class Varlen:
    """torch's varlen_attn as a version of torch has it: 2.10 to 2.14 have it in three ways.

    takes_scale: otherwise scores are divided by the root of the width, always. takes_window: as window_size, by which
    causal attention is asked for too; otherwise as is_causal. takes_fewer_keys: of fewer heads than the queries have.
    """

    function: Callable[..., Any]
    takes_scale: bool
    takes_window: bool
    takes_fewer_keys: bool

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Pieces,
        *,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """See pieces_attention. window: None unless takes_window."""
        options: dict[str, Any] = {}
        if self.takes_window:
            # Not window_size=(-1, -1) for what is not causal: it is the default, under whatever name.
            if causal:
                options["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            assert window is None
            options["is_causal"] = causal
        if self.takes_scale:
            options["scale"] = scale
        else:
            query = query * (scale * query.shape[-1] ** 0.5)
        heads_per_key = query.shape[1] // key.shape[1]
        if heads_per_key > 1:
            if self.takes_fewer_keys:
                options["enable_gqa"] = True
            else:
                key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
        output: Tensor = self.function(
            query,
            key,
            value,
            pieces.query_starts,
            pieces.key_starts,
            pieces.longest_query,
            pieces.longest_keys,
            **options,
        )
        return output


@cache
def adapt_varlen(function: Callable[..., Any]) -> Varlen:
    """Return how to call a varlen_attn. Raises: ModelError if its signature is of no known version."""
    names = inspect.signature(function).parameters
    if "window_size" not in names and "is_causal" not in names:
        raise ModelError(
            f"torch {torch.__version__} has a varlen_attn({', '.join(names)}), which is not known here. Set "
            "worker.actor.model.attention_kernel to flex or sdpa."
        )
    return Varlen(
        function=function,
        takes_scale="scale" in names,
        takes_window="window_size" in names,
        takes_fewer_keys="enable_gqa" in names,
    )


def _torch_varlen() -> Varlen:
    from torch.nn.attention import varlen

    return adapt_varlen(varlen.varlen_attn)


def lay_out(states: Tensor, keys: SharedKeys) -> Tensor:
    """Return the keys, or values, of a row as its pieces want them: [T, heads, D] -> [K, heads, D].

    The gradient of a token's copies is added up in float32, and in one order: an index_add would do so in 16 bits, and
    on a GPU in any order.
    """
    laid_out: Tensor = _LayOut.apply(states, keys)  # type: ignore[no-untyped-call]
    return laid_out


class _LayOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, keys: SharedKeys) -> Tensor:
        ctx.keys = keys
        return states.index_select(0, keys.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (by_key,) = gradients
        keys: SharedKeys = ctx.keys
        by_token = by_key.index_select(0, keys.own)
        wide = torch.float64 if by_key.dtype == torch.float64 else torch.float32
        for tokens, copies in keys.shared:
            by_copy = by_key.index_select(0, copies.flatten()).view(*copies.shape, *by_key.shape[1:])
            by_token.index_copy_(0, tokens, by_copy.sum(0, dtype=wide).to(by_key.dtype))
        return by_token, None


def flex_mask(places: TokenPlaces, window: int | None) -> Any:
    """Return a row's BlockMask: its blocks, and what is true within them.

    A token looks at its own prompt and at its own part, not ahead, and with a window not further back than that.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tokens = len(places.group)
    # As long as all blocks, so that no kernel reads past the end; what is beyond it belongs to no group.
    padding = -tokens % _BLOCK
    group, part, place = (
        torch.nn.functional.pad(each, (0, padding), value=-1) for each in (places.group, places.part, places.place)
    )

    def looks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mine = (part[key] == 0) | (part[key] == part[query])
        seen = (group[query] == group[key]) & mine & (place[key] <= place[query])
        return seen if window is None else seen & (place[query] - place[key] < window)

    blocks = (tokens + padding) // _BLOCK
    nothing, positions = torch.zeros((), dtype=torch.int32), torch.arange(tokens + padding, device=group.device)
    counts = []
    for rows in torch.split(positions, _BLOCK * _BLOCK_ROWS_AT_ONCE):
        true = looks(nothing, nothing, rows[:, None], positions[None]) & (group[rows, None] >= 0)
        counts.append(true.view(-1, _BLOCK, blocks, _BLOCK).sum((1, 3)))
    count = torch.cat(counts)
    full = count == _BLOCK**2
    return BlockMask.from_kv_blocks(
        *_in_front((count > 0) & ~full),
        *_in_front(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=looks,
        seq_lengths=(tokens, tokens),
    )


def _in_front(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of true columns [1, 1, rows], all columns with those in front [1, 1, rows, columns]) int32."""
    columns = table.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
    return table.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scale: float) -> Tensor:
    """Attend where a BlockMask lets tokens look. Args: query: [1, H, T, D]; key, value: [1, heads, T, D].

    Returns: [1, H, T, D]. On the CPU without a gradient, and with the whole table of scores.
    """
    attend = _compiled_flex() if query.is_cuda else _plain_flex()
    output: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return output


def _plain_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(_plain_flex(), dynamic=True)  # rows are of any length
