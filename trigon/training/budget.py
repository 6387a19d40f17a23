"""Measures how many tokens a pass may take on a device, by dry runs over dummy groups.

The memory of a pass over one row is close to

    fixed + bytes_per_prompt_token * prompt tokens + bytes_per_completion_token * completion tokens

where prompt tokens include image tokens. Three passes determine the three numbers. The composition
of future rows is unknown, so every token counts as one of the more expensive kind. A last pass of
the size of the budget verifies the fit. Does not depend on configuration, files and Ray.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isqrt

import torch

from trigon.data.packing import tokens_of
from trigon.errors import ConfigError
from trigon.models.activation_offload import host_bytes_at_most
from trigon.models.policy import Policy
from trigon.training.critic import LocalCriticEngine, LocalTrunkCritic
from trigon.training.device_memory import Memory
from trigon.training.local import LocalTrainEngine
from trigon.training.parallel import ProcessGroup
from trigon.training.protocol import LogprobEngine
from trigon.training.scorer import LocalScorer
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
"""Fraction of a device's memory that passes leave free: fragmentation, buffers of kernels, other
processes.
"""

HOST_SHARE = 0.5
"""Fraction of the free host memory for offloaded activations: checkpoints and caches need some too.
"""

_KNOWN_HOST_SHARE = 0.6  # of budgets of an earlier run: what is free varies a little

_ROUND = 256  # budgets are multiples of this number, for readability

_REMEDIES = (
    "set {model}.enable_gradient_checkpointing=true and {model}.enable_activation_offload=true, lower "
    "data.max_prompt_length or data.max_response_length, or use more workers (trainer.n_gpus_per_node)"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Upper bounds of a run's groups and batches.

    prompt_tokens, response_tokens: tokens of the longest prompt and completion.
    image_pixels: pixels of the largest image; None: no limit.
    update_tokens: tokens of all groups of one update.
    step_tokens: tokens of all groups that are scored in one step.
    critic_update_tokens: tokens of all groups of one update of the critic; 0 without one.
    """

    prompt_tokens: int
    response_tokens: int
    image_pixels: int | None
    update_tokens: int
    step_tokens: int
    critic_update_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, which must fit into one pass."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Budgets:
    """The number of tokens that a pass may take with gradient (update) and without (experience).

    update_bytes, experience_bytes: memory of the device that is in use during such a pass, by all
    processes. device: its name. device_bytes: its total memory, or the share of this rank.
    critic_update_tokens, critic_experience_tokens: the same for the critic; 0 without one.
    host_bytes: the most that offloaded activations take in the host memory of a rank.
    """

    update_tokens: int
    update_bytes: int
    experience_tokens: int
    experience_bytes: int
    device: str
    device_bytes: int
    critic_update_tokens: int = 0
    critic_experience_tokens: int = 0
    host_bytes: int = 0


def tune_engines(
    trainer: LocalTrainEngine,
    reference: LogprobEngine | None,
    memory: Memory,
    lengths: Lengths,
    process_group: ProcessGroup,
    *,
    known: Budgets | None,
    critic: LocalCriticEngine | None = None,
    host_bytes: int | None = None,
) -> Budgets:
    """Return the token budgets that fit on every rank, and set them in the engines.

    All ranks call this together before the first update, while the rollout engine sleeps.

    Args:
        known: budgets of an earlier run, which are returned if all ranks have the same device, and
            host memory for their offloaded activations.
        host_bytes: free host memory for offloaded activations of this rank; None: not a limit. A
            critic has it too: memory.free_bytes, which comes last, returns what passes have cached.
    Raises: ConfigError if a pass over the longest sequence does not fit.
    """
    # With LoRA the reference is the trainer without its adapters, and has no budget of its own.
    scorer = reference if isinstance(reference, LocalScorer) else None
    # A critic on the policy's trunk makes the passes of the policy.
    on_trunk = isinstance(critic, LocalTrunkCritic)
    usable = math.inf if host_bytes is None else _KNOWN_HOST_SHARE * host_bytes
    is_other = known is None or known.device != memory.device_name or known.host_bytes > usable
    [num_others] = process_group.all_reduce_sum([float(is_other)])
    if known is not None and num_others == 0:
        budgets = known
    else:
        device = (memory, lengths, process_group, host_bytes)
        apart = None if on_trunk else critic
        budgets = _Tuner(trainer, *device).measure(
            () if scorer is None else (scorer,),
            reserved_bytes=trainer.optimizer_bytes + (0 if apart is None else apart.resting_bytes),
            limit=lengths.update_tokens,
        )
        if apart is not None:
            found = _Tuner(apart, *device).measure(
                (),
                reserved_bytes=trainer.resting_bytes + apart.optimizer_bytes,
                limit=lengths.critic_update_tokens,
                of=" of the critic",
            )
            apart.offload()
            budgets = replace(
                budgets,
                critic_update_tokens=found.update_tokens,
                critic_experience_tokens=found.experience_tokens,
                host_bytes=max(budgets.host_bytes, found.host_bytes),
            )
    if on_trunk:
        budgets = replace(
            budgets,
            critic_update_tokens=budgets.update_tokens,
            critic_experience_tokens=budgets.experience_tokens,
        )
    if critic is not None:
        critic.use_budgets(
            update_max_tokens=budgets.critic_update_tokens, score_max_tokens=budgets.critic_experience_tokens
        )
    trainer.use_budgets(update_max_tokens=budgets.update_tokens, score_max_tokens=budgets.experience_tokens)
    if scorer is not None:
        scorer.max_tokens = budgets.experience_tokens
    return budgets


