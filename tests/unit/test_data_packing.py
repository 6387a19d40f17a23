"""Groups are packed into rows: which completions share a row, and the content of a row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from trigon.data.packing import by_group, pack_rollouts, pack_train
from trigon.types import (
    Completion,
    GroupSpan,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Vision,
)


def make_prompt(name: int, length: int, images: int = 0) -> Prompt:
    """Return a prompt with token ids 1000 * name + position."""
    vision = Vision(
        pixel_values=torch.full((4 * images, 2), float(name)),
        grid_thw=torch.tensor([[1, 2, 2]] * images),
        hashes=("",) * images,
    )
    return Prompt(
        prompt_id=str(name),
        token_ids=tuple(1000 * name + position for position in range(length)),
        vision=vision if images else None,
        text="",
        ground_truth=None,
        row={},
        image_refs=("",) * images,
    )


def completion_ids(group: int, index: int, length: int) -> tuple[int, ...]:
    return tuple(1000 * group + 100 * (index + 1) + position for position in range(length))


def rollout_group(name: int, prompt_length: int, lengths: Sequence[int], images: int = 0) -> RolloutGroup:
    return RolloutGroup(
        prompt=make_prompt(name, prompt_length, images),
        rollouts=tuple(
            Rollout(
                Completion(completion_ids(name, index, length), (0.0,) * length, "stop", "", 0),
                Score(0.0, {}, "ok", ""),
            )
            for index, length in enumerate(lengths)
        ),
    )


def positions(prompt: Prompt) -> Tensor:
    return torch.arange(len(prompt.token_ids))[None]


def owners(groups: Sequence[RolloutGroup], max_tokens: int) -> list[list[tuple[int, int]]]:
    return [list(row.owners) for row in pack_rollouts(groups, max_tokens=max_tokens, positions=positions)]


def test_a_row_has_the_prompt_then_the_completions_with_continued_positions() -> None:
    (row,) = pack_rollouts([rollout_group(1, 3, [2, 1])], max_tokens=6, positions=positions)
    assert row.packed.token_ids.tolist() == [1000, 1001, 1002, 1100, 1101, 1200]
    assert row.packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert row.packed.spans == (GroupSpan(prompt=(0, 3), completions=((3, 5), (5, 6))),)
    assert row.owners == ((0, 0), (0, 1))
    assert row.packed.visions == ()


def test_groups_share_a_row_in_their_order() -> None:
    (row,) = pack_rollouts(
        [rollout_group(1, 1, [1], images=1), rollout_group(2, 1, [5]), rollout_group(3, 1, [2], images=2)],
        max_tokens=11,
        positions=positions,
    )
    assert row.owners == ((0, 0), (1, 0), (2, 0))
    assert [span.prompt for span in row.packed.spans] == [(0, 1), (2, 3), (8, 9)]
    assert [vision.pixel_values[:, 0].tolist() for vision in row.packed.visions] == [[1.0] * 4, [3.0] * 8]
    assert [len(vision.grid_thw) for vision in row.packed.visions] == [1, 2]


def groups_that_cost(*costs: int) -> list[RolloutGroup]:
    return [rollout_group(name, 1, [cost - 1]) for name, cost in enumerate(costs)]


def costs_of(groups: Sequence[RolloutGroup], max_tokens: int) -> list[int]:
    rows = pack_rollouts(groups, max_tokens=max_tokens, positions=positions)
    return [len(row.packed.token_ids) for row in rows]


@pytest.mark.parametrize(
    ("costs", "max_tokens", "rows"),
    [
        # Two rows of 10 by best fit, 6+4 | 5+2; evenly:
        ((2, 4, 5, 6), 10, [[2, 6], [4, 5]]),
        # Evenly 6+3 | 5+4, and the last 2 fits nowhere; by best fit:
        ((2, 3, 4, 5, 6), 10, [[2, 3, 5], [4, 6]]),
        # Best fit in rows of 20: 11+8 | 13+5 | 5, which leaves a row nearly empty.
        ((13, 11, 8, 5, 5), 20, [[13], [11, 5], [8, 5]]),
        # Best fit in rows of 20: 11+9 | 10+8 | 8+7+5 | 6+5; rows of 18 suffice.
        ((11, 10, 9, 8, 8, 7, 6, 5, 5), 20, [[6, 5, 5], [9, 8], [10, 8], [11, 7]]),
    ],
)
def test_groups_are_spread_evenly_over_few_rows(costs: Sequence[int], max_tokens: int, rows: list[list[int]]) -> None:
    packed = owners(groups_that_cost(*costs), max_tokens)
    assert sorted([costs[group] for group, _ in row] for row in packed) == sorted(rows)


@pytest.mark.parametrize(
    ("groups", "max_tokens", "rows"),
    [
        # Five completions of 3 after a prompt of 4: not 16 and 7.
        ([(4, [3] * 5)], 16, [13, 10]),
        # Halves of 13 and 10 for two groups take four rows, since no two of them fit.
        ([(4, [3] * 5)] * 2, 16, [16, 14, 16]),
        # A completion longer than the budget has a row of its own, and no prompt is truncated.
        ([(3, [2, 50, 2])], 10, [7, 53]),
        ([(30, [2, 3])], 10, [32, 33]),
    ],
)
def test_parts_of_a_group_are_even_unless_that_takes_more_rows(
    groups: list[tuple[int, list[int]]], max_tokens: int, rows: list[int]
) -> None:
    made = [rollout_group(name, *shape) for name, shape in enumerate(groups, 1)]
    assert costs_of(made, max_tokens) == rows


def test_a_group_that_is_too_large_is_split_and_its_prompt_repeated() -> None:
    group = rollout_group(7, 4, [3, 2, 3, 2], images=1)
    rows = pack_rollouts([group], max_tokens=9, positions=positions)
    assert [row.owners for row in rows] == [((0, 0), (0, 1)), ((0, 2), (0, 3))]
    for row in rows:
        assert row.packed.token_ids[:4].tolist() == [7000, 7001, 7002, 7003]
        assert row.packed.visions == (group.prompt.vision,)  # its pixels are not copied


@pytest.mark.parametrize("seed", range(6))
def test_every_completion_is_packed_once_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    groups = [
        rollout_group(name, draw.randint(1, 12), [draw.randint(1, 12) for _ in range(draw.randint(1, 6))])
        for name in range(draw.randint(1, 12))
    ]
    rows = pack_rollouts(groups, max_tokens=24, positions=positions)
    assert sorted(owner for row in rows for owner in row.owners) == [
        (g, i) for g, group in enumerate(groups) for i in range(len(group.rollouts))
    ]
    assert all(len(row.packed.token_ids) <= 24 for row in rows)
    again = pack_rollouts(groups, max_tokens=24, positions=positions)
    assert [row.owners for row in again] == [row.owners for row in rows]


def best_fit(costs: Sequence[int], capacity: int) -> list[int]:
    """Return the tokens of each row that best fit finds; packing must not take more rows."""
    sums: list[int] = []
    for cost in sorted(costs, reverse=True):
        fitting = [number for number, total in enumerate(sums) if total + cost <= capacity]
        if fitting:
            sums[max(fitting, key=lambda number: sums[number])] += cost
        else:
            sums.append(cost)
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_as_few_as_by_best_fit_and_about_equally_full(seed: int) -> None:
    draw = random.Random(seed)
    largest = draw.choice([30, 60, 150])
    costs = [draw.randint(largest // 4, largest) for _ in range(draw.randint(1, 50))]
    by_best_fit = best_fit(costs, 100)
    rows = costs_of(groups_that_cost(*costs), 100)
    assert sum(rows) == sum(costs)
    assert len(rows) == len(by_best_fit)
    assert all(row <= 100 or row in costs for row in rows)
    assert max(rows) <= max(by_best_fit)
    if sum(costs) / len(rows) + max(costs) <= 100:  # then the emptiest row always has room
        assert max(rows) - min(rows) <= max(costs)
    if max(costs) <= 60:
        assert min(rows) >= 0.5 * max(rows)


def test_results_are_returned_by_group() -> None:
    groups = [rollout_group(0, 2, [3, 1, 4]), rollout_group(1, 3, [2, 2])]
    rows = pack_rollouts(groups, max_tokens=7, positions=positions)
    assert len(rows) > 2
    targets = []
    for row in rows:  # the completion tokens serve as the per-token result
        indices = [torch.arange(*part) for span in row.packed.spans for part in span.completions]
        targets.append(row.packed.token_ids[torch.cat(indices)])
    returned = by_group(rows, targets)
    for group, values in zip(groups, returned, strict=True):
        assert [tuple(value.tolist()) for value in values] == [r.completion.token_ids for r in group.rollouts]


def train_sequence(group: int, index: int, length: int, *, old: bool) -> TrainSequence:
    value = torch.full((length,), 10.0 * group + index)
    return TrainSequence(
        token_ids=completion_ids(group, index, length),
        loss_mask=torch.ones(length),
        advantages=value,
        sampling_logprobs=-value,
        old_logprobs=value + 0.5 if old else None,
        ref_logprobs=None,
    )


def test_a_micro_batch_lists_every_completion_token_in_row_order() -> None:
    groups = [
        TrainGroup(make_prompt(0, 2), tuple(train_sequence(0, i, n, old=True) for i, n in enumerate([1, 2]))),
        TrainGroup(make_prompt(1, 2), (train_sequence(1, 0, 3, old=True),)),
    ]
    (batch,) = pack_train(groups, max_tokens=20, positions=positions)
    assert batch.num_sequences == 3
    assert batch.sequence_index.tolist() == [0, 1, 1, 2, 2, 2]
    assert batch.advantages.tolist() == [0.0, 1.0, 1.0, 10.0, 10.0, 10.0]
    assert batch.sampling_logprobs.tolist() == [0.0, -1.0, -1.0, -10.0, -10.0, -10.0]
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [0.5, 1.5, 1.5, 10.5, 10.5, 10.5]
    assert batch.ref_logprobs is None
    assert batch.loss_mask.tolist() == [1.0] * 6
    assert batch.packed.spans[1] == GroupSpan(prompt=(5, 7), completions=((7, 10),))


def test_training_keeps_a_completion_without_a_trained_token() -> None:
    sequence = TrainSequence((5, 6), torch.zeros(2), torch.zeros(2), torch.zeros(2), None, None)
    (batch,) = pack_train([TrainGroup(make_prompt(0, 2), (sequence,))], max_tokens=20, positions=positions)
    assert batch.num_sequences == 1
    assert batch.loss_mask.tolist() == [0.0, 0.0]
    assert batch.old_logprobs is None
