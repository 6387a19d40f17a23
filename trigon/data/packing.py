"""Packs groups into rows of at most max_tokens, the input of one forward pass of the policy.

A group takes its prompt once and each completion, P + R1 + ... + Rn tokens. A group that is too
large for a row is split into parts, each of which repeats the prompt (and its images). A completion
brings the images that it observed; one that does not fit after its prompt gets a row of its own, of
any length: nothing is dropped or truncated.

Best-fit packing determines the number of rows, and all rows are about equally full, since the
fullest row determines the memory of a step, and a nearly empty row costs a pass for little work.
The parts of one group are evened out in the same way, unless that takes more rows.

The layout depends on lengths alone, so equal lengths always give equal rows: parts are placed from
the most tokens to the least (equal ones in their order). Rows are then ordered by their first
group; groups within a row and completions within a part keep their order.

Depends on no model: positions are computed by a function argument.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.models.positions import completion_positions
from trigon.types import (
    NO_RECORD,
    Completion,
    GroupSpan,
    MicroBatch,
    PackedGroups,
    Prompt,
    RolloutGroup,
    TrainGroup,
    TrainSequence,
    Vision,
    pixels_of,
)

_Sampled = Completion | TrainSequence

Positions = Callable[[Prompt | Completion | TrainSequence], Tensor]
"""Returns the positions of a prompt's tokens, [1 or 3, P] int64 on the CPU; see positions_of."""

_Fit = Callable[[Sequence[int], int], list[list[int]]]
"""Takes costs and a capacity, and returns bins of indices."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """A packed row, with the origin of its completions.

    owners: (group, index within the group) of each completion, in row order.

    Example: completions 0 and 2 of group 4, which was split, then the only one of group 5:
    ((4, 0), (4, 2), (5, 0)).
    """

    packed: PackedGroups
    owners: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some or all completions of a group, with its prompt.

    completions: ascending indices. cost: number of tokens.
    """

    group: int
    completions: tuple[int, ...]
    cost: int


def pack_rollouts(
    groups: Sequence[RolloutGroup | TrainGroup], *, max_tokens: int, positions: Positions
) -> list[PackedRow]:
    """Pack completions for computing log-probabilities."""
    prompt_positions = [positions(group.prompt) for group in groups]
    rows = _layout([_lengths_of(group) for group in groups], max_tokens=max_tokens)
    return [_build_row(row, groups, prompt_positions, positions) for row in rows]


def pack_train(groups: Sequence[TrainGroup], *, max_tokens: int, positions: Positions) -> list[MicroBatch]:
    """Pack completions with the per-token inputs of the loss.

    Every completion is kept, even if its loss_mask is all zero. Either all sequences have
    old_logprobs or none, and likewise ref_logprobs, values and returns.
    """
    rows = pack_rollouts(groups, max_tokens=max_tokens, positions=positions)
    return [_micro_batch(row, [groups[group].sequences[index] for group, index in row.owners]) for row in rows]


def tokens_of(group: RolloutGroup | TrainGroup) -> int:
    """Return how many tokens a group takes in a row: its prompt once, and every completion."""
    prompt, completions = _lengths_of(group)
    return prompt + sum(completions)


def longest_row(groups: Sequence[RolloutGroup | TrainGroup], *, max_tokens: int) -> int:
    """Return the tokens of the longest row into which groups are packed; 0 without groups."""
    return max(row_lengths([_lengths_of(group) for group in groups], max_tokens=max_tokens), default=0)


def row_lengths(groups: Sequence[tuple[int, Sequence[int]]], *, max_tokens: int) -> list[int]:
    """Return the tokens of each row into which groups of these lengths would be packed.

    groups: tokens of the prompt, and of each completion.
    """
    return [sum(part.cost for part in row) for row in _layout(groups, max_tokens=max_tokens)]


