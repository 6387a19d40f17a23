"""Sequence parallelism: several ranks compute one packed row together, a slice of its tokens each.

    row           t0 t1 t2 t3 | t4 t5 t6 --      4 heads, 2 ranks; -- is padding
    rank 0 holds  t0 t1 t2 t3                    outside of attention: all heads of its tokens
    rank 1 holds              | t4 t5 t6 --
    attention     rank 0: heads 0 and 1 of t0 ... t6, rank 1: heads 2 and 3 of t0 ... t6

Everything but attention is computed for each token by itself. Around attention the ranks exchange
tokens for heads, all-to-all, and back (DeepSpeed Ulysses, arXiv:2309.14509), so that each kernel
has the complete row. Images are dealt out over the ranks, and each token's features sent to the
rank that holds it. Each rank gets the results of all sampled tokens of the row.

Every exchange is a collective call, in the forward, in the backward and where layers are computed
again: all ranks of a row make the same calls, in the same order. Does not depend on models or
sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trigon.errors import ConfigError
from trigon.types import PackedGroups, Vision


@dataclass(frozen=True, slots=True)
class RowRanks:
    """The ranks that compute rows together. rank: the rank of this process among them, from 0.

    group: the torch process group of these ranks.
    """

    rank: int
    size: int
    group: Any


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """The part of a row that a rank holds, padded to the same length on all ranks.

    token_ids: [L] int64. position_ids: [1 or 3, L]. start: the first token in the row. On the CPU.
    """

    token_ids: Tensor
    position_ids: Tensor
    start: int

    def held(self, places: Tensor) -> Tensor:
        """Return the indices of those positions of the row that are in this slice, ascending."""
        return ((places >= self.start) & (places < self.start + len(self.token_ids))).nonzero().flatten()


def require_divisible_heads(text_config: Any, size: int, *, model_type: str, num_workers: int) -> None:
    """Raise ConfigError unless the attention of a model can be computed by this many ranks.

    text_config: the config of the language model. num_workers: the number of workers that
    learn. The sizes that the message names divide it too.
    """
    heads = {"attention heads": int(text_config.num_attention_heads)}
    if hasattr(text_config, "linear_num_key_heads"):
        heads["key heads of linear attention"] = int(text_config.linear_num_key_heads)
    common = gcd(num_workers, *heads.values())
    for name, number in heads.items():
        if number % size:
            divisors = [str(each) for each in range(1, common + 1) if common % each == 0]
            raise ConfigError(
                f"worker.actor.ulysses_sequence_parallel_size is {size}, but the {model_type} model has {number} "
                f"{name}, of which each rank computes as many; set it to {' or '.join(divisors)}"
            )


def slice_of(packed: PackedGroups, ranks: RowRanks | None) -> RowSlice:
    """Return this rank's slice of a row; all of the row if ranks is None. Copies nothing then.

    The row is padded at its end with copies of token 0 at position 0, which nothing attends to.
    """
    if ranks is None:
        return RowSlice(packed.token_ids, packed.position_ids, 0)
    length = slice_length(len(packed.token_ids), ranks)
    start, padding = ranks.rank * length, ranks.size * length - len(packed.token_ids)
    token_ids, position_ids = (pad(tensor, (0, padding)) for tensor in (packed.token_ids, packed.position_ids))
    return RowSlice(token_ids[start : start + length], position_ids[:, start : start + length], start)


def slice_length(tokens: int, ranks: RowRanks) -> int:
    """Return the tokens of each rank's slice of a row, with padding."""
    return -(-tokens // ranks.size)


# -- attention -------------------------------------------------------------------------------------


def tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, tokens: int, ranks: RowRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange all heads of this rank's L tokens for this rank's heads of all tokens of the row.

    Key heads are repeated until their number is a multiple of the ranks, if it is not.

    Args: query: [1, H, L, D]. key, value: [1, K, L, D]. tokens: T of the row, without padding.
    Returns: [1, H / ranks, T, D] and twice [1, K' / ranks, T, D], where K' divides H.
    """
    key_heads = lcm(key.shape[1], ranks.size)
    repeats = key_heads // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    # One exchange for all three. [1, H, L, D] -> [ranks, H / ranks, L, D]
    parts = [states[0].reshape(ranks.size, -1, *states.shape[2:]) for states in (query, key, value)]
    received = _exchange(torch.cat(parts, 1), ranks)
    complete = received.transpose(0, 1).flatten(1, 2)[None, :, :tokens]
    queries, keys, values = torch.split(complete, [part.shape[1] for part in parts], 1)
    return queries, keys, values


def parts_for_heads(parts: Sequence[Tensor], tokens: int, ranks: RowRanks) -> list[Tensor]:
    """Exchange all heads of this rank's L tokens for this rank's heads of all tokens of the row.

    Args: parts: [L, H, D] each, of any H and D, in one dtype. tokens: T, without padding.
    Returns: [T, H / ranks, D] each.
    """
    columns = [part.reshape(len(part), ranks.size, -1) for part in parts]
    received = _exchange(torch.cat(columns, 2).transpose(0, 1), ranks).flatten(0, 1)[:tokens]
    split = torch.split(received, [part.shape[2] for part in columns], 1)
    return [own.reshape(len(own), -1, part.shape[2]) for own, part in zip(split, parts, strict=True)]


def heads_for_tokens(output: Tensor, length: int, ranks: RowRanks) -> Tensor:
    """Exchange this rank's heads of the row for all heads of this rank's tokens.

    Args: output: [1, T, H / ranks, D]. length: L of a slice. Returns: [1, L, H, D]; 0 for padding.
    """
    padding = length * ranks.size - output.shape[1]
    if padding:
        output = pad(output, (0, 0, 0, 0, 0, padding))
    received = _exchange(output[0].reshape(ranks.size, length, *output.shape[2:]), ranks)
    return received.transpose(0, 1).flatten(1, 2)[None]


# -- images ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DealtImages:
    """The images and videos of a row, dealt out over the ranks.

    own: the images and videos that this rank encodes, in row order, one each. send_counts: how many
    of their features go to each rank. receive_counts: how many this rank gets from each.
    places: [M] where the received features are in this rank's slice, in the order of their arrival.
    """

    own: tuple[Vision, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    places: Tensor


def deal_images(
    visions: Sequence[Vision],
    places: Tensor,
    row: RowSlice,
    ranks: RowRanks,
    *,
    counts: Sequence[int],
    by_hash: bool,
) -> DealtImages:
    """Deal the images of a row out over the ranks, balanced by their patches.

    Args:
        places: [F] the positions of the placeholder tokens in the row, ascending; as many as there
            are features.
        counts: number of features of each image.
        by_hash: the content of an image decides which rank encodes it, so that the rank finds its
            features in its cache when the image comes again.
    """
    images = [image for vision in visions for image in _each(vision)]
    patches = [int(image.grid_thw.prod()) for image in images]
    if by_hash and all(image.hashes for image in images):
        owners = [crc32(image.hashes[0].encode()) % ranks.size for image in images]
    else:
        owners = _balanced(patches, ranks.size)
    # For each feature: which rank computes it, and which rank holds its token.
    computed_by = torch.tensor(owners).repeat_interleave(torch.tensor(counts))
    held_by = places // len(row.token_ids)
    mine = held_by == ranks.rank
    arrivals = [places[mine & (computed_by == rank)] - row.start for rank in range(ranks.size)]
    sent = held_by[computed_by == ranks.rank].bincount(minlength=ranks.size)
    return DealtImages(
        own=tuple(image for image, owner in zip(images, owners, strict=True) if owner == ranks.rank),
        send_counts=tuple(sent.tolist()),
        receive_counts=tuple(len(part) for part in arrivals),
        places=torch.cat(arrivals),
    )


def send_features(features: Tensor, dealt: DealtImages, ranks: RowRanks) -> Tensor:
    """Send the features of this rank's images to the ranks of their tokens.

    Args: features: [features of own images, D].
    Returns: the features of the tokens of this rank, [M, D], in the order of dealt.places.
    """
    received: Tensor = _AllToAll.apply(features, dealt.send_counts, dealt.receive_counts, ranks.group)  # type: ignore[no-untyped-call]
    return received


def _each(vision: Vision) -> list[Vision]:
    """Return each image or video of a vision by itself."""
    pixels = torch.split(vision.pixel_values, vision.grid_thw.prod(dim=1).tolist())
    places = [slice(index, index + 1) for index in range(len(pixels))]
    return [
        Vision(
            part,
            vision.grid_thw[place],
            vision.hashes[place],
            vision.kind,
            original_sizes=vision.original_sizes[place],
        )
        for part, place in zip(pixels, places, strict=True)
    ]


def _balanced(costs: Sequence[int], size: int) -> list[int]:
    """Return the owner of each cost: the most expensive first, each to the rank with least."""
    sums, owners = [0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = sums.index(min(sums))
        sums[owners[index]] += costs[index]
    return owners


# -- results ---------------------------------------------------------------------------------------


def complete_results(own: Tensor, indices: Tensor, total: int, ranks: RowRanks) -> Tensor:
    """Return the results of all tokens of a row, on each of its ranks.

    Each rank then computes the loss of the complete row. The gradient of a result flows once into
    the rank that computed it, not once for each copy of the loss.

    Args:
        own: [columns, S of this rank]. indices: [S of this rank], their places among all.
        total: S of the row.
    Returns: [columns, S].
    """
    results: Tensor = _CompleteResults.apply(own, indices, total, ranks.group)  # type: ignore[no-untyped-call]
    return results


class _CompleteResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, indices: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(indices)
        results = own.new_zeros(len(own), total).index_copy_(1, indices, own)
        dist.all_reduce(results, group=group)  # in each column all ranks but one have 0
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return gradients[0].index_select(1, indices), None, None, None


def sum_over_row(own: Tensor, ranks: RowRanks | None) -> Tensor:
    """Return the sum of a tensor over the ranks of a row, on each of them.

    Its gradient flows into the tensor of each rank once, as in complete_results.
    """
    if ranks is None:
        return own
    total: Tensor = _SumOverRow.apply(own, ranks.group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _exchange(tensor: Tensor, ranks: RowRanks) -> Tensor:
    """Return, as [ranks, ...], what each rank has at this rank's place of the first dimension."""
    counts = (1,) * ranks.size
    received: Tensor = _AllToAll.apply(tensor, counts, counts, ranks.group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """Send consecutive rows of a tensor to the ranks. The backward sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.send_counts, ctx.receive_counts, ctx.group = send_counts, receive_counts, group
        return _all_to_all(tensor, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.receive_counts, ctx.send_counts, ctx.group), None, None, None


def _all_to_all(tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Any) -> Tensor:
    received = tensor.new_empty(sum(receive_counts), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), [*receive_counts], [*send_counts], group=group)
    return received
