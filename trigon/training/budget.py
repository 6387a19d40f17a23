"""How many tokens a pass may take on a device, found by making a few real passes and measuring their memory.

The memory of a pass is close to

    fixed + by_prompt * (tokens of prompts, images among them) + by_answer * (tokens of answers)

so that three passes over made-up groups tell it: some answers to a prompt, twice as many, and two such prompts. What a
row really holds cannot be known beforehand, so all of its tokens count as the dearer kind. A last pass, as large as the
budget, has to prove it.

Knows a train engine and a device's memory. Refuses to know configuration, files and Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, isqrt

import torch

from trigon.data.packing import tokens_of
from trigon.errors import ConfigError
from trigon.models.policy import Policy
from trigon.training.local import LocalScorer, LocalTrainEngine
from trigon.training.memory import Memory
from trigon.training.parallel import ProcessGroup
from trigon.training.protocol import LogprobEngine
from trigon.types import (
    Completion,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    TrainGroup,
    TrainSequence,
    Vision,
)

HEADROOM = 0.1
"""Share of a device's memory that no pass may take: what an allocator cannot use, kernels' own buffers, others'."""

_ROUND = 256  # budgets are multiples of this, which are easier to read


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a run's groups have at most.

    prompt_tokens, response_tokens: of the longest. image_pixels: of the largest image; None: no limit.
    update_tokens, step_tokens: all that could be in the passes of one update, and of those without gradient.
    """

    prompt_tokens: int
    response_tokens: int
    image_pixels: int | None
    update_tokens: int
    step_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which each pass has to hold."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    """How many tokens a pass may take with gradient (update) and without (experience).

    update_bytes, experience_bytes: of the device that are then taken, by anything. device, device_bytes: which device,
    and how much it has: a rank's share.
    """

    update_tokens: int
    update_bytes: int
    experience_tokens: int
    experience_bytes: int
    device: str
    device_bytes: int


def tune_engines(
    trainer: LocalTrainEngine,
    reference: LogprobEngine | None,
    memory: Memory,
    lengths: Lengths,
    process_group: ProcessGroup,
    *,
    known: Budgets | None,
) -> Budgets:
    """Do what find_budgets does, and have the engines pack by what was found from now on."""
    scorer = reference if isinstance(reference, LocalScorer) else None  # otherwise it is the trainer's own
    budgets = measure_budgets(trainer, scorer, memory, lengths, process_group, known=known)
    trainer.use_budgets(update_max_tokens=budgets.update_tokens, score_max_tokens=budgets.experience_tokens)
    if scorer is not None:
        scorer.use_budget(budgets.experience_tokens)
    return budgets


def measure_budgets(
    trainer: LocalTrainEngine,
    reference: LocalScorer | None,
    memory: Memory,
    lengths: Lengths,
    process_group: ProcessGroup,
    *,
    known: Budgets | None,
) -> Budgets:
    """Return what all ranks can take. To be called before the first update, on all of them, with the rollout engine
    asleep; nothing of the engines changes.

    known: what was found before, and is returned if every rank's device is of the same kind.
    Raises: ConfigError if the longest sequence does not fit.
    """
    [strangers] = process_group.totals([float(known is None or known.device != memory.device_name)])
    if known is not None and strangers == 0:
        return known
    fitting = _Fitting(trainer.policy, memory, lengths, process_group)
    with trainer.dry_run_updates() as update:
        fitting.try_first(update, what="an update's pass")  # from here on there are gradients, as in most such passes
        update_tokens, update_bytes = fitting.largest(
            update, to_come=trainer.optimizer_bytes, most=lengths.update_tokens, what="an update's pass"
        )
    found = [
        fitting.largest(
            partial(_scored, score),
            to_come=trainer.optimizer_bytes,
            most=lengths.step_tokens,
            what="a pass without gradient",
        )
        for score in (trainer.dry_run, *(() if reference is None else (reference.dry_run,)))
    ]
    return Budgets(
        update_tokens=update_tokens,
        update_bytes=update_bytes,
        experience_tokens=min(tokens for tokens, _ in found),
        experience_bytes=max(taken for _, taken in found),
        device=memory.device_name,
        device_bytes=memory.total_bytes,
    )


def _scored(score: Callable[[Sequence[RolloutGroup]], object], groups: Sequence[TrainGroup]) -> None:
    score(_sampled(groups))


Pass = Callable[[Sequence[TrainGroup]], object]
"""Makes a pass over groups, in one row."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The memory of a pass in bytes: however short it is, and for each token of its row."""

    fixed: float
    by_token: float