def by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split per-token results, [..., S] per row, into one tensor per completion, by group."""
    owned = by_owner(rows, values)
    result: list[list[Tensor]] = []
    for group, index in sorted(owned):
        if index == 0:
            result.append([])
        assert (group, index) == (len(result) - 1, len(result[-1]))
        result[-1].append(owned[group, index])
    return result


def by_owner(rows: Sequence[PackedRow | MicroBatch], values: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
    """Split per-token results, [..., S] per row, by (group, index) of the completion."""
    owned: dict[tuple[int, int], Tensor] = {}
    for row, value in zip(rows, values, strict=True):
        lengths = [_num_tokens(sampled) for span in row.packed.spans for sampled in span.sampled]
        owned.update(zip(row.owners, torch.split(value, lengths, dim=-1), strict=True))
    return owned


def _lengths_of(group: RolloutGroup | TrainGroup) -> tuple[int, list[int]]:
    return len(group.prompt.token_ids), [len(completion.token_ids) for completion in _completions_of(group)]


def _completions_of(group: RolloutGroup | TrainGroup) -> Sequence[_Sampled]:
    return [each.completion for each in group.rollouts] if isinstance(group, RolloutGroup) else group.sequences


def _layout(lengths: Sequence[tuple[int, Sequence[int]]], *, max_tokens: int) -> list[list[_Part]]:
    """Place groups, given as (P, [R1, ..., Rn]), into few and about equally full rows."""
    # min returns the first of several equals.
    rows = min((_place(lengths, max_tokens, fit) for fit in (_fit_evenly, _best_fit)), key=len)
    for row in rows:
        row.sort(key=lambda part: (part.group, part.completions))
    rows.sort(key=lambda row: (row[0].group, row[0].completions))
    return rows


def _place(lengths: Sequence[tuple[int, Sequence[int]]], max_tokens: int, fit: _Fit) -> list[list[_Part]]:
    """Return the parts in each row. fit: how groups are split into parts.

    Two equal parts of a group leave rows half empty if no two such parts fit into one row, unlike a
    large and a small part.
    """
    parts = [
        part
        for group, (prompt, completions) in enumerate(lengths)
        for part in _split(group, prompt, completions, max_tokens, fit)
    ]
    return [[parts[index] for index in row] for row in _fit_evenly([part.cost for part in parts], max_tokens)]


def _split(group: int, prompt: int, completions: Sequence[int], max_tokens: int, fit: _Fit) -> list[_Part]:
    """Split a group into as few parts as best fit finds: usually one."""
    return [
        _Part(group, tuple(sorted(part)), prompt + sum(completions[index] for index in part))
        for part in fit(completions, max_tokens - prompt)
    ]


def _fit_evenly(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Return as many bins of indices as _best_fit does, with similar sums.

    In descending order of cost, each index goes into the emptiest bin, so that the largest and the
    smallest sum differ by at most one cost. If one does not fit, best fit places all of them, with
    the smallest capacity that takes no more bins.

    Example: costs 5, 4, 3, 2 in bins of 10: [[0, 3], [1, 2]], 7 each. With costs 5, 5, 4, 4, 2 the
    emptiest bin would reach 11, so the result is [[0, 1], [2, 3, 4]].
    """
    bins = _best_fit(costs, capacity)
    even: list[list[int]] = [[] for _ in bins]
    sums = [0] * len(bins)
    for index in _largest_first(costs):
        emptiest = sums.index(min(sums))
        if even[emptiest] and sums[emptiest] + costs[index] > capacity:
            return _best_fit_in_smallest(costs, capacity, bins)
        even[emptiest].append(index)
        sums[emptiest] += costs[index]
    return even


def _best_fit_in_smallest(costs: Sequence[int], capacity: int, bins: list[list[int]]) -> list[list[int]]:
    """Return the bins of best fit at the smallest capacity that takes no more of them than bins.

    MULTIFIT: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor
    scheduling", 1978.
    """
    too_small = 0
    while capacity - too_small > 1:
        middle = (capacity + too_small) // 2
        tried = _best_fit(costs, middle)
        if len(tried) > len(bins):
            too_small = middle
        else:
            bins, capacity = tried, middle
    return bins


def _best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices; a cost above the capacity has a bin of its own.

    In descending order of cost, each index goes into the fullest bin with room for it.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (remaining capacity, number of the bin), ascending
    for index in _largest_first(costs):
        fullest = bisect_left(room, (costs[index], 0))
        if fullest == len(room):
            remaining, number = capacity, len(bins)
            bins.append([])
        else:
            remaining, number = room.pop(fullest)
        bins[number].append(index)
        insort(room, (remaining - costs[index], number))
    return bins