def _score(dry_run: Callable[[Sequence[RolloutGroup]], object], groups: Sequence[TrainGroup]) -> None:
    dry_run(as_rollouts(groups))


Pass = Callable[[Sequence[TrainGroup]], object]
"""Makes one pass over all groups in one row."""


@dataclass(frozen=True, slots=True)
class _LinearFit:
    """The memory of a pass: fixed_bytes + bytes_per_token * tokens of the row."""

    fixed_bytes: float
    bytes_per_token: float

    def bytes_of(self, tokens: int) -> float:
        """Return the bytes that a row of this many tokens takes."""
        return self.fixed_bytes + tokens * self.bytes_per_token


class _Tuner:
    """Finds the longest row that fits on all ranks, for one kind of pass of an engine at a time."""

    def __init__(
        self,
        engine: LocalTrainEngine,
        memory: Memory,
        lengths: Lengths,
        process_group: ProcessGroup,
        host_bytes: int | None,
    ) -> None:
        """Make the groups of the passes. host_bytes: see tune_engines."""
        self._engine, self._memory, self._lengths = engine, memory, lengths
        self._process_group, self._host_bytes = process_group, host_bytes
        policy = engine.policy
        self._model = f"worker.{engine.name}.model"
        self._remedies = _REMEDIES.format(model=self._model)
        # Logits are computed in chunks of rows: from one full chunk on their memory is constant.
        # Of ranks that compute a row together each has a part of them.
        ranks_per_row = 1 if policy.row_ranks is None else policy.row_ranks.size
        self._num_completions = ceil(ranks_per_row * policy.logprob_chunk / lengths.response_tokens)
        self._longest, self._group, self._large_group = (
            dummy_group(policy, lengths, num_completions=num_completions)
            for num_completions in (1, self._num_completions, 2 * self._num_completions)
        )
        smallest = replace(lengths, prompt_tokens=1, response_tokens=1)
        self._smallest_group = dummy_group(policy, smallest, num_completions=1)

    def measure(self, scorers: Sequence[LocalScorer], *, reserved_bytes: int, limit: int, of: str = "") -> Budgets:
        """Return the budgets of the engine's passes.

        Args:
            scorers: other engines with the same budget without gradient.
            reserved_bytes: memory that is free now but in use when real passes are made.
            limit: number of tokens of an update that is enough.
            of: says in messages which engine's passes they are.
        Raises: ConfigError if the longest sequence does not fit, or its offloaded activations
        exceed host memory.
        """
        policy, what = self._engine.policy, f"an update's pass{of}"
        with self._engine.dry_run_updates() as update:  # offloaded weights are on the device then
            # The first pass allocates the gradients, which most passes find allocated.
            policy.forget_offloaded_bytes()
            if self._peak_bytes(update, [self._longest]) is None:
                raise self._does_not_fit(what, math.inf, self._memory.free_bytes())
            per_token = host_bytes_at_most(policy.offloaded_bytes) / tokens_of(self._longest)
            if per_token > 0:
                limit = self._host_limit(per_token, limit)
            update_tokens, update_bytes = self._max_tokens(update, reserved_bytes, limit, what)
        scored = [
            self._max_tokens(
                partial(_score, dry_run), reserved_bytes, self._lengths.step_tokens, f"a pass{of} without gradient"
            )
            for dry_run in (self._engine.dry_run, *(scorer.dry_run for scorer in scorers))
        ]
        tokens, used_bytes = zip(*scored, strict=True)
        [pinned_bytes] = self._process_group.all_reduce_max([int(update_tokens * per_token)])
        return Budgets(
            update_tokens,
            update_bytes,
            min(tokens),
            max(used_bytes),
            self._memory.device_name,
            self._memory.total_bytes,
            host_bytes=int(pinned_bytes),
        )

    def _host_limit(self, per_token: float, limit: int) -> int:
        """Return the limit, or fewer tokens of a row if their offloaded activations need more."""
        usable = math.inf if self._host_bytes is None else HOST_SHARE * self._host_bytes
        [shortfall] = self._process_group.all_reduce_max([-usable / per_token])
        if math.isinf(shortfall):  # no rank knows its host memory
            return limit
        if -shortfall < self._lengths.longest:
            raise ConfigError(
                f"the offloaded activations of the longest sequence, {self._lengths.longest:,} tokens, take up to "
                f"{self._lengths.longest * per_token / 2**30:,.2f} GiB of host memory, and there are "
                f"{-shortfall * per_token / 2**30:,.2f} GiB for them in each worker; set "
                f"{self._model}.enable_activation_offload=false, or lower data.max_prompt_length or "
                "data.max_response_length"
            )
        return min(limit, int(-shortfall))

    def _max_tokens(self, make_pass: Pass, reserved_bytes: int, limit: int, what: str) -> tuple[int, int]:
        """Return the largest number of tokens of a row, and the bytes of the device then in use.

        limit: number of tokens that is enough. what: kind of pass, for the error message.
        """
        memory, longest = self._memory, self._lengths.longest
        free_bytes = memory.free_bytes() - reserved_bytes
        usable_bytes = free_bytes - HEADROOM * memory.total_bytes
        fit, tokens = self._fit(make_pass, usable_bytes, what)
        tokens = max(longest, min(tokens // _ROUND * _ROUND, limit, memory.max_tokens or limit))
        while (groups := tokens // tokens_of(self._group)) > 2 and not self._fits(make_pass, groups, usable_bytes):
            tokens = max(longest, int(0.8 * tokens) // _ROUND * _ROUND)
        [used_bytes] = self._process_group.all_reduce_max(
            [memory.total_bytes - free_bytes + fit.fixed_bytes + tokens * fit.bytes_per_token]
        )
        return tokens, int(used_bytes)

    def _usable_tokens(self, fit: _LinearFit, usable_bytes: float) -> int:
        """Return how many tokens of a row fit, the minimum over the ranks."""
        [shortfall] = self._process_group.all_reduce_max([-(usable_bytes - fit.fixed_bytes) / fit.bytes_per_token])
        return int(-shortfall)

    def _fit(self, make_pass: Pass, usable_bytes: float, what: str) -> tuple[_LinearFit, int]:
        """Return the memory of a pass, and how many tokens of a row fit on all ranks.

        It is measured with groups whose completions fill a chunk of logits, and where these do not
        fit or leave no reserve, with the longest sequence by itself.
        Raises: ConfigError if that does not fit either.
        """
        needed_bytes = math.inf
        for measure in (self._measure_groups, self._measure_longest):
            fit = measure(make_pass)
            if fit is None:
                continue
            tokens = self._usable_tokens(fit, usable_bytes)
            if tokens >= self._lengths.longest:
                return fit, tokens
            needed_bytes = fit.bytes_of(self._lengths.longest)
        raise self._does_not_fit(what, needed_bytes, usable_bytes)

    def _measure_longest(self, make_pass: Pass) -> _LinearFit | None:
        """Measure the longest sequence; None if it does not fit."""
        peak = self._peak_bytes(make_pass, [self._longest])
        return None if peak is None else _LinearFit(fixed_bytes=0.0, bytes_per_token=peak / tokens_of(self._longest))

    def _measure_groups(self, make_pass: Pass) -> _LinearFit | None:
        """Measure one group, a group with twice as many completions, and two groups.

        None if not even the first fits.
        """
        one = self._peak_bytes(make_pass, [self._group])
        if one is None:
            return None
        at_most = 2 * one  # of either of the two larger passes
        if self._is_short_of(at_most):
            # What does not grow with the row counts once.
            at_most -= self._peak_bytes(make_pass, [self._smallest_group]) or 0
        large = two = None
        if not self._is_short_of(at_most):
            large = self._peak_bytes(make_pass, [self._large_group])
            two = None if large is None else self._peak_bytes(make_pass, [self._group] * 2)
        prompt_tokens = self._lengths.prompt_tokens
        completion_tokens = self._num_completions * self._lengths.response_tokens
        if large is None or two is None:  # only the smallest row fits
            return _LinearFit(fixed_bytes=0.0, bytes_per_token=one / self._lengths.longest)
        per_completion_token = (large - one) / completion_tokens
        per_prompt_token = (two - large) / prompt_tokens
        fixed = one - per_completion_token * completion_tokens - per_prompt_token * prompt_tokens
        return _LinearFit(fixed_bytes=max(fixed, 0.0), bytes_per_token=max(per_completion_token, per_prompt_token, 1.0))

    def _fits(self, make_pass: Pass, num_groups: int, usable_bytes: float) -> bool:
        """Make a pass over num_groups groups, and return whether it fits on all ranks."""
        peak = self._peak_bytes(make_pass, [self._group] * num_groups)
        [num_failed] = self._process_group.all_reduce_sum([float(peak is None or peak > usable_bytes)])
        return num_failed == 0

    def _is_short_of(self, num_bytes: int) -> bool:
        """Return whether a pass that takes so much memory must not be tried.

        One process tries it. One of several ranks that ran out of memory within a pass would leave
        the others waiting in it, so that all of them need the memory, and a reserve.
        """
        if self._process_group.size == 1:
            return False
        left = self._memory.free_bytes() - HEADROOM * self._memory.total_bytes
        [num_short] = self._process_group.all_reduce_sum([float(num_bytes > left)])
        return num_short > 0

    def _peak_bytes(self, make_pass: Pass, groups: Sequence[TrainGroup]) -> int | None:
        """Return the peak memory of a pass in bytes; None if the device has run out of memory.

        Raises: ConfigError in that case if there are several ranks: the others wait inside the
        pass, and cannot be notified.
        """
        try:
            return self._memory.peak_bytes(lambda: make_pass(groups))
        except torch.OutOfMemoryError as error:
            if self._process_group.size > 1:
                raise ConfigError(
                    f"a dry run over {sum(map(tokens_of, groups)):,} tokens ran out of memory on "
                    f"{self._memory.device_name} ({error}); {self._remedies}"
                ) from error
        gc.collect()  # reference cycles may hold tensors of the pass
        return None

    def _does_not_fit(self, what: str, needed_bytes: float, usable_bytes: float) -> ConfigError:
        needed = "more than there is" if math.isinf(needed_bytes) else f"about {needed_bytes / 2**30:,.2f} GiB"
        return ConfigError(
            f"{what} over the longest sequence, {self._lengths.longest:,} tokens, takes {needed}, and "
            f"{self._memory.device_name} has {max(usable_bytes, 0.0) / 2**30:,.2f} GiB left for it beside weights, "
            f"gradients, optimizer and a reserve; {self._remedies}"
        )


def dummy_group(policy: Policy, lengths: Lengths, *, num_completions: int) -> TrainGroup:
    """Return a group of the longest prompt and completions, whose prompt is full of images.

    A model without a vision tower gets a prompt of text. All tokens are the same one and all pixels
    are 0: the memory of a pass does not depend on them.
    """
    config = policy.model.config
    special = {*policy.banned_token_ids, *policy.family.media_token_ids(config)}
    word = next(token for token in range(len(special) + 1) if token not in special)
    image_tokens, grids = _images(policy, lengths, word)
    patches = sum(math.prod(grid) for grid in grids)
    vision = Vision(
        pixel_values=torch.zeros(patches, policy.family.values_per_patch(config)) if grids else torch.zeros(0, 0),
        grid_thw=torch.tensor(grids, dtype=torch.int64),
        hashes=(),  # their features are not cached
    )
    ones = torch.ones(lengths.response_tokens)
    sequence = TrainSequence(
        token_ids=(word,) * lengths.response_tokens,
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
        token_ids=(*image_tokens, *[word] * (lengths.prompt_tokens - len(image_tokens))),
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


def _images(policy: Policy, lengths: Lengths, word: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the tokens and grids of as many images of the largest size as fit into a prompt.

    Every image is followed by one word, and at least one token of the prompt is not an image's.
    """
    family, config = policy.family, policy.model.config
    if not family.has_vision:
        return [], []
    merge = family.spatial_merge(config)
    max_tokens = lengths.prompt_tokens - 1
    if family.tiles:
        side = family.patches_per_side(config) // merge
    else:
        tokens = max_tokens
        if lengths.image_pixels is not None:
            tokens = min(max_tokens, lengths.image_pixels // (family.patch_size(config) * merge) ** 2)
        side = max(isqrt(tokens), 1)
    grid = (1, side * merge, side * merge)
    [tokens] = family.count_image_tokens(config, torch.tensor([grid]), ())
    count = max_tokens // (tokens + 1)
    return [*[family.image_token_id(config)] * tokens, word] * count, [grid] * count