class _Fitting:
    """Finds the largest row that a kind of pass can take, on all ranks."""

    def __init__(self, policy: Policy, memory: Memory, lengths: Lengths, process_group: ProcessGroup) -> None:
        self._memory = memory
        self._lengths = lengths
        self._process_group = process_group
        # So many answers that the chunks in which logits are computed are full, and grow no more.
        self._answers = ceil(policy.logprob_chunk / lengths.response_tokens)
        self._group = dummy_group(policy, lengths, self._answers)
        self._long_group = dummy_group(policy, lengths, 2 * self._answers)

    def try_first(self, make: Pass, *, what: str) -> None:
        """Make a pass as small as any that is measured. Raises: ConfigError if there is not enough memory for it."""
        if self._peak(make, [self._group]) is None:
            raise self._refusal(what, math.inf, self._memory.free_bytes())

    def largest(self, make: Pass, *, to_come: int, most: int, what: str) -> tuple[int, int]:
        """Return the most tokens of a pass, and the bytes of the device that are then taken.

        to_come: bytes that will be held by then, and are not yet. most: more tokens are not asked for.
        """
        memory, longest = self._memory, self._lengths.longest
        free = memory.free_bytes() - to_come
        room = free - HEADROOM * memory.total_bytes
        line = self._line(make, what)
        [shortfall] = self._process_group.largest([-(room - line.fixed) / line.by_token])
        tokens = int(-shortfall)
        if tokens < longest:
            raise self._refusal(what, line.fixed + longest * line.by_token, room)
        tokens = max(longest, min(tokens // _ROUND * _ROUND, most, memory.most_tokens or most))
        while (groups := tokens // tokens_of(self._group)) > 2 and not self._holds(make, groups, room):
            tokens = max(longest, int(0.8 * tokens) // _ROUND * _ROUND)
        [taken] = self._process_group.largest([memory.total_bytes - free + line.fixed + tokens * line.by_token])
        return tokens, int(taken)

    def _line(self, make: Pass, what: str) -> _Line:
        """Measure three passes: some answers to a prompt, twice as many, and two such prompts with theirs."""
        few = self._peak(make, [self._group])
        many = None if few is None else self._peak(make, [self._long_group])
        two = None if many is None else self._peak(make, [self._group] * 2)
        if few is None:
            raise self._refusal(what, math.inf, self._memory.free_bytes())
        prompt, answers = self._lengths.prompt_tokens, self._answers * self._lengths.response_tokens
        if many is None or two is None:  # the smallest row is all that there is room for
            return _Line(fixed=0.0, by_token=few / self._lengths.longest)
        by_answer, by_prompt = (many - few) / answers, (two - many) / prompt
        fixed = few - by_answer * answers - by_prompt * prompt
        return _Line(fixed=max(fixed, 0.0), by_token=max(by_answer, by_prompt, 1.0))

    def _holds(self, make: Pass, groups: int, room: float) -> bool:
        """Tell whether a row of so many groups really fits, on all ranks."""
        peak = self._peak(make, [self._group] * groups)
        [failed] = self._process_group.totals([float(peak is None or peak > room)])
        return failed == 0

    def _peak(self, make: Pass, groups: Sequence[TrainGroup]) -> int | None:
        """Return the bytes that a pass takes; None if there are not as many."""
        try:
            return self._memory.peak_bytes(lambda: make(groups))
        except torch.OutOfMemoryError:
            if self._process_group.size > 1:  # the others are in the middle of the same pass, and cannot be told
                raise
        return None

    def _refusal(self, what: str, needed: float, room: float) -> ConfigError:
        in_words = "more than there is" if math.isinf(needed) else f"about {needed / 2**30:,.2f} GiB"
        return ConfigError(
            f"{what} over the longest sequence, {self._lengths.longest:,} tokens, takes {in_words}, and "
            f"{self._memory.device_name} has {max(room, 0.0) / 2**30:,.2f} GiB left for it beside weights, gradients, "
            "optimizer and a reserve; set worker.actor.model.enable_gradient_checkpointing=true, lower "
            "data.max_prompt_length or data.max_response_length, or use more workers (trainer.n_gpus_per_node)"
        )


def dummy_group(policy: Policy, lengths: Lengths, answers: int) -> TrainGroup:
    """Return a prompt of the greatest length, filled with images where the model sees any, and so many answers to it.

    All tokens are the same one, and all pixels 0: what they are does not change what a pass takes.
    """
    config = policy.model.config
    never = {*policy.banned_token_ids, *policy.family.media_token_ids(config)}
    word = next(token for token in range(len(never) + 1) if token not in never)
    token_ids, grids = _images(policy, lengths, word)
    patches = sum(math.prod(grid) for grid in grids)
    vision = Vision(
        pixel_values=torch.zeros(patches, policy.family.values_per_patch(config)) if grids else torch.zeros(0, 0),
        grid_thw=torch.tensor(grids, dtype=torch.int64),
        hashes=(),  # so that nothing is remembered of them
    )
    ones = torch.ones(lengths.response_tokens)
    sequence = TrainSequence(
        token_ids=(word,) * lengths.response_tokens,
        loss_mask=ones,
        advantages=ones,
        sampling_logprobs=-ones,
        old_logprobs=-ones,
        ref_logprobs=-ones,
    )
    prompt = Prompt(
        prompt_id="made up",
        token_ids=(*token_ids, *[word] * (lengths.prompt_tokens - len(token_ids))),
        vision=vision if grids else None,
        text="",
        ground_truth=None,
        row={},
        image_refs=(),
    )
    return TrainGroup(prompt, (sequence,) * answers)


def _images(policy: Policy, lengths: Lengths, word: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the beginning of a prompt with as many images of the largest size as fit, and their grids."""
    family, config = policy.family, policy.model.config
    if not family.has_vision:
        return [], []
    merge = family.spatial_merge(config)
    room = lengths.prompt_tokens - 1  # at least one token that is no image's
    if family.tiles:
        side = family.patches_per_side(config) // merge
    else:
        allowed = room
        if lengths.image_pixels is not None:
            allowed = min(room, lengths.image_pixels // (family.patch_size(config) * merge) ** 2)
        side = max(isqrt(allowed), 1)
    count = room // (side * side + 1)
    placeholders = [family.image_token_id(config)] * side * side
    return [*placeholders, word] * count, [(1, side * merge, side * merge)] * count


def _sampled(groups: Sequence[TrainGroup]) -> list[RolloutGroup]:
    """Return the same groups as they are before they are to train."""
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