def _largest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: -costs[index])


def _build_row(
    parts: Sequence[_Part],
    groups: Sequence[RolloutGroup | TrainGroup],
    prompt_positions: Sequence[Tensor],
    positions: Positions,
) -> PackedRow:
    token_ids: list[int] = []
    position_ids: list[Tensor] = []
    spans: list[GroupSpan] = []
    owners: list[tuple[int, int]] = []
    visions: list[Vision | None] = []
    experts: list[tuple[int, Tensor | None]] = []  # of consecutive tokens: how many, and their record
    for part in parts:
        prompt, completions = groups[part.group].prompt, _completions_of(groups[part.group])
        start = len(token_ids)
        token_ids += prompt.token_ids
        position_ids.append(prompt_positions[part.group])
        visions.append(prompt.pixels())
        prompt_span = (start, len(token_ids))
        experts.append((len(token_ids) - start, _experts_of_prompt(completions)))
        completion_spans, sampled = [], []
        for index in part.completions:
            completion = completions[index]
            start, length = len(token_ids), len(completion.token_ids)
            completion_spans.append((start, start + length))
            sampled.append(tuple((start + first, start + end) for first, end in completion.sampled))
            token_ids += completion.token_ids
            own = None if completion.vision is None else positions(completion)
            position_ids.append(completion_positions(prompt_positions[part.group], length, own))
            visions.append(pixels_of(completion))
            used = completion.routed_experts
            experts.append((length, None if used is None else used.completion))
            owners.append((part.group, index))
        spans.append(GroupSpan(prompt_span, tuple(completion_spans), tuple(sampled), part.completions[0] > 0))
    return PackedRow(
        packed=PackedGroups(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            position_ids=torch.cat(position_ids, 1),
            spans=tuple(spans),
            visions=tuple(vision for vision in visions if vision is not None),
            routed_experts=_experts_of_row(experts),
        ),
        owners=tuple(owners),
    )


def _experts_of_prompt(completions: Sequence[_Sampled]) -> Tensor | None:
    """Return the record of the experts used for the prompt of a group; None if there is none."""
    used = (completion.routed_experts for completion in completions)
    return next((each.prompt for each in used if each is not None and each.prompt is not None), None)


def _experts_of_row(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """Return the experts of all tokens of a row, given the experts of consecutive parts."""
    shape = next((used.shape[1:] for _, used in parts if used is not None), None)
    if shape is None:
        return None
    return torch.cat(
        [torch.full((length, *shape), NO_RECORD, dtype=torch.int16) if used is None else used for length, used in parts]
    )


def _micro_batch(row: PackedRow, sequences: Sequence[TrainSequence]) -> MicroBatch:
    lengths = torch.tensor([_num_tokens(sequence.sampled) for sequence in sequences])
    loss_mask = torch.cat([sequence.loss_mask for sequence in sequences])
    return MicroBatch(
        packed=row.packed,
        owners=row.owners,
        num_sequences=len(sequences),
        sequence_index=torch.arange(len(sequences)).repeat_interleave(lengths),
        trainable=(loss_mask > 0).nonzero().flatten(),
        loss_mask=loss_mask,
        advantages=torch.cat([sequence.advantages for sequence in sequences]),
        sampling_logprobs=torch.cat([sequence.sampling_logprobs for sequence in sequences]),
        old_logprobs=_concatenate_optional([sequence.old_logprobs for sequence in sequences]),
        ref_logprobs=_concatenate_optional([sequence.ref_logprobs for sequence in sequences]),
        values=_concatenate_optional([sequence.values for sequence in sequences]),
        returns=_concatenate_optional([sequence.returns for sequence in sequences]),
    )


def _num_tokens(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def _concatenate_optional(values: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate values of which either all or none are None."""
    tensors = [value for value in values if value is not None]
    assert len(tensors) in (0, len(values))
    return torch.cat(tensors) if tensors else None
