"""Lays groups out in rows of at most max_tokens: what one forward of the policy takes.

A group costs its prompt once and each completion, P + R1 + ... + Rn tokens. One that is too large for a row is split
into parts, each with the prompt (and its images) again. A completion that does not fit behind its prompt gets a row
of its own, however long: nothing is dropped or cut.

There are as few rows as best fit finds, and then all are about equally full, since the fullest row decides the memory
of a step, and one that is nearly empty costs the time of a pass for little. The parts of one group are evened out in
the same way, unless that would take more rows.

The order is settled by lengths alone, so the same groups always give the same rows: parts are placed from the most
costly to the least (equal ones as they came). Rows are then ordered by the first group that they hold, groups within a
row as they came, completions within a part as they came.

Knows lengths and the passports. Refuses to know models: positions are handed in as a function.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trigon.models.positions import completion_positions
from trigon.types import GroupSpan, MicroBatch, PackedGroups, Prompt, RolloutGroup, TrainGroup, TrainSequence

Positions = Callable[[Prompt], Tensor]
"""Gives the positions of a prompt's tokens, [1 or 3, P] int64 on the CPU."""

_Fit = Callable[[Sequence[int], int], list[list[int]]]
"""Given costs and a capacity, returns bins of indices."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """A packed row, and whose completions are in it.

    owners: (group, index within the group) of each completion, in row order.

    Example: group 4, split, has its completions 0 and 2 here, then group 5 its only one: ((4, 0), (4, 2), (5, 0)).
    """

    packed: PackedGroups
    owners: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some completions of a group (ascending indices), or all of them, with the prompt they share."""

    group: int
    completions: tuple[int, ...]
    cost: int


def pack_rollouts(groups: Sequence[RolloutGroup], *, max_tokens: int, positions: Positions) -> list[PackedRow]:
    """Pack sampled completions for passes that only want log-probabilities. Returns rows in the order told above."""
    return _pack(
        [group.prompt for group in groups],
        [[rollout.completion.token_ids for rollout in group.rollouts] for group in groups],
        max_tokens=max_tokens,
        positions=positions,
    )


def pack_train(groups: Sequence[TrainGroup], *, max_tokens: int, positions: Positions) -> list[MicroBatch]:
    """Pack completions with what the loss needs of each token. Returns micro-batches in the order told above.

    Every completion is kept, one without any trained token too. The groups are all of one update, so either all
    sequences have old_logprobs or none has; likewise ref_logprobs.
    """
    rows = _pack(
        [group.prompt for group in groups],
        [[sequence.token_ids for sequence in group.sequences] for group in groups],
        max_tokens=max_tokens,
        positions=positions,
    )
    return [_micro_batch(row.packed, [groups[group].sequences[index] for group, index in row.owners]) for row in rows]


def tokens_of(group: RolloutGroup | TrainGroup) -> int:
    """Return how many tokens a group has in a row: its prompt once, and every completion."""
    match group:
        case RolloutGroup(prompt=prompt, rollouts=rollouts):
            lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
        case TrainGroup(prompt=prompt, sequences=sequences):
            lengths = [len(sequence.token_ids) for sequence in sequences]
    return len(prompt.token_ids) + sum(lengths)


def by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> list[list[Tensor]]:
    """Give per-token results back: [S] for each row -> for each group, for each of its completions, its own [R]."""
    found: dict[tuple[int, int], Tensor] = {}
    for row, value in zip(rows, values, strict=True):
        lengths = [end - start for span in row.packed.spans for start, end in span.completions]
        found.update(zip(row.owners, torch.split(value, lengths), strict=True))
    result: list[list[Tensor]] = []
    for group, index in sorted(found):
        if index == 0:
            result.append([])
        assert (group, index) == (len(result) - 1, len(result[-1]))
        result[-1].append(found[group, index])
    return result


def _pack(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[tuple[int, ...]]],
    *,
    max_tokens: int,
    positions: Positions,
) -> list[PackedRow]:
    lengths = [
        (len(prompt.token_ids), [len(token_ids) for token_ids in group])
        for prompt, group in zip(prompts, completions, strict=True)
    ]
    prompt_positions = [positions(prompt) for prompt in prompts]
    return [_row(row, prompts, completions, prompt_positions) for row in _layout(lengths, max_tokens=max_tokens)]


def _layout(lengths: Sequence[tuple[int, Sequence[int]]], *, max_tokens: int) -> list[list[_Part]]:
    """Place groups, given as (P, [R1, ..., Rn]), into as few rows as best fit finds, about equally full."""
    rows = min((_placed(lengths, max_tokens, fit) for fit in (_evenly, _best_fit)), key=len)  # of equals the first
    for row in rows:
        row.sort(key=lambda part: (part.group, part.completions))
    rows.sort(key=lambda row: (row[0].group, row[0].completions))
    return rows


