"""The work of a step: completions, rows, tokens and floating-point operations.

The counts are those that a run reports: rows are packed by the same function, and operations are
counted by trigon/models/sizes.py, which also gives actor/model_tflops of the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from trigon.assemble.options import needs_old_logprobs
from trigon.config.plan import Plan
from trigon.config.schema import Config
from trigon.data.packing import row_lengths
from trigon.distributed.balance import partition_balanced
from trigon.models.sizes import ModelSize, forward_flops, update_flops
from trigon.tools.plan.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a step. "Each GPU" is the rank that has most; on the CPU, a worker.

    prompts: that the step learns from. sampled_prompts: with those that online filtering rejects.
    completions: completions of a prompt. sampled: completions of a step.
    sequences_per_gpu: sequences of an update on each GPU.
    update_rows, score_rows: forward passes of each GPU in an update, whose gradients accumulate,
        and in one scoring of the step's completions.
    prompt_tokens: tokens of the step's prompts, each once. response_tokens: tokens of its
        completions that are sampled. observed_tokens: those that completions observe.
    sequence_tokens: tokens of its sequences, each with its prompt and without what it observes, as
        perf/total_num_tokens.
    row_tokens: tokens of all rows of all updates, observed ones included, as actor/packed_tokens.
    """

    prompts: int
    sampled_prompts: int
    completions: int
    sampled: int
    sequences_per_gpu: int
    update_rows: int
    score_rows: int
    prompt_tokens: float
    response_tokens: float
    observed_tokens: float
    sequence_tokens: float
    row_tokens: float


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of a step, over all devices.

    prefill, decode: operations of sampling; observations belong to prefill.
    old, reference: operations of log-probabilities; 0 where they are not needed.
    update: forward and backward, as actor/model_tflops counts.
    """

    prefill: float
    decode: float
    old: float
    reference: float
    update: float

    @property
    def total(self) -> float:
        """The sum over the phases."""
        return self.prefill + self.decode + self.old + self.reference + self.update


def make_batches(config: Config, plan: Plan, lengths: Lengths, *, keep_rate: float) -> Batches:
    """Return the batches of a step.

    keep_rate: share of the groups that online filtering keeps; unused without it.
    """
    n, prompts = config.group_size, plan.prompts_per_step
    sampled_prompts = prompts
    if config.algorithm.online_filtering:
        per_round = config.prompts_per_round
        sampled_prompts = ceil(prompts / keep_rate / per_round) * per_round
    update_rows, packed = _rows(config, lengths, plan.prompts_per_update, plan.tokens_per_update_pass)
    score_rows, _ = _rows(config, lengths, prompts, plan.tokens_per_experience_pass)
    # A group that is split over rows has its prompt in each of them.
    repeated = packed / sum(group.tokens for group in lengths.groups(plan.prompts_per_update, n))
    mean_group = lengths.mean_prompt + n * lengths.completion_tokens
    observed_tokens = prompts * n * float(round(lengths.observed_tokens))
    response_tokens = prompts * n * float(lengths.completion_tokens) - observed_tokens
    return Batches(
        prompts=prompts,
        sampled_prompts=sampled_prompts,
        completions=n,
        sampled=sampled_prompts * n,
        sequences_per_gpu=ceil(plan.sequences_per_update / config.num_shares),
        update_rows=update_rows,
        score_rows=score_rows,
        prompt_tokens=prompts * lengths.mean_prompt,
        response_tokens=response_tokens,
        observed_tokens=observed_tokens,
        sequence_tokens=prompts * n * lengths.mean_prompt + response_tokens,
        row_tokens=prompts * mean_group * repeated * plan.epochs_per_step,
    )


def _rows(config: Config, lengths: Lengths, num_groups: int, budget: int) -> tuple[int, int]:
    """Return the rows of the rank that has most, and the tokens of all rows of all ranks."""
    shares, groups = config.num_shares, lengths.groups(num_groups, config.group_size)
    parts = partition_balanced([group.tokens for group in groups], shares) if shares > 1 else [range(len(groups))]
    packed = [
        row_lengths([(groups[index].prompt, groups[index].completions) for index in part], max_tokens=budget)
        for part in parts
    ]
    return max(map(len, packed)), sum(map(sum, packed))


def count_flops(
    config: Config, plan: Plan, hf_config: Any, size: ModelSize, lengths: Lengths, batches: Batches
) -> StepFlops | None:
    """Return the operations of a step; None for a family that is not counted.

    Exact for the mean step of an epoch in which all measured prompts are drawn equally often.
    """
    measured = len(lengths.prompts)
    groups = lengths.groups(measured, batches.completions)
    unobserving = replace(lengths, observed_tokens=0.0, observed_grids=()).groups(measured, batches.completions)
    forward = forward_flops(hf_config, groups)
    update = update_flops(hf_config, groups, trains_vision=size.trains_vision)
    prompts = forward_flops(hf_config, lengths.groups(measured, 0))
    turns = forward_flops(hf_config, unobserving)
    if forward is None or update is None or prompts is None or turns is None:
        return None
    learned, drawn = batches.prompts / measured, batches.sampled_prompts / measured
    repeats = 1 if config.worker.rollout.enable_prefix_caching else batches.completions
    return StepFlops(
        prefill=(prompts.total * repeats + forward.total - turns.total) * drawn,
        decode=(turns.total - prompts.total) * drawn,
        old=forward.total * learned if needs_old_logprobs(config, plan) else 0.0,
        reference=forward.total * learned if config.needs_reference else 0.0,
        update=update * learned * plan.epochs_per_step,
    )
