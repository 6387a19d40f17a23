"""Dry runs: update passes over dummy groups, whose gradients are discarded.

They show how much memory a pass takes before the first real update; see budget.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from typing import Protocol

import torch

from trigon.algorithms.reduce import Denominators
from trigon.algorithms.unread import UnreadMetrics
from trigon.data.packing import Positions, pack_train, tokens_of
from trigon.models.policy import Policy
from trigon.training.parallel import ProcessGroup
from trigon.training.scorer import LocalScorer
from trigon.training.step import to_device
from trigon.types import (
    Completion,
    MicroBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Vision,
)


class Backward(Protocol):
    """Makes the forward and backward pass of one micro-batch, as an update does."""

    def __call__(
        self, batch: MicroBatch, denominators: Denominators, *, run_dummy_vision: bool, gradient_scale: float
    ) -> UnreadMetrics: ...


@contextmanager
def update_passes(
    scorer: LocalScorer,
    free_gradients: Callable[[], None],
    backward: Backward,
    idle_backward: Callable[[bool], None],
    *,
    positions: Positions,
    process_group: ProcessGroup,
) -> Iterator[Callable[[Sequence[TrainGroup]], None]]:
    """Return a context with a function that makes one update pass over all groups in one row.

    Gradients accumulate inside the context and are discarded at its end. All ranks have to make the
    same passes.

    Args:
        scorer: of the policy that is trained; gives the policy, its device and its precision.
        backward: of the engine. idle_backward: makes a pass whose gradient is zero; gets whether
            the vision tower runs.
    """
    policy = scorer.policy

    def dry_run(groups: Sequence[TrainGroup]) -> None:
        [batch] = pack_train(groups, max_tokens=sum(map(tokens_of, groups)), positions=positions)
        process_group.before_forward(policy, sync_gradients=False)
        backward(
            to_device(batch, scorer.device),
            Denominators(tokens=len(batch.loss_mask), sequences=batch.num_sequences),
            run_dummy_vision=bool(batch.packed.visions),
            gradient_scale=1.0,
        )

    try:
        yield dry_run
        # FSDP would add deferred gradients of a sharded policy to the first real update.
        process_group.before_forward(policy, sync_gradients=True)
        idle_backward(True)
    finally:
        process_group.reshard(policy)
        free_gradients()


def dummy_group(
    policy: Policy,
    *,
    prompt_tokens: int,
    response_tokens: int,
    image_pixels: int | None,
    num_completions: int,
) -> TrainGroup:
    """Return a group of the given lengths, whose prompt is full of images.

    A model without a vision tower gets a prompt of text. All tokens are the same one and all pixels
    are 0: the memory of a pass does not depend on them.

    Args:
        image_pixels: pixels of the largest image; None: no limit.
    """
    config = policy.model.config
    special = {*policy.banned_token_ids, *policy.family.media_token_ids(config)}
    word = next(token for token in range(len(special) + 1) if token not in special)
    image_tokens, grids = _images(policy, prompt_tokens, image_pixels, word)
    patches = sum(math.prod(grid) for grid in grids)
    vision = Vision(
        pixel_values=torch.zeros(patches, policy.family.values_per_patch(config)) if grids else torch.zeros(0, 0),
        grid_thw=torch.tensor(grids, dtype=torch.int64),
        hashes=(),  # their features are not cached
    )
    ones = torch.ones(response_tokens)
    sequence = TrainSequence(
        token_ids=(word,) * response_tokens,
        loss_mask=ones,
        advantages=ones,
        sampling_logprobs=-ones,
        old_logprobs=-ones,
        ref_logprobs=-ones,
        values=ones,
        returns=ones,
    )
    prompt = Prompt(
        prompt_id="dummy",
        token_ids=(*image_tokens, *[word] * (prompt_tokens - len(image_tokens))),
        vision=vision if grids else None,
        text="",
        ground_truth=None,
        row={},
        image_refs=(),
    )
    return TrainGroup(prompt, (sequence,) * num_completions)


def as_rollouts(groups: Sequence[TrainGroup]) -> list[RolloutGroup]:
    """Return dummy groups in the form in which they are scored."""
    score = Score(overall=0.0, parts={}, outcome="ok", error="")
    return [
        RolloutGroup(
            group.prompt,
            tuple(
                Rollout(Completion(part.token_ids, (0.0,) * len(part.token_ids), "length", "", 0), score)
                for part in group.sequences
            ),
        )
        for group in groups
    ]


def _images(
    policy: Policy, prompt_tokens: int, image_pixels: int | None, word: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the tokens and grids of as many images of the largest size as fit into a prompt.

    Every image is followed by one word, and at least one token of the prompt is not an image's.
    """
    family, config = policy.family, policy.model.config
    if not family.has_vision:
        return [], []
    merge = family.spatial_merge(config)
    max_tokens = prompt_tokens - 1
    if family.tiles:
        side = family.patches_per_side(config) // merge
    else:
        tokens = max_tokens
        if image_pixels is not None:
            tokens = min(max_tokens, image_pixels // (family.patch_size(config) * merge) ** 2)
        side = max(isqrt(tokens), 1)
    grid = (1, side * merge, side * merge)
    [tokens] = family.count_image_tokens(config, torch.tensor([grid]), ())
    count = max_tokens // (tokens + 1)
    return [*[family.image_token_id(config)] * tokens, word] * count, [grid] * count