def _placed(lengths: Sequence[tuple[int, Sequence[int]]], max_tokens: int, fit: _Fit) -> list[list[_Part]]:
    """Return the parts in each row. fit: by which groups are split.

    Halves of equal size leave rows half empty where two of them do not fit, which a large and a small part would not.
    """
    parts = [
        part for group, (prompt, rest) in enumerate(lengths) for part in _split(group, prompt, rest, max_tokens, fit)
    ]
    return [[parts[index] for index in row] for row in _evenly([part.cost for part in parts], max_tokens)]


def _split(group: int, prompt: int, completions: Sequence[int], max_tokens: int, fit: _Fit) -> list[_Part]:
    """Cut a group into as few parts as best fit finds: usually one."""
    return [
        _Part(group, tuple(sorted(part)), prompt + sum(completions[index] for index in part))
        for part in fit(completions, max_tokens - prompt)
    ]


def _evenly(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Return as many bins of indices as _best_fit does, with sums that lie close together.

    The most costly first, each goes into the emptiest bin: then the largest and the smallest sum differ by at most one
    cost. Where that does not fit, best fit places them, in the smallest bins of which as many suffice.

    Example: costs 5, 4, 3, 2 in bins of 10: [[0, 3], [1, 2]], 7 each. Of 5, 5, 4, 4, 2 the emptiest bin would come to
    11: [[0, 1], [2, 3, 4]].
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
    """Return what best fit makes of smaller bins, as long as that takes no more of them than the given ones.

    MULTIFIT: Coffman, Garey and Johnson, "An application of bin-packing to multiprocessor scheduling", 1978.
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
    """Return bins of indices: one bin if all costs fit together; a cost above the capacity has a bin to itself.

    The most costly first, each goes into the fullest bin that still has room.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, the bin's number), ascending
    for index in _largest_first(costs):
        fullest = bisect_left(room, (costs[index], 0))
        if fullest == len(room):
            left, number = capacity, len(bins)
            bins.append([])
        else:
            left, number = room.pop(fullest)
        bins[number].append(index)
        insort(room, (left - costs[index], number))
    return bins


def _largest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: -costs[index])


def _row(
    parts: Sequence[_Part],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[tuple[int, ...]]],
    prompt_positions: Sequence[Tensor],
) -> PackedRow:
    token_ids: list[int] = []
    positions: list[Tensor] = []
    spans: list[GroupSpan] = []
    owners: list[tuple[int, int]] = []
    for part in parts:
        start = len(token_ids)
        token_ids += prompts[part.group].token_ids
        positions.append(prompt_positions[part.group])
        prompt_span = (start, len(token_ids))
        completion_spans = []
        for index in part.completions:
            completion = completions[part.group][index]
            completion_spans.append((len(token_ids), len(token_ids) + len(completion)))
            token_ids += completion
            positions.append(completion_positions(prompt_positions[part.group], len(completion)))
            owners.append((part.group, index))
        spans.append(GroupSpan(prompt=prompt_span, completions=tuple(completion_spans)))
    visions = [vision for part in parts if (vision := prompts[part.group].pixels()) is not None]
    return PackedRow(
        packed=PackedGroups(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            position_ids=torch.cat(positions, 1),
            spans=tuple(spans),
            pixel_values=torch.cat([vision.pixel_values for vision in visions]) if visions else None,
            grid_thw=torch.cat([vision.grid_thw for vision in visions]) if visions else None,
            vision_hashes=tuple(key for vision in visions for key in vision.hashes),
        ),
        owners=tuple(owners),
    )


def _micro_batch(packed: PackedGroups, sequences: Sequence[TrainSequence]) -> MicroBatch:
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    return MicroBatch(
        packed=packed,
        num_sequences=len(sequences),
        sequence_index=torch.arange(len(sequences)).repeat_interleave(lengths),
        loss_mask=torch.cat([sequence.loss_mask for sequence in sequences]),
        advantages=torch.cat([sequence.advantages for sequence in sequences]),
        sampling_logprobs=torch.cat([sequence.sampling_logprobs for sequence in sequences]),
        old_logprobs=_all_or_none([sequence.old_logprobs for sequence in sequences]),
        ref_logprobs=_all_or_none([sequence.ref_logprobs for sequence in sequences]),
    )


def _all_or_none(values: Sequence[Tensor | None]) -> Tensor | None:
    given = [value for value in values if value is not None]
    assert len(given) in (0, len(values))
    return torch.cat(given) if given else None
